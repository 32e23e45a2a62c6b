"""One packed forward pass: all spans of a step as one row of tokens, whatever requests they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hybridkv.entries import LayerGroup
from hybridkv.errors import UnsupportedModel
from hybridkv.hf.attention import attention_configs, packed_pass
from hybridkv.hf.cache import PackedCache
from hybridkv.hf.checks import model_dtype
from hybridkv.hf.mixers import REPLACED
from hybridkv.hf.step import LayerMap, PackedStep, Span
from hybridkv.manager import GroupManager
from hybridkv.storage import PoolStorage


class PackedPass:
    """Runs a model over the spans of a step. Mixer hooks must be on the model."""

    def __init__(self, model: nn.Module, layers: LayerMap, layer_count: int) -> None:
        self._model = model
        self._layers = layers
        self._layer_count = layer_count
        self._dtype = model_dtype(model)
        self._configs = attention_configs(model)

    def logits(self, manager: GroupManager, storage: PoolStorage, spans: Sequence[Span]) -> Tensor:
        """Compute the spans' tokens; [rows, vocab] of the wanted ones, in the order given.

        Raises:
            UsageError: spans that were not reserved.
            UnsupportedModel: a layer computed its attention or its state by itself, so the logits would be wrong.
        """
        step = PackedStep(manager, storage, self._layers, spans, self._dtype)
        states, tokens = frozenset(self._layers.states), frozenset(self._layers.tokens)
        with packed_pass(self._configs, step):
            output = self._model(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                cache=PackedCache(step, self._layer_count, states, tokens),
                use_cache=True,
                logits_to_keep=step.wanted,
                return_dict=True,
            )
        self._check_served(step, manager.groups)
        logits: Tensor = output.logits[0]
        return logits

    def _check_served(self, step: PackedStep, groups: Sequence[LayerGroup]) -> None:
        """Modeling code of its own may bypass what we replace; the packed cache gives it no past, so it must not pass.

        Raises:
            UnsupportedModel: it does.
        """
        advanced, attended = self._layers.parts <= step.advanced, self._layers.tokens.keys() <= step.attended
        if advanced and attended:
            return
        if advanced:
            found, layer = self._layers.tokens, min(self._layers.tokens.keys() - step.attended)
            what, names = "attention", "the attention of config._attn_implementation (ALL_ATTENTION_FUNCTIONS)"
        else:
            layer, part = min(self._layers.parts - step.advanced)
            found, names = self._layers.states, f"functions of its module named {', '.join(REPLACED)}"
            what = f"{groups[found[layer][0]].parts[part].name} state"
        kind = groups[found[layer][0]].kind
        config: Any = self._model.config
        raise UnsupportedModel(
            f"model type {getattr(config, 'model_type', '?')!r}: layer {layer} ({kind}) computed its {what} with code "
            f"of its own, which sees no past here; it must go through {names}. Load the model with the modeling code "
            "of transformers (trust_remote_code=False), or run its own generate()"
        )
