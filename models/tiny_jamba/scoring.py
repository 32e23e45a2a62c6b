"""Bits per byte of a byte-level model, and the chunked scan that makes measuring it quick."""

from __future__ import annotations

import contextlib
import json
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.jamba import modeling_jamba

from hybridkv.ops.selective_scan import selective_scan

HELD_OUT = Path(__file__).with_name("held_out.json")


@contextlib.contextmanager
def chunked_scan() -> Iterator[None]:
    """Jamba's stock scan walks token by token in Python; ours replaces it inside this block and trains as well."""
    stock = modeling_jamba.mamba_selective_scan

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Any:
        wanted = {key: options[key] for key in ("D", "z", "delta_bias", "delta_softplus") if key in options}
        skip = wanted.pop("D", None)
        y, state = selective_scan(x, dt, A, B, C, skip, **wanted)
        return (y, state) if options.get("return_last_state") else y

    modeling_jamba.mamba_selective_scan = scan
    try:
        yield
    finally:
        modeling_jamba.mamba_selective_scan = stock


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_source() -> list[bytes]:
    """The first bytes of each held-out standard-library file."""
    facts = json.loads(HELD_OUT.read_text())
    root = standard_library()
    return [(root / name).read_bytes()[: facts["bytes_per_file"]] for name in facts["standard_library"]]


@torch.inference_mode()
def bits_per_byte(model: Any, texts: Sequence[bytes], window: int, *, batch: int = 8) -> float:
    """Mean over every byte of `texts`, cut into windows that see nothing of each other; each starts after `<|bos|>`."""
    pieces = [text[i : i + window] for text in texts for i in range(0, len(text), window)]
    pieces.sort(key=len)
    bits, count = 0.0, 0
    with chunked_scan():
        for start in range(0, len(pieces), batch):
            group = pieces[start : start + batch]
            longest = max(map(len, group))
            ids = torch.full((len(group), longest + 1), model.config.bos_token_id)
            labels = torch.full((len(group), longest), -100)
            for row, piece in enumerate(group):
                labels[row, : len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
                ids[row, 1 : len(piece) + 1] = labels[row, : len(piece)]
            logits = model(ids[:, :-1], use_cache=False).logits
            nats = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            bits += float(nats) / math.log(2)
            count += sum(map(len, group))
    return bits / count
