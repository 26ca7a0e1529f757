"""The corpus: which samples there are, which of them make a step, and what is said about those that do not fit."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config.errors import UserError
from roll.config.schema import DataConfig
from roll.data import Chat, TokenLog
from roll.data.chat_sources import ChatSet
from roll.model.chat import ChatRenderer
from roll.model.sft_dataset import EpochPermutation, SFTDataset, make_dataset
from roll.model.tiny import character_tokenizer


@cache
def renderer() -> ChatRenderer:
    tokenizer = character_tokenizer()
    return ChatRenderer(tokenizer, [tokenizer.eos_token_id])


def corpus(*chats: Chat, held_out: tuple[Chat, ...] = (), context: int = 1024, **settings: object) -> SFTDataset:
    return make_dataset(ChatSet(chats, held_out), renderer(), DataConfig.model_validate(settings), context)


def test_samples_in_tokens() -> None:
    tokens = TokenLog.from_loss_mask([1, 5, 0, 2, 6, 0], [False, False, False, False, True, True])
    made = corpus(Chat.of("a", "q", "yes"), Chat("b", log=tokens), held_out=(Chat.of("c", "q", "no"),))
    assert made.train["task"].tolist() == ["a", "b"]
    assert made.train.lengths.tolist() == [8, 6]
    assert made.train["temperature"].tolist() == made.train["advantage"].tolist() == [1.0, 1.0]
    assert not made.train.behaviour.any()
    assert renderer().tokenizer.decode(made.train.rows("ids")[0][made.train.rows("loss_mask")[0]]) == "yes<|end|>"
    assert made.train.rows("loss_mask")[1].tolist() == [False] * 4 + [True] * 2
    assert made.held_out is not None
    assert len(made.held_out) == 1
    assert made.longest_tokens == 8


def test_the_digest_tells_samples_apart() -> None:
    one, same, other = (corpus(Chat.of("a", "q", text)) for text in ("yes", "yes", "yet"))
    assert one.digest() == same.digest() != other.digest()


def test_what_is_too_long_is_refused_dropped_or_cut() -> None:
    chats = (Chat.of("short", "q", "a"), Chat.of("long", "q", "a" * 20), Chat.of("asked", "q" * 20, "a"))
    with pytest.raises(UserError, match=r"'long' has 25 tokens, more than the 10 that fit: write data.too_long=drop"):
        corpus(*chats, max_tokens=10)
    with pytest.raises(UserError, match="more than the 12 that fit"):
        corpus(*chats, context=12)
    dropped = corpus(*chats, max_tokens=10, too_long="drop")
    assert dropped.train["task"].tolist() == ["short"]
    assert [(left.chat, left.reason) for left in dropped.skipped] == [
        ("long", "too long: 25 tokens"),
        ("asked", "too long: 25 tokens"),
    ]
    cut = corpus(*chats, max_tokens=10, too_long="cut")
    assert cut.train["task"].tolist() == ["short", "long"], "of the third one no answer would be left"
    assert cut.train.lengths.tolist() == [6, 10]
    assert int(cut.train.rows("loss_mask")[1].sum()) == 6
    with pytest.raises(UserError, match="none of the 3 conversations"):
        corpus(*chats, max_tokens=3, too_long="drop")


def test_tokens_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(UserError, match=r"'b' has the token 100000, but the model has tokens 0 to \d+"):
        corpus(Chat("b", log=TokenLog.from_loss_mask([1, 100_000], [False, True])))


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(
    samples=st.integers(1, 20), each=st.integers(1, 30), epochs=st.sampled_from([0, 0.3, 1, 2, 3.5]),
    steps=st.integers(1, 9), seed=st.integers(0, 5),
)  # fmt: skip
def test_every_epoch_has_each_sample_once(samples: int, each: int, epochs: float, steps: int, seed: int) -> None:
    config = DataConfig(samples_per_step=each, epochs=epochs)
    order = EpochPermutation.of(samples, config, steps, seed)
    taken = [order.step(step).tolist() for step in range(order.steps)]
    assert all(len(step) == each for step in taken[:-1])
    assert 1 <= len(taken[-1]) <= each
    stream = [sample for step in taken for sample in step]
    assert len(stream) == (max(round(epochs * samples), 1) if epochs else steps * each)
    for first in range(0, len(stream), samples):
        epoch = Counter(stream[first : first + samples])
        assert max(epoch.values()) == 1
        assert len(epoch) == min(samples, len(stream) - first)
    assert [order.step(step).tolist() for step in range(order.steps)] == taken


def test_epochs_and_seeds_are_shuffled_anew() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return EpochPermutation(50, 50, 100, seed).step(epoch).tolist()

    assert len({tuple(first(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert np.array_equal(sorted(first(0, 1)), range(50))
