"""A model without tensors: every layer's memory is integers, so that a wrong page or state changes the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridkv.entries import CacheEntry, LayerGroup, Part, attention_parts, group_entries
from hybridkv.hf.adapters import Adapters
from hybridkv.hf.runner import Span
from hybridkv.manager import GroupManager

VOCAB = 251
WINDOW = 24


def hybrid_groups() -> tuple[LayerGroup, ...]:
    """One full, one sliding and one state layer; a page of each is a few hundred bytes."""
    parts = attention_parts(1, 8, "float32")
    return group_entries(
        [
            CacheEntry(0, "full_attention", parts),
            CacheEntry(1, "sliding_attention", parts, (("window", WINDOW),)),
            CacheEntry(2, "linear_attention", (Part("recurrent", (64,), "float32"),)),
        ]
    )


def attention_groups() -> tuple[LayerGroup, ...]:
    return group_entries([CacheEntry(0, "full_attention", attention_parts(1, 8, "float32"))])


class FakeRunner:
    """Has ModelRunner's face. The next token is a function of what the pages of all groups hold.

    Full attention contributes the sum of all tokens, sliding attention that of the window, a state a polynomial
    hash; each read back from the pages the manager says they are in.
    """

    vocab_size = VOCAB
    max_positions: int | None = None

    def __init__(self, manager: GroupManager) -> None:
        self._manager = manager
        self._pages = [
            np.full((manager.layout.slots(g), max(group.page_tokens, 1)), -1, np.int64)
            for g, group in enumerate(manager.groups)
        ]
        self.adapters = Adapters(torch.nn.Identity())
        self.passes: list[list[int]] = []
        self.fail_at: int | None = None
        self.failure: BaseException = RuntimeError("the device fell off")
        self.closed = False
        self.losses = 0
        self.nan_at: int | None = None
        """A token after which logits are not numbers."""
        self.spoilt = 0
        self.fail_copies = False

    def reap(self) -> None:
        """There are no abandoned caches."""

    def close(self) -> None:
        self.closed = True

    @property
    def computed(self) -> int:
        return sum(sum(sizes) for sizes in self.passes)

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        self.losses += 1
        for copy in self._manager.take_copies():
            if self.fail_copies:
                raise self.failure
            self._pages[copy.group][copy.dst] = self._pages[copy.group][copy.src]
        self.losses -= 1
        for g in range(len(self._manager.groups)):
            self._pages[g][self._manager.free_slots(g)] = -(10**9)
        rows: list[torch.Tensor] = []
        for span in spans:
            for count, token in enumerate(self._next(span), len(span.token_ids) - span.rows + 1):
                logits = torch.zeros(self.vocab_size)
                logits[token] = 1.0
                if self.nan_at in np.atleast_1d(span.token_ids)[:count]:
                    logits[5] = torch.nan
                    self.spoilt += 1
                rows.append(logits)
        self.passes.append([len(span.token_ids) for span in spans])
        if self.fail_at is not None and len(self.passes) > self.fail_at:
            raise self.failure
        return torch.stack(rows)

    def _next(self, span: Span) -> list[int]:
        """What follows each of the span's last `rows` tokens."""
        stop = span.seq.length + len(span.token_ids)
        ends = range(stop - span.rows + 1, stop + 1)
        totals = [0] * span.rows
        for g, group in enumerate(self._manager.groups):
            pages = self._pages[g]
            start = span.seq.length
            if group.is_state:
                state = self._manager.state_pages(span.seq, g)
                value = int(pages[state.slot, 0]) if start else 0
                saves = dict(state.checkpoints)
                for position, token in enumerate(span.token_ids, start + 1):
                    value = fold(value, int(token))
                    if position in saves:
                        pages[saves[position], 0] = value
                    if position in ends:
                        totals[ends.index(position)] += value
                pages[state.end, 0] = value
                continue
            held = self._manager.token_pages(span.seq, g)
            slots = dict(zip(held.pages.tolist(), held.slots.tolist(), strict=True))
            size = group.page_tokens
            for position, token in enumerate(span.token_ids, start):
                pages[slots[position // size], position % size] = token
            for i, end in enumerate(ends):
                first = max(end - WINDOW, 0) if group.kind == "sliding_attention" else 0
                totals[i] += sum(int(pages[slots[p // size], p % size]) for p in range(first, end)) * (g + 2)
        return [total % VOCAB for total in totals]


def fold(value: int, token: int) -> int:
    return (value * 31 + token + 1) % 1_000_003


def expected_tokens(groups: Sequence[LayerGroup], prompt: Sequence[int], count: int) -> list[int]:
    """What a model that remembers everything generates."""
    tokens = list(prompt)
    for _ in range(count):
        total = 0
        for g, group in enumerate(groups):
            if group.is_state:
                value = 0
                for token in tokens:
                    value = fold(value, token)
                total += value
            else:
                total += sum(tokens[-WINDOW:] if group.kind == "sliding_attention" else tokens) * (g + 2)
        tokens.append(total % VOCAB)
    return tokens[len(prompt) :]


def byte_level_tokenizer(size: int = 256) -> PreTrainedTokenizerFast:
    """One token per byte; with fewer than 256 tokens the space and printable ASCII characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (char != "\u0120", char))[:size]
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
