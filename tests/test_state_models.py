"""Types with states: heads scanned one by one, configs away from the tiny one, and decoding that is not prefill."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hybridkv.hf.paged_cache import paged_cache
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from tests.test_hf_paged_cache import GENERATE, prompts
from tests.test_hf_runner import IDS, tiny
from tests.test_multimodal_models import check_greedy

OWN_DECODE = ("nemotron_h", "zamba2")
"""Types whose one-token decode in transformers is not what their pass over many tokens computes (see their NOTE)."""


@pytest.mark.parametrize("changes", [{"position_embedding_type": None}, {"num_local_experts": 0}])
def test_granite_without_positions_or_without_experts(changes: dict[str, object]) -> None:
    check_greedy(tiny("granitemoehybrid", **changes))


def test_falcon_h1_with_a_gated_norm_and_a_limit_on_the_time_step() -> None:
    check_greedy(tiny("falcon_h1", mamba_rms_norm=True, time_step_limit=(0.6, 1.5)))


def test_zamba_of_four_heads() -> None:
    check_greedy(tiny("zamba", n_mamba_heads=4))


def test_every_head_of_a_state_is_carried_on() -> None:
    model = tiny("zamba")
    manager = build_manager(model, "1MiB")
    runner = ModelRunner(model, manager, poison=True)
    (g, e) = runner.layers.states[0]
    seq = manager.open(IDS)
    manager.reserve(seq, 20)
    runner.forward([Span(seq, IDS[:20])])
    manager.commit(seq, 20)
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.from_numpy(IDS[None, :20]), cache=own)
    slot = manager.state_pages(seq, g).slot
    torch.testing.assert_close(runner.storage.part(g, e, 1)[slot], own.layers[0].recurrent_states[0][0])
    runner.close()


@pytest.mark.parametrize("model_type", OWN_DECODE)
def test_a_paged_cache_decodes_as_the_model_itself_does(model_type: str) -> None:
    model = tiny(model_type)
    ids, own = prompts(), DynamicCache(config=model.config)
    with paged_cache(model, memory="2MiB") as cache:
        for turn in range(3):
            mask = torch.ones_like(ids)
            found = model.generate(ids, attention_mask=mask, cache=cache, **GENERATE)
            assert torch.equal(found, model.generate(ids, attention_mask=mask, cache=own, **GENERATE))
            ids = torch.cat([found, prompts(2, 5 + 20 * turn, seed=turn + 1)], 1)


@pytest.mark.parametrize("model_type", OWN_DECODE)
def test_uneven_passes_over_a_paged_cache_are_those_over_the_models_own(model_type: str) -> None:
    model = tiny(model_type)
    ids, own = prompts(2, 60), DynamicCache(config=model.config)
    with torch.no_grad(), paged_cache(model, memory="2MiB") as cache:
        start = 0
        for count in (2, 31, 1, 1, 20, 5):
            place = torch.arange(start, start + count)[None]
            logits, expected = (
                model(ids[:, start : start + count], cache=used, use_cache=True, position_ids=place).logits
                for used in (cache, own)
            )
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
            start += count
