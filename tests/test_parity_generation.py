"""Generated tokens, forks and lower precision, for one model type of every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hybridkv
from hybridkv.engine.params import SamplingParams
from hybridkv.hf.runner import ModelRunner, Span, build_manager
from hybridkv_models import family
from tests.test_parity import FAMILIES, TOLERANCE, documents, tiny_model

NEW = 10


def full_pass(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] of the model's own pass over all tokens at once."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_are_the_argmax_of_full_passes(model_type: str) -> None:
    model = tiny_model(model_type)
    ids, _ = documents(model_type)
    prompts = [ids[0, :90].tolist(), ids[3, :110].tolist(), ids[1, :1].tolist(), ids[2, :65].tolist()]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with hybridkv.wrap(model, memory="4MiB", max_batch_tokens=40, poison=True) as engine:
        first = engine.generate(prompts, params, breakpoints=[[64], [96], [], [64]])
        again = engine.generate(prompts[1::-1], params)[::-1]
    assert [output.token_ids for output in again] == [output.token_ids for output in first[:2]]
    assert [output.cached_tokens for output in again] == [80, 96]
    for prompt, output in zip(prompts, first, strict=True):
        # One pass tells as much as a loop: as long as all tokens so far agree, so does what they lead to.
        expected = full_pass(model, prompt + output.token_ids[:-1]).argmax(-1)
        assert output.token_ids == expected[len(prompt) - 1 :].tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_are_those_of_generate(model_type: str) -> None:
    model = tiny_model(model_type)
    ids, _ = documents(model_type)
    prompt = ids[:1, :40]
    with hybridkv.wrap(model, memory="4MiB", max_batch_tokens=24) as engine:
        (output,) = engine.generate([prompt[0].tolist()], SamplingParams(max_tokens=8, ignore_eos=True))
    own = model.generate(
        torch.from_numpy(prompt), attention_mask=torch.ones(prompt.shape), do_sample=False, max_new_tokens=8,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert output.token_ids == own[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_forks_of_one_request_go_their_own_ways(model_type: str) -> None:
    model = tiny_model(model_type)
    ids, _ = documents(model_type)
    start = ids[0, :37].tolist()
    manager = build_manager(model, "4MiB")
    runner = ModelRunner(model, manager, poison=True)
    seq = manager.open(start)
    manager.reserve(seq, len(start))
    runner.forward([Span(seq, start)])
    manager.commit(seq, len(start))
    forks = {seq: list(start), **{manager.fork(seq): list(start) for _ in range(3)}}
    for count in (1, 7, 1):
        spans = []
        for i, (fork, known) in enumerate(forks.items()):
            new = ids[i, len(known) : len(known) + count].tolist()
            known += new
            manager.reserve(fork, count)
            spans.append(Span(fork, new))
        for span, row in zip(spans, runner.forward(spans), strict=True):
            expected = full_pass(model, forks[span.seq])[-1]
            assert (row - expected).abs().max() / expected.abs().max() < TOLERANCE
            manager.commit(span.seq, count, np.asarray(span.token_ids))
    manager.check()
    runner.close()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bfloat16_stays_close_to_the_models_own(model_type: str) -> None:
    described = family(model_type)
    assert described is not None
    ids, exact = documents(model_type)
    config = described.tiny_config()
    if model_type == "minimax":
        # Past its first pass a request advances token by token, which rounds as the model's own pass in blocks of one.
        config.block_size = 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    # Tables that depend on the size of a block are the model's own.
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    weights = tiny_model(model_type).state_dict()
    model.load_state_dict({name: v for name, v in weights.items() if v.shape == shapes[name]}, strict=False)
    with torch.no_grad():
        own = model(torch.from_numpy(ids[:1]), use_cache=False).logits[0].float()
    manager = build_manager(model, "4MiB")
    runner = ModelRunner(model, manager, poison=True)
    seq = manager.open(ids[0])
    errors, own_errors = [], []
    for count in (41, 1, 1, 60, 1, 46):
        manager.reserve(seq, count)
        rows = runner.forward([Span(seq, ids[0, seq.length : seq.length + count], count)])
        assert rows.dtype == torch.float32
        done = slice(seq.length, seq.length + count)
        errors.append((rows - exact[0, done]).abs().mean(-1))
        own_errors.append((own[done] - exact[0, done]).abs().mean(-1))
        manager.commit(seq, count)
    runner.close()
    assert torch.cat(errors).mean() < 1.5 * torch.cat(own_errors).mean()
