"""Attention of one token over pages where they lie, so that a long past is not copied at every step.

The pages of a run are the batch of one fused call. Each gives its own softmax and the logarithm of its normaliser;
weighting the results by those normalisers gives the softmax over all of them (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridkv.entries import LayerGroup
from hybridkv.errors import UsageError
from hybridkv.ops.spans import Entry, InPlace
from hybridkv.storage import TokenIndex

LEAST_BYTES = 1 << 20
"""A shorter past of one layer is gathered faster than it is read page by page."""

LEAST_PAGE_BYTES = 12 << 10
"""So is one in smaller pages."""

Fused = Callable[..., tuple[Tensor, Tensor]]


def in_place_from(group: LayerGroup, device: torch.device, dtype: torch.dtype) -> int | None:
    """Tokens from which a token group's past should be read in place, or None where it cannot or should not be."""
    parts = group.parts
    if fused(device) is None or group.is_latent or len(parts) != 2 or parts[0].shape != parts[1].shape:
        return None
    if any(getattr(torch, part.dtype) != dtype for part in parts):
        return None
    if group.entry_bytes * group.page_tokens < LEAST_PAGE_BYTES:
        return None
    return -(-LEAST_BYTES // group.entry_bytes)


def fused(device: torch.device) -> Fused | None:
    """The fused kernel that also returns normalisers, if this torch has one for the device."""
    found = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return found if device.type == "cpu" else None


def everything(span: InPlace, page_tokens: int) -> TokenIndex:
    """All tokens a span may see, in no particular order, for a layer whose scores no fused kernel can express."""
    slots = torch.cat([torch.arange(start, stop, device=span.rest.slots.device) for start, stop in span.runs])
    rows = torch.arange(page_tokens, device=slots.device).repeat(len(slots))
    return TokenIndex(
        torch.cat((slots.repeat_interleave(page_tokens), span.rest.slots)), torch.cat((rows, span.rest.rows))
    )


def attend_in_place(query: Tensor, span: InPlace, entry: Entry, scale: float, sinks: Tensor | None) -> Tensor:
    """Attend from one token to all it may see.

    Args:
        query: [heads, dim].
        span: where its past lies.
        entry: the layer's pages, keys and values of [kv heads, dim].
        scale: factor of the dot products.
        sinks: [heads], a logit per head that takes part in the softmax and has no value, or None.

    Returns:
        [heads, dim]
    """
    kernel = fused(query.device)
    if kernel is None:
        raise UsageError("no kernel reads pages in place on this device; plan the step without")
    keys, values = (view.pages for view in entry.views)
    asked = query.view(1, keys.shape[2], -1, query.shape[-1])
    pieces = [(keys[start:stop].transpose(1, 2), values[start:stop].transpose(1, 2)) for start, stop in span.runs]
    rest = entry.read_pair(0, span.rest, query.dtype)
    pieces.append((rest[0].transpose(0, 1)[None], rest[1].transpose(0, 1)[None]))
    found = [kernel(asked.expand(len(k), -1, -1, -1), k, v, scale=scale) for k, v in pieces]
    outputs = torch.cat([output for output, _ in found])
    weights = torch.cat([normaliser for _, normaliser in found])
    top = weights.amax(0)
    weights = (weights - top).exp_()
    total = weights.sum(0)
    if sinks is not None:
        total = total + (sinks.float().view_as(top) - top).exp()
    merged = torch.einsum("pgrd,pgr->grd", outputs.float(), weights) / total[..., None]
    return merged.to(query.dtype).flatten(0, 1)
