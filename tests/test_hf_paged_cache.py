"""`model.generate(cache=paged_cache(model))` is `model.generate()`, over the pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hybridkv.errors import OutOfPages, UnsupportedModel, UsageError
from hybridkv.hf.paged_cache import PagedCache, paged_cache
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from hybridkv.manager import GroupManager
from hybridkv_models import family, mode, model_types
from tests.test_hf_runner import tiny

SERVED = [name for name in model_types() if mode(name) == "packed" and not name.startswith("llama4")]
FAMILIES = sorted({family(model_type): model_type for model_type in SERVED}.values())
"""One model type of every packed family, but the one whose chunks move with the padding of a row."""

SAME_DECODE = [model_type for model_type in FAMILIES if model_type not in {"nemotron_h", "zamba2"}]
"""Those that compute one token as they compute many; the others are in test_state_models."""

GENERATE: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, PreTrainedModel]) -> PreTrainedModel:
    name = request.param
    if name not in models:
        models[name] = tiny(name)
    return models[name]


def prompts(rows: int = 2, tokens: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(1, 100, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def stock(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    cache = DynamicCache(config=model.config)
    return model.generate(ids, attention_mask=mask, cache=cache, **GENERATE, **options)  # type: ignore[no-any-return]


def manager_of(cache: PagedCache) -> GroupManager:
    return cache._runner.manager


@pytest.mark.parametrize("model", SAME_DECODE, indirect=True)
def test_generate_and_go_on_with_a_longer_prompt(model: PreTrainedModel) -> None:
    with paged_cache(model, memory="2MiB") as cache:
        ids = prompts()
        for turn in range(3):
            mask = torch.ones_like(ids)
            found = model.generate(ids, attention_mask=mask, cache=cache, **GENERATE)
            assert torch.equal(found, stock(model, ids, mask))
            assert cache.get_seq_length() == found.shape[1] - 1
            manager_of(cache).check()
            ids = torch.cat([found, prompts(2, 5 + 20 * turn, seed=turn + 1)], 1)
    assert manager_of(cache).usage().live_bytes == 0


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_left_padded_rows(model: PreTrainedModel) -> None:
    ids = prompts()
    ids[0, :17] = 0
    mask = (ids != 0).long()
    with paged_cache(model, memory="2MiB") as cache:
        found = model.generate(ids, attention_mask=mask, cache=cache, **GENERATE)
    assert torch.equal(found, stock(model, ids, mask))


@pytest.mark.parametrize("model", SAME_DECODE, indirect=True)
def test_prefill_in_chunks_and_in_uneven_passes(model: PreTrainedModel) -> None:
    ids = prompts(2, 60)
    with torch.no_grad(), paged_cache(model, memory="2MiB") as cache:
        whole = model(ids, use_cache=False).logits
        parts, at = [], 0
        for count in (2, 31, 1, 1, 20, 5):
            place = torch.arange(at, at + count)[None]
            own = {} if model.config.model_type.startswith("mamba") else {"position_ids": place}
            parts.append(model(ids[:, at : at + count], cache=cache, use_cache=True, **own).logits)
            at += count
        error = (torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()
        assert error < 1e-3
        cache.reset()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, prefill_chunk_size=16, **GENERATE)
    assert torch.equal(found, stock(model, ids, torch.ones_like(ids)))


@pytest.mark.parametrize("model", ["gemma3", "jamba", "kimi_linear", "mamba2", "llama"], indirect=True)
def test_beam_search_forks_rows(model: PreTrainedModel) -> None:
    ids = prompts()
    mask = torch.ones_like(ids)
    with paged_cache(model, memory="2MiB") as cache:
        found = model.generate(ids, attention_mask=mask, cache=cache, num_beams=3, **GENERATE)
        manager_of(cache).check()
    assert torch.equal(found, stock(model, ids, mask, num_beams=3))


@pytest.mark.parametrize("model", ["jamba", "kimi_linear", "llama"], indirect=True)
def test_rows_are_repeated_and_selected(model: PreTrainedModel) -> None:
    ids = prompts(2, 30)
    with torch.no_grad(), paged_cache(model, memory="2MiB") as cache:
        model(ids, cache=cache, use_cache=True)
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        tails = prompts(4, 6, seed=3)
        logits = model(tails, cache=cache, use_cache=True).logits
        whole = model(torch.cat([ids.repeat_interleave(2, 0), tails], 1), use_cache=False).logits
        torch.testing.assert_close(logits, whole[:, -6:], rtol=1e-3, atol=1e-3)
        cache.batch_select_indices(torch.tensor([3, 0]))
        more = prompts(2, 1, seed=4)
        logits = model(more, cache=cache, use_cache=True).logits
        whole = model(torch.cat([ids.repeat_interleave(2, 0)[[3, 0]], tails[[3, 0]], more], 1), use_cache=False).logits
        torch.testing.assert_close(logits, whole[:, -1:], rtol=1e-3, atol=1e-3)
        manager_of(cache).check()


@pytest.mark.parametrize("model", ["llama", "gemma3"], indirect=True)
def test_crop_goes_back_exactly(model: PreTrainedModel) -> None:
    ids = prompts(2, 20)
    with torch.no_grad(), paged_cache(model, memory="2MiB") as cache:
        model(ids, cache=cache, use_cache=True)
        cache.crop(0)
        cache.crop(-7)
        assert cache.get_seq_length() == 13
        again = model(ids[:, 13:], cache=cache, use_cache=True).logits
        whole = model(ids, use_cache=False).logits
        torch.testing.assert_close(again, whole[:, 13:], rtol=1e-4, atol=1e-4)
        with pytest.raises(UsageError, match="minus the number"):
            cache.crop(5)
        with pytest.raises(UsageError, match="cannot remove 21 of 20"):
            cache.crop(-21)
        cache.crop(-20)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_states_cannot_go_back(model: PreTrainedModel) -> None:
    with torch.no_grad(), paged_cache(model, memory="2MiB") as cache:
        model(prompts(), cache=cache, use_cache=True)
        with pytest.raises(UsageError, match="a state cannot go back"):
            cache.crop(-1)
        with pytest.raises(UsageError, match="linear_attention"):
            cache.activate_past_recording()
        assert not cache.is_croppable


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_a_window_that_slid_on_cannot_go_back(model: PreTrainedModel) -> None:
    with torch.no_grad(), paged_cache(model, memory="2MiB") as cache:
        model(prompts(2, 200), cache=cache, use_cache=True)
        model(prompts(2, 1), cache=cache, use_cache=True)
        with pytest.raises(UsageError, match="let go of"):
            cache.crop(-150)
        assert cache.get_seq_length() == 201
        sliding = [g for g, group in enumerate(manager_of(cache).groups) if group.kind == "sliding_attention"]
        window = dict(manager_of(cache).groups[sliding[0]].params)["window"]
        pages = manager_of(cache).token_pages(manager_of(cache).running[0], sliding[0]).pages
        assert len(pages) <= -(-window // 16) + 1


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_assisted_decoding_rolls_full_attention_back(model: PreTrainedModel) -> None:
    ids = prompts(1).repeat(1, 3)
    mask = torch.ones_like(ids)
    with paged_cache(model, memory="2MiB") as cache:
        found = model.generate(ids, attention_mask=mask, cache=cache, prompt_lookup_num_tokens=4, **GENERATE)
    assert torch.equal(found, stock(model, ids, mask))


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_a_pool_is_shared_with_packed_passes(model: PreTrainedModel) -> None:
    manager = build_manager(model, "256KiB")
    runner = ModelRunner(model, manager, poison=True)
    ids = prompts(1, 50)
    own, at = [], 0
    with torch.no_grad(), paged_cache(model, runner=runner) as cache:
        for count in (30, 1, 1, 7, 1, 10):
            own.append(model(ids[:, at : at + count], cache=cache, use_cache=True).logits)
            at += count
            seq = manager.open(np.arange(1, 60))
            manager.reserve(seq, 59 - seq.length)
            packed = runner.forward([Span(seq, np.arange(1, 60)[seq.length :])])
            manager.commit(seq, 59 - seq.length)
            manager.close(seq)
            manager.evict(40_000)
        whole = model(ids, use_cache=False).logits
        torch.testing.assert_close(torch.cat(own, 1), whole, rtol=1e-3, atol=1e-3)
        expected = model(torch.arange(1, 60)[None], use_cache=False).logits[:, -1]
        torch.testing.assert_close(packed, expected, rtol=1e-3, atol=1e-3)
        manager.check()
    assert manager.usage().live_bytes == 0
    assert runner.forward([_reserved(manager)]).isfinite().all(), "closing the cache must not close the runner"
    runner.close()


def _reserved(manager: GroupManager) -> Span:
    seq = manager.open([3])
    manager.reserve(seq, 1)
    return Span(seq, [3])


@pytest.mark.parametrize("model", ["jamba", "bamba", "gemma3"], indirect=True)
def test_the_pool_takes_no_part_in_autograd(model: PreTrainedModel) -> None:
    ids = prompts(1, 12)
    with paged_cache(model, memory="2MiB") as cache:
        parts = [
            model(ids[:, at : at + count], cache=cache, position_ids=torch.arange(at, at + count)[None]).logits
            for at, count in ((0, 7), (7, 1), (8, 4))
        ]
        pools = cache._runner.storage
        assert not any(pools.part(g, 0, 0).requires_grad for g in range(len(manager_of(cache).groups)))
        torch.testing.assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_full_pool_says_so_and_reset_frees_it(model: PreTrainedModel) -> None:
    with torch.no_grad(), paged_cache(model, memory="64KiB") as cache:
        model(prompts(1, 16), cache=cache, use_cache=True)
        with pytest.raises(OutOfPages):
            model(prompts(1, 2000), cache=cache, use_cache=True)
        assert cache.get_seq_length() == 16
        with pytest.raises(UsageError, match="holds 1 rows"):
            model(prompts(2, 1), cache=cache, use_cache=True)
        cache.reset()
        ids = prompts(2, 20)
        logits = model(ids, cache=cache, use_cache=True).logits
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("model", ["jamba", "gemma3"], indirect=True)
def test_a_batch_that_does_not_fit_takes_nothing_and_a_smaller_one_may_follow(model: PreTrainedModel) -> None:
    ids = prompts(8, 60)
    with torch.no_grad(), paged_cache(model, memory="160KiB") as cache:
        with pytest.raises(OutOfPages):
            model(ids, cache=cache, use_cache=True)
        assert (manager_of(cache).usage().live_bytes, cache.batch_size) == (0, 0)
        start = model(ids[:2, :40], cache=cache, use_cache=True).logits
        torch.testing.assert_close(start, model(ids[:2, :40], use_cache=False).logits, rtol=1e-3, atol=1e-3)
        cache.batch_repeat_interleave(2)
        live = manager_of(cache).usage().live_bytes
        with pytest.raises(OutOfPages):
            model(ids[:4, :120].repeat(1, 8), cache=cache, use_cache=True)
        assert manager_of(cache).usage().live_bytes <= live
        cache.batch_select_indices(torch.tensor([3]))
        rest = model(ids[1:2, 40:45], cache=cache, use_cache=True).logits
        own = model(ids[1:2, :45], use_cache=False).logits[:, 40:]
        torch.testing.assert_close(rest, own, rtol=1e-3, atol=1e-3)
        manager_of(cache).check()


def test_layers_with_rules_of_their_own_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        paged_cache(tiny("llama4"))


def test_queries_that_grow_with_their_position_know_it() -> None:
    model = tiny("llama4", attention_chunk_size=None, layer_types=["full_attention"] * 5)
    ids = prompts(2, 30)
    with torch.no_grad(), paged_cache(model, memory="2MiB") as cache:
        whole = model(ids, use_cache=False).logits
        parts = [model(ids[:, a:b], cache=cache, use_cache=True).logits for a, b in ((0, 20), (20, 29), (29, 30))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
