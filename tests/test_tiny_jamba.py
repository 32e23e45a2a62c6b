"""models/tiny_jamba loads like any Hugging Face model, keeps every byte, and predicts text it was not trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybridkv_models.tiny_jamba import scoring

FOLDER = Path(__file__).parents[1] / "models" / "tiny_jamba"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_weights_are_small() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 5_000_000


def test_is_a_hybrid_of_state_space_and_attention_layers() -> None:
    kinds = AutoConfig.from_pretrained(FOLDER).layer_types
    assert kinds.count("linear_attention") == 6
    assert kinds.count("full_attention") == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f(x):\n\treturn x  # two  spaces, trailing \r\n",
        "naïve café, Ελληνικά, 日本語, עברית, 🎉👩‍👩‍👧",
        "\x00\x01\x7f\ufeff\u2028",
        "text that spells <|bos|>, <|eos|> and <|pad|>",
        "don't , it 's . spaced",
    ],
)
def test_tokenizer_keeps_text_and_gives_one_token_a_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_keeps_arbitrary_unicode(tokenizer: Any) -> None:
    source = random.Random(0)
    planes = [*range(0xD800), *range(0xE000, 0x110000)]
    for _ in range(50):
        text = "".join(map(chr, source.choices(planes, k=100)))
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_special_tokens_follow_the_bytes(tokenizer: Any, model: Any) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert model.config.vocab_size == len(tokenizer) == 259
    assert model.generation_config.eos_token_id == 258


def test_held_out_bits_per_byte(model: Any) -> None:
    facts = json.loads(scoring.HELD_OUT.read_text())
    measured = scoring.bits_per_byte(model, scoring.held_out_source(), facts["window"])
    assert measured <= 2.6
    # Patch releases of Python change a few lines of the held-out files.
    assert measured == pytest.approx(facts["bits_per_byte"]["standard_library"], abs=0.03)


def test_windows_of_unequal_length_share_a_batch(model: Any) -> None:
    text = scoring.held_out_source()[0][:1000]
    first, second = (scoring.bits_per_byte(model, [part], 700) for part in (text[:700], text[700:]))
    together = scoring.bits_per_byte(model, [text], 700)
    assert together == pytest.approx(0.7 * first + 0.3 * second, rel=1e-4)
