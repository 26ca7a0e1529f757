"""Every algorithm learns, as its example is written: single answers in echo, episodes behind doors.

The model is one layer of the tiny one, so that a run takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from doors import Doors
from small_runs import EXAMPLES, Remains
from transformers import LlamaForCausalLM

from roll import load_config, train
from roll.algorithm import make_algorithm
from roll.config.algorithm import RECIPES
from roll.data.batch import Batch
from roll.data.sample import Sample
from roll.data.task import EnvSpec, Task
from roll.env.base import parse_reset, parse_step
from roll.env.state_key import state_of
from roll.model.tiny import character_tokenizer, tiny_config, tiny_model
from roll.pipeline.report import SilentReporter

HERE = Path(__file__).parent
FOLDER = EXAMPLES / "algorithms"
OF_EPISODES = ("starpo", "gigpo")
OF_OTHERS_PIECES = ("dapo", "dr_grpo", "reinforce_pp_baseline", "lite_ppo", "starpo")
"""Made of pieces that the others have as well: those are enough for every edit."""
QUICK_ONES = ("gigpo",)
BEHIND_DOORS = (
    f"tasks.options={{name: '{HERE / 'doors.py'}:Doors', count: 8, held_out: 4}}",
    "rollout.group_size=8",
    "train.lr=4e-3",
    "train.steps=10",
)
QUICK = (
    "threads=1",
    "deterministic=true",
    "model.dtype=fp32",  # the same bits on machines with and without fast bf16
    "train.steps=12",
    "train.lr=3e-3",
    "eval.samples=2",
    "run.checkpoint_every=0",
    "run.tensorboard=false",
    "run.curve=false",
    "run.trace=false",
    "run.save_samples=false",
)
LONGER = {"remax": ("train.steps=16",)}
"""The baseline of ReMax is one greedy answer, which says less than the mean of 48 siblings does."""
Rewards = Callable[..., list[float]]


def each(names: Iterable[str]) -> list[Any]:
    def marks(name: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] * (name in OF_OTHERS_PIECES) + [pytest.mark.thorough] * (name not in QUICK_ONES)

    return [pytest.param(name, marks=marks(name)) for name in names]


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_layer")
    config = tiny_config()
    config.num_hidden_layers = 1
    model = LlamaForCausalLM(config)
    model.load_state_dict(tiny_model(seed=0).state_dict(), strict=False)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def rewards_of(one_layer: Path, tmp_path: Path) -> Rewards:
    """Trains an example and returns the mean reward of each step."""

    def run(name: str, *overrides: str) -> list[float]:
        path, place = str(FOLDER / f"{name}.yaml"), tmp_path / "run"
        config = load_config(path, [*QUICK, f"model={one_layer}", f"run.dir={place}", *overrides])
        train(config, reporter=SilentReporter())
        return [row["reward/mean"] for row in Remains(place).metrics() if "reward/mean" in row]

    return run


def test_every_algorithm_has_an_example() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(RECIPES)
    for name in RECIPES:
        config = load_config(FOLDER / f"{name}.yaml")
        assert (config.algorithm.name, config.run.dir) == (name, f"runs/algorithms/{name}")


@pytest.mark.parametrize("name", each(name for name in RECIPES if name not in OF_EPISODES))
def test_it_learns_single_answers(rewards_of: Rewards, name: str) -> None:
    rewards = rewards_of(name, *LONGER.get(name, ()))
    assert rewards[0] < 0.1
    assert fmean(rewards[-3:]) > 0.4, rewards


@pytest.mark.parametrize("name", each(OF_EPISODES))
def test_it_learns_episodes_of_three_turns(rewards_of: Rewards, name: str) -> None:
    rewards = rewards_of(name, *BEHIND_DOORS)
    assert rewards[0] < 0.35
    assert fmean(rewards[-3:]) > 0.5, rewards


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "most"), [("grpo", (), 0.15), ("starpo", BEHIND_DOORS, 0.45)])
def test_it_does_not_learn_from_shuffled_rewards(
    rewards_of: Rewards, name: str, world: tuple[str, ...], most: float
) -> None:
    """The control: nothing but whose rewards they are has changed."""
    own = f"algorithm={{name: '{HERE / 'shuffled_rewards.py'}:Shuffled'}}"
    rewards = rewards_of(name, own, "rollout.filter=none", *world)
    assert fmean(rewards[-3:]) < most, rewards


def episode(number: int, words: str) -> Sample:
    """What became of saying these words, a letter a turn."""
    world = Doors()
    seen, rewards, states = parse_reset(world.reset(0)), [], []
    for word in words:
        states.append(state_of(seen))
        seen = parse_step(world.step(word))
        rewards.append(seen.reward)
    assert seen.terminated
    task = Task("doors#0", (), environment=EnvSpec("doors", 0))
    sample = Sample(str(number), task, 0, 1.0, reward=sum(rewards), turns=len(words))
    sample.turn_rewards, sample.turn_states = rewards, states
    sample.log.prompt([1])
    for _ in words:
        sample.log.respond([2], [-1.0], [0])
        sample.log.observe([3])
    return sample


def test_gigpo_credits_the_turn_that_opened_the_door_and_starpo_the_episode() -> None:
    said = ("aa", "?aa", "??a", "???")  # a letter opens both doors of this task
    batch = Batch.from_samples([episode(number, words) for number, words in enumerate(said)])
    starpo = make_algorithm(load_config({"algorithm": "starpo"})).credit(batch)
    gigpo = make_algorithm(load_config({"algorithm": "gigpo"})).credit(batch)

    whole = starpo["advantage"]
    assert "turn_advantage" not in starpo
    assert np.array_equal(whole, gigpo["advantage"])
    assert whole[0] == whole[1] > whole[2] > whole[3]

    of_turns = np.split(gigpo["turn_advantage"], gigpo.turn_offsets[1:-1])
    over_episode = [turns - advantage for turns, advantage in zip(of_turns, whole, strict=True)]
    for turns, opening in ((over_episode[1], 1), (over_episode[2], 2)):  # they stood before the first door till then
        assert turns[opening] > max(turns[:opening]), "the word that opened it is worth more than those that did not"
    assert over_episode[0][1] == over_episode[1][2] == 0, "before the second door both did the same"
    assert over_episode[0][0] > 0 > over_episode[3].max()
