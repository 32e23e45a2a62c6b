"""Runs an unmodified Hugging Face model over the pool: one forward pass per step for any mix of requests.

Models that cannot share a pass get one for each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridkv.config import parse_bytes
from hybridkv.entries import group_entries
from hybridkv.errors import UsageError
from hybridkv.hf.adapters import Adapters, base_model
from hybridkv.hf.by_adapter import PassByAdapter
from hybridkv.hf.checks import check_groups, check_model, dtype_name, is_described, is_single
from hybridkv.hf.mixers import MixerHooks
from hybridkv.hf.packed import PackedPass
from hybridkv.hf.proof import Pass, prove
from hybridkv.hf.single import SinglePass
from hybridkv.hf.step import LayerMap, Span
from hybridkv.manager import GroupManager
from hybridkv.sequence import Sequence as Request
from hybridkv.storage import PoolStorage

__all__ = ["ModelRunner", "Span", "build_manager"]


def build_manager(
    model: nn.Module,
    /,
    memory: int | str,
    *,
    page_tokens: int | Mapping[str, int] = 16,
    **options: Any,
) -> GroupManager:
    """A manager for a loaded model, with the cache entries of its config in the dtype its weights have.

    Args:
        model: a transformers causal language model, or a PeftModel of one.
        memory: the pool, an int of bytes or "1GiB".
        page_tokens: tokens per attention page, one number or one per kind.
        options: of `GroupManager`.

    Raises:
        UnsupportedModel: the model cannot be served.
        ConfigError: a setting that cannot work; PoolTooSmall where the pool has no room for one slab per group.
    """
    entries = check_model(model)
    model = base_model(model)
    config = getattr(model, "config", None)
    options.setdefault("dtype", dtype_name(model))
    options.setdefault("model", str(getattr(config, "name_or_path", "") or getattr(config, "model_type", "")))
    return GroupManager(group_entries(entries, page_tokens), parse_bytes(memory), **options)


class ModelRunner:
    """One model, one pool, one packed forward pass per call. The model behaves as before outside `forward`.

    Attributes:
        model, manager, storage: what it connects; the model without the PeftModel around it.
        adapters: what PEFT has loaded into the model.
        hooks: on the functions of the model's modules.
        vocab_size: entries of a logits row.
        max_positions: the model's context length in tokens, or None if it has none.
        layers: where each layer keeps its tokens and states.
        layer_count: of the model.
        losses: how often page copies were lost to a failure. Whoever holds pages or hits cached ones across an
            increase holds garbage.
        abandoned: sequences whose owner was garbage collected; `reap` closes them.
    """

    def __init__(self, model: nn.Module, manager: GroupManager, *, poison: bool = False) -> None:
        """Allocate the pool and get between the model and its caches.

        Args:
            model: a transformers causal language model in eval mode, on one device, or a PeftModel of one.
            manager: for the same layers, e.g. from `build_manager`.
            poison: fill pages nobody owns with NaN before every pass, to prove that none of them is read.

        Raises:
            UnsupportedModel: the model cannot be served; one of a type that nobody described is tried out first.
            ConfigError: the manager's groups are not this model's.
        """
        entries = check_model(model)
        check_groups(entries, manager.groups)
        config: Any = base_model(model).config
        text = config.get_text_config(decoder=True)
        self.model = base_model(model)
        self.adapters = Adapters(model)
        self.manager = manager
        self.vocab_size = int(text.vocab_size)
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.storage = PoolStorage(manager.layout, next(self.model.parameters()).device, poison=poison)
        self.layers = LayerMap(manager.groups)
        self.layer_count = max(int(text.num_hidden_layers), self.layers.layers)
        self.losses = 0
        self.abandoned: list[Request] = []
        self._pass = PassByAdapter(self._make_pass(self.layers), self.adapters)
        self.hooks = MixerHooks(self.model)
        if not is_described(self.model):
            self._prove()

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Compute every span's tokens, in one pass for each LoRA adapter, and store what later tokens need.

        Runs the manager's pending page copies first, so all reservations of the step must have been made, and each
        span must be committed before the next pass. If it raises, states may be half advanced: close the sequences
        instead (nothing of an unfinished step is ever published).

        Args:
            spans: at least one, each of another sequence; the tokens from `seq.length` on, all reserved.

        Returns:
            float32 [rows, vocab], the logits after each span's last `rows` tokens, in the order given.

        Raises:
            UsageError: the runner is closed, the model was put into training mode, or spans that were not reserved.
            UnknownAdapter: an adapter that is not loaded any more.
            UnsupportedModel: a layer computed its attention or its state by itself, so the logits would be wrong.
        """
        if self.closed:
            raise UsageError("this runner is closed")
        if self.model.training:
            raise UsageError("the model is in training mode; call model.eval() before the next pass")
        # Also without autograd, a tensor that counts its versions costs; a decode step is a thousand tiny operations.
        with torch.inference_mode():
            self.settle()
            logits = self._pass.logits(self.manager, self.storage, spans)
        # Copied outside, so that a caller may change it in place.
        return logits.to(torch.float32, copy=True)

    def copy_pages(self) -> None:
        """Run the manager's pending page copies. If that fails, pages may hold anything and `losses` has grown."""
        self.losses += 1
        self.storage.apply(self.manager.take_copies())
        self.losses -= 1

    def settle(self) -> None:
        """Run the manager's pending page copies; in poison mode, fill the pages nobody owns with NaN."""
        self.copy_pages()
        if self.storage.poisoned:
            for g in range(len(self.manager.groups)):
                self.storage.poison(g, self.manager.free_slots(g))

    def reap(self) -> None:
        """Close the sequences of caches that were garbage collected, which must not call the manager themselves."""
        while self.abandoned:
            seq = self.abandoned.pop()
            if not seq.closed:
                self.manager.close(seq, cache=False)

    @property
    def closed(self) -> bool:
        """Whether the model has its own functions back, so that nothing can be computed over pages any more."""
        return self.hooks.closed

    def close(self) -> None:
        """Give the model's modules back their own functions. Calling it again changes nothing."""
        self.hooks.close()

    def _make_pass(self, layers: LayerMap) -> Pass:
        if is_single(self.model):
            return SinglePass(self.model, layers)
        return PackedPass(self.model, layers, self.layer_count)

    def _prove(self) -> None:
        try:
            prove(self.model, self.manager.groups, self._make_pass, self.vocab_size, self.manager.unit_tokens)
        except BaseException:
            self.close()
            raise
