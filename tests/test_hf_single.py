"""Models that run one request a forward pass, on caches of their own kind filled from pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import hybridkv
from hybridkv.entries import CacheEntry
from hybridkv.errors import UnsupportedModel, UsageError
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from hybridkv.manager import GroupManager
from hybridkv_models import family, mode, model_types

SINGLE = [model_type for model_type in model_types() if mode(model_type) == "single"]
STOCK = [model_type for model_type in SINGLE if model_type != "minimax"]
"""Those that take a cache of transformers' own class."""

IDS = np.random.default_rng(0).integers(1, 100, 90)


def tiny(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    described = family(model_type)
    assert described is not None
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(described.tiny_config(), dtype=dtype)
    return model.eval()


def entries_by_layer(model: PreTrainedModel) -> dict[int, list[CacheEntry]]:
    described = family(model.config.model_type)
    assert described is not None
    found: dict[int, list[CacheEntry]] = {}
    for entry in described.entries(model.config):
        found.setdefault(entry.layer, []).append(entry)
    return found


def shapes(entry: CacheEntry) -> list[tuple[tuple[int, ...], str]]:
    return [(part.shape, f"torch.{part.dtype}") for part in entry.parts]


def start(model: PreTrainedModel, **options: Any) -> tuple[GroupManager, ModelRunner]:
    manager = build_manager(model, "2MiB", **options)
    return manager, ModelRunner(model, manager, poison=True)


def stock_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(IDS)[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


# What they declare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", STOCK)
def test_entries_are_all_that_a_cache_of_transformers_stores(model_type: str, dtype: torch.dtype) -> None:
    model = tiny(model_type, dtype)
    cache = DynamicCache(config=model.config)
    ids = torch.from_numpy(IDS)[None]
    with torch.no_grad():
        model(ids[:, :60], cache=cache, use_cache=True)
        model(ids[:, 60:61], cache=cache, use_cache=True)
    declared = entries_by_layer(model)
    for layer, stored in enumerate(cache.layers):
        *states, tokens = declared.pop(layer)
        window = dict(tokens.params).get("window", 62)
        assert window == getattr(stored, "sliding_window", 62)
        assert stored.keys.shape[2] == stored.values.shape[2] == min(window - 1, 61)
        index = getattr(stored, "indexer_keys", None)
        kept = [((each.shape[1], each.shape[3]), str(each.dtype)) for each in (stored.keys, stored.values)]
        assert shapes(tokens) == kept + ([] if index is None else [((index.shape[2],), str(index.dtype))])
        found = (*getattr(stored, "conv_states", {}).values(), *getattr(stored, "recurrent_states", {}).values())
        kept = [(tuple(state.shape[1:]), str(state.dtype)) for state in found if state is not None]
        assert [shape for entry in states for shape in shapes(entry)] == kept
    assert not declared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_entries_of_minimax_are_what_its_own_cache_stores(dtype: torch.dtype) -> None:
    model = tiny("minimax", dtype)
    cache = MiniMaxCache()
    with torch.no_grad():
        model(torch.from_numpy(IDS)[None], cache=cache, use_cache=True)
    for layer, (entry,) in entries_by_layer(model).items():
        if entry.kind == "linear_attention":
            state: Any = cache.get_linear_cache(layer)
            assert shapes(entry) == [(tuple(state.shape[1:]), str(state.dtype))]
        else:
            stored = cache.layers[layer]
            kept = [((each.shape[1], each.shape[3]), str(each.dtype)) for each in (stored.keys, stored.values)]
            assert shapes(entry) == kept


@pytest.mark.parametrize("model_type", SINGLE)
def test_their_tiny_models_have_windows_inside_pages(model_type: str) -> None:
    model = tiny(model_type)
    entries = [entry for found in entries_by_layer(model).values() for entry in found]
    assert model.config.num_hidden_layers >= 4
    assert all(window % 16 for entry in entries if (window := dict(entry.params).get("window")))


# How they run


@pytest.mark.parametrize("model_type", SINGLE)
def test_rows_of_several_requests_and_of_spans_that_are_cut(model_type: str) -> None:
    model = tiny(model_type)
    expected = stock_logits(model)
    manager, runner = start(model, checkpoint_interval=16)
    seqs = [manager.open(IDS, salt=str(i), breakpoints=[32]) for i in range(3)]
    for counts, rows in (([41, 1, 70], [11, 1, 70]), ([1, 49, 20], [1, 25, 1])):
        spans = []
        for seq, count, wanted in zip(seqs, counts, rows, strict=True):
            manager.reserve(seq, count)
            spans.append(Span(seq, IDS[seq.length : seq.length + count], wanted))
        logits = runner.forward(spans)
        ends = [seq.length + count for seq, count in zip(seqs, counts, strict=True)]
        wanted_rows = torch.cat([expected[end - wanted : end] for end, wanted in zip(ends, rows, strict=True)])
        torch.testing.assert_close(logits, wanted_rows, rtol=1e-4, atol=1e-4)
        for seq, count in zip(seqs, counts, strict=True):
            manager.commit(seq, count)
    runner.close()


@pytest.mark.parametrize("model_type", STOCK)
def test_a_filled_cache_is_the_one_transformers_would_have(model_type: str) -> None:
    model = tiny(model_type)
    seen: list[Any] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs["cache"]
        seen.append([(*sizes(cache, layer), tensors(cache.layers[layer])) for layer in range(len(cache))])

    manager, runner = start(model)
    seq = manager.open(IDS)
    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    for count in (60, 1):
        manager.reserve(seq, count)
        runner.forward([Span(seq, IDS[seq.length : seq.length + count])])
        manager.commit(seq, count)
    handle.remove()
    runner.close()
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.from_numpy(IDS[:60])[None], cache=stock, use_cache=True)
    for layer, (length, masks, found) in enumerate(seen[-1]):
        assert (length, masks) == sizes(stock, layer)
        for own, expected in zip(found, tensors(stock.layers[layer]), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


def sizes(cache: Any, layer: int) -> tuple[int, tuple[int, int]]:
    return cache.get_seq_length(layer), cache.get_mask_sizes(5, layer)


def tensors(stored: Any) -> list[torch.Tensor]:
    states = (*getattr(stored, "conv_states", {}).values(), *getattr(stored, "recurrent_states", {}).values())
    found = (stored.keys, stored.values, getattr(stored, "indexer_keys", None), *states)
    return [tensor.clone() for tensor in found if tensor is not None]


def test_a_span_is_cut_only_where_a_state_is_kept() -> None:
    model = tiny("minimax")
    manager, runner = start(model, checkpoint_interval=None)
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    seq = manager.open(IDS, breakpoints=[32])
    for count in (10, 50, 1):
        manager.reserve(seq, count)
        runner.forward([Span(seq, IDS[seq.length : seq.length + count])])
        manager.commit(seq, count)
    handle.remove()
    runner.close()
    assert sizes == [10, 22, 28, 1]


@pytest.mark.parametrize("model_type", SINGLE)
def test_every_kind_of_page_is_read_again(model_type: str) -> None:
    model = tiny(model_type)
    for g in range(len(build_manager(model, "2MiB").groups)):
        manager, runner = start(model)
        seq = manager.open(IDS)
        manager.reserve(seq, 40)
        assert runner.forward([Span(seq, IDS[:40])]).isfinite().all()
        manager.commit(seq, 40)
        manager.reserve(seq, 1)
        held = [manager.state_pages(seq, g).slot] if manager.groups[g].is_state else manager.token_pages(seq, g).slots
        runner.storage.poison(g, np.array(held, np.int64))
        assert runner.forward([Span(seq, IDS[40:41])]).isnan().any()
        runner.close()


def test_the_model_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("zaya")
    model.set_attn_implementation("eager")
    manager, runner = start(model)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(model.config._attn_implementation))
    seq = manager.open(IDS)
    manager.reserve(seq, 4)
    runner.forward([Span(seq, IDS[:4])])
    runner.close()
    assert seen == ["eager"]


# What is refused


def test_spans_that_cannot_be_computed() -> None:
    manager, runner = start(tiny("minimax"))
    seq = manager.open(IDS)
    with pytest.raises(UsageError, match="at least one span"):
        runner.forward([])
    with pytest.raises(UsageError, match="0 reserved"):
        runner.forward([Span(seq, IDS[:4])])
    runner.close()


def test_a_layer_that_stores_nothing_is_an_error() -> None:
    model: Any = tiny("zaya")
    model.model.layers[2].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    manager, runner = start(model)
    seq = manager.open(IDS)
    manager.reserve(seq, 4)
    with pytest.raises(UnsupportedModel, match="'zaya': layer 2 stored nothing in the cache"):
        runner.forward([Span(seq, IDS[:4])])
    runner.close()


def test_a_cache_for_generate_is_refused() -> None:
    model = tiny("minimax")
    with pytest.raises(UnsupportedModel, match=r"'minimax' runs on a cache of its own.*hybridkv.wrap\(\)"):
        hybridkv.paged_cache(model)
    with hybridkv.wrap(model, memory="2MiB") as engine, pytest.raises(UnsupportedModel, match="cache of its own"):
        engine.paged_cache()
