"""What a paged cache leaves behind: nothing, whether it is closed, collected, fails, or outlives its runner."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.jamba import modeling_jamba

from hybridkv.errors import UsageError
from hybridkv.hf.mixers import Wrapped
from hybridkv.hf.paged_cache import paged_cache
from hybridkv.hf.runner import ModelRunner, build_manager
from tests.test_hf_paged_cache import GENERATE, prompts
from tests.test_hf_runner import tiny


@pytest.fixture
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_closing_takes_everything_away_again(model: PreTrainedModel) -> None:
    assert not isinstance(modeling_jamba.mamba_selective_scan, Wrapped)
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    cache = paged_cache(model, memory="2MiB")
    assert isinstance(modeling_jamba.mamba_selective_scan, Wrapped)
    cache.close()
    cache.close()
    assert not isinstance(modeling_jamba.mamba_selective_scan, Wrapped)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
    with pytest.raises(UsageError, match="closed"), torch.no_grad():
        model(prompts(), cache=cache, use_cache=True)


@pytest.mark.parametrize("model", ["jamba", "kimi_linear", "llama"], indirect=True)
def test_a_cache_over_a_closed_runner_says_so(model: PreTrainedModel) -> None:
    runner = ModelRunner(model, build_manager(model, "2MiB"))
    with torch.no_grad(), paged_cache(model, runner=runner) as cache:
        model(prompts(2, 20), cache=cache, use_cache=True)
        runner.close()
        with pytest.raises(UsageError, match="make a new cache"):
            model(prompts(2, 20), cache=cache, use_cache=True)
    assert runner.manager.usage().live_bytes == 0
    with pytest.raises(UsageError, match="runner is closed"):
        paged_cache(model, runner=runner)


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_a_cache_nobody_closed_leaves_nothing_behind(model: PreTrainedModel) -> None:
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    gc.disable()
    try:
        ids = prompts()
        model.generate(ids, attention_mask=torch.ones_like(ids), cache=paged_cache(model, memory="2MiB"), **GENERATE)
        assert not isinstance(modeling_jamba.mamba_selective_scan, Wrapped)
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
    finally:
        gc.enable()


def test_a_model_that_holds_its_cache_can_be_collected() -> None:
    model = tiny("jamba")
    model.own_cache = paged_cache(model, memory="2MiB")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not isinstance(modeling_jamba.mamba_selective_scan, Wrapped)


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_rows_of_a_collected_cache_are_given_back_to_the_pool_it_shared(model: PreTrainedModel) -> None:
    runner = ModelRunner(model, build_manager(model, "2MiB"))
    with torch.no_grad():
        model(prompts(), cache=paged_cache(model, runner=runner), use_cache=True)
        assert runner.manager.usage().live_bytes > 0, "collection alone must not touch the manager"
        runner.reap()
        assert runner.manager.usage().live_bytes == 0
    assert not runner.closed
    runner.close()


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_a_failure_while_pages_are_copied_is_not_forgotten(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(model, build_manager(model, "2MiB"))

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    with torch.no_grad(), paged_cache(model, runner=runner) as cache:
        model(prompts(), cache=cache, use_cache=True)
        with monkeypatch.context() as broken:
            broken.setattr(runner.storage, "apply", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                runner.settle()
        with pytest.raises(UsageError, match=r"call reset\(\)"):
            model(prompts(), cache=cache, use_cache=True)
        cache.reset()
        logits = model(prompts(), cache=cache, use_cache=True).logits
        torch.testing.assert_close(logits, model(prompts(), use_cache=False).logits, rtol=1e-3, atol=1e-3)
    runner.close()


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_other_caches_see_the_stock_model_meanwhile(model: PreTrainedModel) -> None:
    ids = prompts(1, 30)
    with torch.no_grad():
        before = model(ids, cache=DynamicCache(config=model.config), use_cache=True).logits
        with paged_cache(model, memory="2MiB") as cache:
            model(prompts(1, 9), cache=cache, use_cache=True)
            assert torch.equal(model(ids, cache=DynamicCache(config=model.config), use_cache=True).logits, before)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_runner_of_another_model_is_refused(model: PreTrainedModel) -> None:
    other = tiny("llama")
    runner = ModelRunner(other, build_manager(other, "1MiB"))
    with pytest.raises(UsageError, match="another model"):
        paged_cache(model, runner=runner)
    runner.close()
