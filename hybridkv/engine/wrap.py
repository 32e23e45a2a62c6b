"""From a transformers model to an engine in one call."""

from __future__ import annotations

from typing import Any

from hybridkv.engine.detokenize import Tokenizer
from hybridkv.engine.engine import Engine
from hybridkv.errors import ConfigError
from hybridkv.hf.runner import ModelRunner, build_manager


def wrap(
    model: Any,
    tokenizer: Tokenizer | None = None,
    memory: int | str = "1GiB",
    max_batch_tokens: int = 2048,
    max_running: int = 64,
    *,
    page_tokens: int = 16,
    unit_tokens: int = 16,
    hash: str = "sha256",
    policy: str = "lru",
    checkpoint_interval: int | None = 4096,
    decode_checkpoint_interval: int | None = 64,
    logits_memory: int | str = "64MiB",
    speculate: int = 0,
    poison: bool = False,
) -> Engine:
    """Serve a Hugging Face causal language model from one pool of KV memory.

    Args:
        model: a loaded transformers model. While the engine is open its attention implementation is the engine's;
            `engine.close()` gives it back.
        tokenizer: needed for string prompts, stop strings and text.
        memory: bytes of the pool, an int or text such as "1GiB".
        max_batch_tokens: most tokens in one forward pass; longer prompts are computed in chunks.
        max_running: most requests that hold pages at once.
        page_tokens: tokens per attention page.
        unit_tokens: hash granularity; every prefix hit is a multiple of it.
        hash: "sha256", or "xxh3_128", whose collisions return another prompt's cache.
        policy: "lru" or "cost": which resume point is lost first.
        checkpoint_interval: tokens between resume points inside a long prompt, None for none.
        decode_checkpoint_interval: tokens between copies of a decoding request's states, None for none.
        logits_memory: bytes of float32 logits one pass may give for `prompt_logprobs`; such prompts are computed in
            chunks of as many tokens as that allows.
        speculate: most tokens to guess ahead from the request's own text, checked in the pass that computes its next
            one; the output is the same, sooner where text repeats itself. 0 is off.
        poison: fill pages nobody owns with NaN before every step, to find reads of foreign pages; slow.

    Raises:
        UnsupportedModel: an architecture that cannot be served, with the layer kind at fault.
        PoolTooSmall: `memory` cannot hold one request.
        ConfigError: another setting that cannot work.
    """
    if isinstance(model, str):
        raise ConfigError(
            f"wrap() takes a loaded model; load {model!r} with AutoModelForCausalLM.from_pretrained first"
        )
    if isinstance(tokenizer, str):
        raise ConfigError(
            f"wrap() takes a loaded tokenizer; load {tokenizer!r} with AutoTokenizer.from_pretrained first"
        )
    manager = build_manager(
        model,
        memory,
        page_tokens=page_tokens,
        unit_tokens=unit_tokens,
        hash=hash,
        policy=policy,
        checkpoint_interval=checkpoint_interval,
        decode_checkpoint_interval=decode_checkpoint_interval,
    )
    runner = ModelRunner(model, manager, poison=poison)
    try:
        return Engine(
            runner,
            manager,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids(model),
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            speculate=speculate,
            logits_memory=logits_memory,
        )
    except BaseException:
        runner.close()
        raise


def eos_token_ids(model: Any) -> frozenset[int]:
    """The tokens at which `model.generate` stops by default."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
