"""Experts as teachers: demonstrations, labels for states that a policy came to, and what of both is learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from roll.config.errors import UserError
from roll.config.schema import DataConfig, TasksConfig
from roll.data.chat import Chat
from roll.data.chat_sources import load_chats
from roll.data.sources import load_tasks
from roll.data.task import EnvSpec, Message
from roll.env.base import Step
from roll.env.dagger import labels
from roll.env.demonstrations import demonstration
from roll.env.resolve import resolve
from roll.env.tasks import environment_tasks
from roll.model.chat import ChatRenderer
from roll.model.sft_dataset import make_dataset
from roll.model.tiny import character_tokenizer


def replayed(spec: EnvSpec, messages: Sequence[Message]) -> Step:
    """The last step of the episode in which the assistant's messages are said; all others must be the environment's."""
    world = resolve(spec.name)(**spec.options)
    seen = world.reset(spec.seed)
    shown = [seen[0] if isinstance(seen, tuple) else seen]
    for message in messages:
        if message["role"] == "user":
            assert message["content"] == shown.pop()
        else:
            step = world.step(message["content"])
            shown.append(step.observation)
    assert isinstance(step, Step)
    return step


@pytest.mark.parametrize(
    ("name", "options", "worth"),
    [
        ("frozen_lake", {"size": 5}, 1.0),
        ("frozen_lake", {"moves": 3, "format": "json"}, 1.0),
        ("sokoban", {"moves": 2, "step_cost": 0.0, "done_reward": 0.0}, 1.0),
        ("guess", {"low": 1, "high": 100}, 1.0),
        ("echo_turns", {"turns": 2}, 0.5),
    ],
)
def test_demonstrations_are_whole_episodes_of_the_tasks_seeds(name: str, options: dict[str, Any], worth: float) -> None:
    asked = {"name": name, "count": 12, "held_out": 4, "first_seed": 7, **options}
    chats = load_chats(DataConfig(source="demonstrations", options=asked))
    tasks = load_tasks(TasksConfig(source="environment", options=asked), environment_tasks)
    for given, played in ((chats.train, tasks.train), (chats.held_out, tasks.held_out)):
        assert [chat.id for chat in given] == [task.id for task in played]
        for chat, task in zip(given, played, strict=True):
            assert task.environment is not None
            last = replayed(task.environment, chat.messages)
            assert (last.terminated, last.reward) == (True, worth)


def test_who_has_no_expert_cannot_show_anything() -> None:
    here = f"{__file__}:"
    for name in ("Mute", "make_mute"):
        with pytest.raises(UserError, match="has no expert: give it a method"):
            load_chats(DataConfig(source="demonstrations", options={"name": here + name}))
    with pytest.raises(UserError, match="is async"):
        load_chats(DataConfig(source="demonstrations", options={"name": f"{here}Later"}))
    with pytest.raises(UserError, match="count=0"):
        load_chats(DataConfig(source="demonstrations", options={"name": "guess", "count": 0}))
    with pytest.raises(UserError, match="did you mean 'size'"):
        load_chats(DataConfig(source="demonstrations", options={"name": "frozen_lake", "sise": 3}))
    spec = EnvSpec(f"{here}Speechless")
    assert list(demonstration("a", spec)) == []


class Mute:
    def reset(self, seed: int) -> str:
        return "hm"

    def step(self, action: str) -> Step:
        return Step("hm")


class Speechless(Mute):
    def expert(self) -> None:
        return None


class Later(Mute):
    async def reset(self, seed: int) -> str:
        return "hm"

    def expert(self) -> str:
        return "hm"


def make_mute() -> Mute:
    return Mute()


def test_a_policys_states_are_labelled_with_what_the_expert_would_say_there() -> None:
    spec = EnvSpec("guess", 3, {"low": 1, "high": 7, "tries": 9})
    seen: list[int] = []

    def policy(messages: Sequence[Message]) -> str | None:
        seen.append(len(messages))
        return ["1", "what?", "7", "2", None][len(seen) - 1]

    found = [turn.with_advice for turn in labels(spec, policy)]
    assert seen == [1, 3, 5, 7, 9]
    assert [conversation[-1]["content"] for conversation in found[:4]] == ["4", "4", "4", "4"]
    assert [[m["content"] for m in conversation if m["role"] == "assistant"] for conversation in found[:3]] == [
        ["4"],
        ["1", "4"],
        ["1", "what?", "4"],
    ]
    assert found[-1][-1]["content"] == "4"


def test_with_a_window_every_answer_follows_what_the_agent_sees() -> None:
    options = {"name": "guess", "count": 3, "held_out": 0, "low": 1, "high": 9}
    whole = load_chats(DataConfig(source="demonstrations", options=options)).train
    parts = load_chats(DataConfig(source="demonstrations", options={**options, "window": 1})).train
    expected = []
    for chat in whole:
        said = list(chat.messages)
        for turn, end in enumerate(range(1, len(said), 2)):
            expected.append((f"{chat.id}/{turn}", (said[0], *said[max(1, end - 2) : end + 1])))
    assert [(chat.id, chat.messages) for chat in parts] == expected
    assert {chat.learn for chat in parts} == {"last"}
    assert max(len(chat.messages) for chat in parts) == 4

    seen = []
    for turn in labels(EnvSpec("guess", 1), lambda seen: "1", window=2, max_turns=5):
        seen.append(len(turn.with_advice))
    assert seen == [2, 4, 6, 6, 6]


def test_lost_states_have_no_label() -> None:
    """A box in a corner stays there: the expert is silent from then on."""
    labelled, visited = 0, 0
    for seed in range(40):
        moves = iter(["<answer>left</answer>", "<answer>up</answer>"] * 6)

        def policy(messages: Sequence[Message]) -> str | None:
            nonlocal visited
            visited += 1
            return next(moves, None)  # noqa: B023 (called before the next one is made)

        labelled += len(list(labels(EnvSpec("sokoban", seed), policy)))
    assert 0 < labelled < visited


def test_only_the_last_answer_of_a_labelled_state_is_learned() -> None:
    chat = Chat("a", Chat.of("a", "one", "no", "two", "yes").messages, learn="last")
    renderer = ChatRenderer(tokenizer := character_tokenizer(), [tokenizer.eos_token_id])
    for learn, said in (("last", ["yes<|end|>"]), ("all", ["no<|end|>", "yes<|end|>"])):
        chats = load_chats(DataConfig(), lambda split: [Chat("a", chat.messages, learn=learn)])  # noqa: B023
        corpus = make_dataset(chats, renderer, DataConfig(), 99)
        (ids,), (mask,) = corpus.train.rows("ids"), corpus.train.rows("loss_mask")
        assert tokenizer.decode(ids[mask]) == "".join(said)
        assert tokenizer.decode(ids).startswith("<|user|>one<|end|><|assistant|>no<|end|><|user|>two")
    with pytest.raises(ValueError, match="is not the assistant's"):
        Chat("a", chat.messages[:3], learn="last")
