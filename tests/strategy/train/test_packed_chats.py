"""Chats trained on together do not see each other: loss and gradient are those of one chat at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from roll.algorithm import LossSpec
from roll.config.schema import DataConfig, TrainConfig
from roll.data import Batch, Chat
from roll.data.chat_sources import ChatSet
from roll.model import attention
from roll.model.chat import ChatRenderer
from roll.model.sft_dataset import make_dataset
from roll.model.tiny import character_tokenizer
from roll.strategy.train.single import SingleStrategy

TEXTS = st.sampled_from(["", "a", "ab", "abc", "no", "yes", "2+2=", "4"])
CHATS = st.lists(st.lists(TEXTS, min_size=2, max_size=6).filter(lambda said: len(said) % 2 == 0), min_size=1, max_size=6)

Gradients = dict[str, Tensor]


def model() -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=len(character_tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # far from uniform, so that differences show
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(shape).eval()


@cache
def renderer() -> ChatRenderer:
    tokenizer = character_tokenizer()
    return ChatRenderer(tokenizer, [tokenizer.eos_token_id])


def batch_of(said: list[list[str]]) -> Batch:
    chats = tuple(Chat.of(str(number), *texts) for number, texts in enumerate(said))
    return make_dataset(ChatSet(chats, ()), renderer(), DataConfig(), 256).train


def packed(batch: Batch, micro_batch_tokens: int) -> tuple[float, Gradients]:
    """What the trainer computes, before its optimizer has a say."""
    net = model()
    sums: Gradients = {name: torch.zeros_like(p) for name, p in net.named_parameters()}

    def summing(total: Tensor) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            total.add_(gradient)

        return add

    for name, parameter in net.named_parameters():
        parameter.register_hook(summing(sums[name]))
    net.set_attn_implementation(attention.NAME)
    trainer = SingleStrategy(net, character_tokenizer(), TrainConfig(micro_batch_tokens=micro_batch_tokens))
    assert batch.lengths.max() <= micro_batch_tokens
    return trainer.update(batch, LossSpec("nll"), 0).loss, sums


def one_by_one(batch: Batch) -> tuple[float, Gradients]:
    """The sum over chats of the cross-entropy of their answers, each chat alone in plain `transformers`."""
    net, total = model(), 0.0
    for ids, mask in zip(batch.rows("ids"), batch.rows("loss_mask"), strict=True):
        row, wanted = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.copy())
        logits = net(input_ids=row[None]).logits[0, :-1]
        loss = cross_entropy(logits[wanted[1:]], row[1:][wanted[1:]], reduction="sum")
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(said=CHATS, micro_batch_tokens=st.sampled_from([48, 4096]))
def test_packed_chats_are_as_if_alone(said: list[list[str]], micro_batch_tokens: int) -> None:
    batch = batch_of(said)
    tokens = int(batch.loss_mask.sum())
    loss, gradients = packed(batch, micro_batch_tokens)
    total, expected = one_by_one(batch)
    assert abs(loss - total / tokens) < 1e-5 * max(1.0, total / tokens)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name] * tokens, gradient, rtol=2e-4, atol=2e-4)


def test_the_comparison_sees_a_chat_that_looks_at_its_neighbour() -> None:
    """Two chats in one row of a plain model, as a packer without cuts would have them."""
    batch = batch_of([["ab", "yes"], ["no", "4"]])
    total, expected = one_by_one(batch)
    net = model()
    row, wanted = torch.from_numpy(batch.ids.astype(np.int64)), torch.from_numpy(batch.loss_mask.copy())
    logits = net(input_ids=row[None]).logits[0, :-1]
    loss = cross_entropy(logits[wanted[1:]], row[1:][wanted[1:]], reduction="sum")
    loss.backward()
    assert abs(loss.item() - total) > 1e-3
    name, gradient = next(iter(expected.items()))
    assert not torch.allclose(net.get_parameter(name).grad, gradient, rtol=2e-4, atol=2e-4)
