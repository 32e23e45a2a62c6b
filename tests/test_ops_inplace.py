"""When a past is read where it lies, in a real pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridkv.entries import CacheEntry, LayerGroup, attention_parts, group_entries
from hybridkv.hf import step
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from hybridkv.ops import inplace
from hybridkv.ops.inplace import in_place_from
from hybridkv_models import family

CPU = torch.device("cpu")


def group(kv_heads: int, dim: int, dtype: str = "float32", value_dim: int | None = None) -> LayerGroup:
    (only,) = group_entries([CacheEntry(0, "full_attention", attention_parts(kv_heads, dim, dtype, value_dim))])
    return only


def test_pages_must_be_large_enough_to_be_worth_a_call_each() -> None:
    assert in_place_from(group(8, 128), CPU, torch.float32) == (1 << 20) // (2 * 8 * 128 * 4)
    assert in_place_from(group(1, 16), CPU, torch.float32) is None


def test_what_the_kernel_cannot_take_is_gathered() -> None:
    assert in_place_from(group(8, 128, value_dim=64), CPU, torch.float32) is None
    assert in_place_from(group(8, 128, "bfloat16"), CPU, torch.float32) is None
    assert in_place_from(group(8, 128), torch.device("meta"), torch.float32) is None


@pytest.mark.parametrize("model_type", ["gemma3", "gemma2", "gpt_oss", "jamba", "llama"])
def test_a_pass_that_reads_in_place_gives_the_models_own_logits(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inplace, "LEAST_BYTES", 1)
    monkeypatch.setattr(inplace, "LEAST_PAGE_BYTES", 1)
    described = family(model_type)
    assert described is not None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(described.tiny_config(), dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(1, 100, 320)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    read: list[int] = []
    plan = step.plan_tokens
    monkeypatch.setattr(step, "plan_tokens", lambda *args: (found := plan(*args), read.append(len(found.in_place)))[0])
    manager = build_manager(model, "2MiB")
    runner = ModelRunner(model, manager, poison=True)
    seq = manager.open(ids)
    for count in (300, *[1] * 20):
        manager.reserve(seq, count)
        (row,) = runner.forward([Span(seq, ids[seq.length : seq.length + count])])
        manager.commit(seq, count)
        torch.testing.assert_close(row, expected[seq.length - 1], rtol=1e-3, atol=1e-3)
    runner.close()
    assert sum(read) >= 20, "full layers hold 18 adjacent pages"
