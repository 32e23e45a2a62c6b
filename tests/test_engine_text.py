"""Incremental text: whole characters, stop strings across token borders, nothing lost."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridkv.engine.detokenize import Detokenizer, OutputText, StopStrings


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, as in the embedded model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.fixture(scope="module")
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Sentencepiece style: words with a leading mark, bytes as a fallback, the first space stripped."""
    words = ["\u2581", "\u2581the", "\u2581cat", "s", "at"]
    vocab = {token: i for i, token in enumerate(["<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def pieces(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_characters_of_many_bytes_come_out_whole(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "na\u00efve \u4f60\u597d \U0001f680 e\u0301 done"
    tokens = byte_tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    got = pieces(byte_tokenizer, tokens)
    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got)
    assert all(len(piece) <= 1 for piece in got)


def test_an_unfinished_character_appears_only_at_the_end(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = byte_tokenizer.encode("ok\u20ac")[:-1]
    got = pieces(byte_tokenizer, tokens)
    assert got[:-1] == ["o", "k", "", ""]
    assert got[-1] == "\ufffd"


def test_random_bytes_equal_the_whole_decoding(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        low = rng.choice([0, 128, 192])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = [rng.randrange(low, len(alphabet)) for _ in range(rng.randrange(1, 120))]
        assert "".join(pieces(byte_tokenizer, tokens)) == byte_tokenizer.decode(tokens)


def test_a_long_run_of_broken_bytes_does_not_stall(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    broken = byte_tokenizer.convert_tokens_to_ids(sorted(pre_tokenizers.ByteLevel.alphabet())[-1])
    got = pieces(byte_tokenizer, [broken] * 600)
    assert "".join(got) == byte_tokenizer.decode([broken] * 600)
    assert len("".join(got[:20])) > 5


def test_byte_fallback_and_stripped_first_spaces(fallback_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = fallback_tokenizer.convert_tokens_to_ids
    tokens = [ids(t) for t in ["\u2581the", "\u2581cat", "s", "\u2581", "<0xE2>", "<0x82>", "<0xAC>", "\u2581the"]]
    got = pieces(fallback_tokenizer, tokens)
    assert got == ["the", " cat", "s", " ", "", "", "\u20ac", " the", ""]
    assert "".join(got) == fallback_tokenizer.decode(tokens)


def test_special_tokens_leave_no_trace(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = byte_tokenizer.encode("ab")
    special = byte_tokenizer.eos_token_id
    assert pieces(byte_tokenizer, [special, tokens[0], special, special, tokens[1]]) == ["", "a", "", "", "b", ""]


def feed(stop: list[str], parts: list[str]) -> tuple[list[str], bool]:
    stops = StopStrings(stop)
    out = []
    for part in parts:
        out.append(stops.push(part))
        if stops.found:
            return out, True
    return [*out, stops.flush()], False


@pytest.mark.parametrize(
    ("stop", "parts", "out", "found"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["END"], ["a E", "N", "D b"], ["a ", "", ""], True),
        (["END"], ["a E", "N", "d"], ["a ", "", "ENd", ""], False),
        (["END"], ["a EN"], ["a ", "EN"], False),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], True),
        (["\n\n", "###"], ["x\n", "#", "##"], ["x", "\n", ""], True),
        (["bc", "abcd"], ["zabc"], ["za"], True),
        (["x"], ["yxz"], ["y"], True),
    ],
)
def test_stop_strings(stop: list[str], parts: list[str], out: list[str], found: bool) -> None:
    assert feed(stop, parts) == (out, found)


def test_stop_strings_equal_a_search_of_the_whole_text() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        text = "".join(rng.choice("ab") for _ in range(40))
        stop = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        parts, rest = [], text
        while rest:
            size = rng.randrange(1, 5)
            parts.append(rest[:size])
            rest = rest[size:]
        out, found = feed(stop, parts)
        ends = [text.find(one) + len(one) for one in stop if one in text]
        if not ends:
            assert not found
            assert "".join(out) == text
            continue
        assert found
        seen = "".join(parts[: len(out)])
        assert "".join(out) == seen[: min(seen.find(one) for one in stop if one in seen)]


@pytest.mark.parametrize("parts", [["a E", "N", "D b"], ["a END b"], ["a E", "ND"]])
def test_a_stop_string_may_stay_in_the_text(parts: list[str]) -> None:
    stops = StopStrings(["D", "END"], include=True)
    assert "".join(stops.push(part) for part in parts) == "a END"
    assert stops.found
    shortest = StopStrings(["ENDS", "END", "EN"], include=True)
    assert shortest.push("a ENDS") == "a EN"


def test_text_before_the_output_may_stop_is_in_no_stop_string(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    text = OutputText(byte_tokenizer, ("ab",))
    tokens = byte_tokenizer.encode("abaabx")
    got = "".join(text.push(token, may_stop=i >= 3) for i, token in enumerate(tokens[:5]))
    assert (got, text.stopped) == ("aba", True)


def test_output_text_without_a_tokenizer_is_empty() -> None:
    text = OutputText(None, ())
    assert text.push(5) == ""
    assert text.finish() == ""
    assert text.text == ""


def test_a_stop_string_is_found_in_the_last_piece(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    text = OutputText(byte_tokenizer, ("\ufffd",))
    tokens = byte_tokenizer.encode("ok\u20ac")[:-1]
    out = [text.push(token) for token in tokens]
    assert text.finish() == ""
    assert "".join(out) == "ok"
    assert text.stopped
