"""The default workloads, `RLVR` and `AGENTIC`: their hardware, and the properties of their samples.

The numbers are those of a dense model of 8 billion parameters in bf16 on GPUs with 80 GB at 3.3 TB/s, one per engine. A
step of an engine reads 16 GB of weights (5 ms), launches, schedules and samples (3 ms, and a little per sequence); every
token of context has 128 KiB of keys and values (0.04 µs to read), and the KV cache has 40 GB. That gives about 75 tokens
per second to each of 64 sequences of 1,250 tokens, 4,900 per second together. A prompt costs 2 × 8e9 operations per
token: half of 990 TFLOPs computes 30,000 per second. Training costs 6 × 8e9: 45 % of 990 TFLOPs, on three GPUs for every
two that generate, trains on 110,000 per second for eight engines. Loading and verifying new weights takes a second.

A step has 4,096 samples, so that at full batches it takes clearly longer than its longest sample, as in published runs:
with fewer, a staleness of one would only ever wait for that sample. Training then takes 25 to 30 % of the time of pure
generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from roll.simulation.environments import EnvironmentSteps
from roll.simulation.lengths import Lengths, LogNormal, Solving, blend, normal, share_below, uniforms
from roll.simulation.prefixes import Prefix
from roll.simulation.spec import EngineSpec


@dataclass(frozen=True)
class EpisodeTurn:
    prompt_tokens: int
    """Everything before the response: the prompt, earlier turns, observations."""
    new_tokens: int
    environment_s: float
    """Duration of the environment's step after it; 0 without an environment."""


@dataclass(frozen=True)
class Episode:
    """The course of one sample, the same for every scheduler."""

    sample: str
    turns: tuple[EpisodeTurn, ...]
    grade_s: float
    """Duration of grading; 0 if the environment gives the reward."""
    reward: float
    prefix: Prefix
    """What its context shares with its siblings, and with its own earlier turns."""

    @property
    def new_tokens(self) -> int:
        return sum(turn.new_tokens for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Tokens that training on it processes."""
        return self.turns[-1].prompt_tokens + self.turns[-1].new_tokens


@dataclass(frozen=True)
class StepGroups:
    """Groups of one step, by number: those generated, and those of them trained on."""

    tried: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """The engines, their work, and its results. Nothing in it is random: see `lengths`."""

    name: str
    engines: int
    engine: EngineSpec
    groups_per_step: int
    group_size: int
    prompts: Lengths
    responses: Lengths
    """Per turn."""
    solving: Solving
    turns: tuple[int, int] = (1, 1)
    """Minimum and maximum."""
    observations: Lengths | None = None
    environment: EnvironmentSteps | None = None
    grading: LogNormal | None = None
    """Grading seconds; None if the environment gives the reward."""
    graders: int = 0
    train_tokens_per_s: float = 110_000.0
    """Tokens of prompts, responses and observations. Trainers have their own GPUs, so engines do not stop for
    training."""
    publish_s: float = 1.0
    """How long engines pause for new weights."""
    max_replacements: float = 1.0
    """Maximum replacement groups per step, as a share of `groups_per_step`."""
    seed: int = 1

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def most_groups_per_step(self) -> int:
        """Maximum number of groups that a step may try."""
        return self.groups_per_step + int(self.groups_per_step * self.max_replacements + 1e-9)

    def scaled(self, engines: int) -> Workload:
        """The same work per engine for another number of engines: groups, graders and trainers scale."""
        return replace(
            self,
            engines=engines,
            groups_per_step=max(self.groups_per_step * engines // self.engines, 1),
            graders=-(-self.graders * engines // self.engines),
            train_tokens_per_s=self.train_tokens_per_s * engines / self.engines,
        )

    def samples_of(self, group: int) -> list[str]:
        return [f"{group}.{i}" for i in range(self.group_size)]

    def episode(self, sample: str) -> Episode:
        """The episode of a sample such as "17.3"."""
        group = sample.partition(".")[0]
        task_length, _, task_prompt, *_ = uniforms(self.seed, f"task/{group}")
        own_length, _, grade, *_ = uniforms(self.seed, sample)
        task_z, own_z = normal(task_length), normal(own_length)
        prompt = self.prompts.tokens(normal(task_prompt), 0.0)
        single = self.turns[1] == 1
        return Episode(
            sample=sample,
            turns=self._only_turn(prompt, task_z, own_z) if single else self._turns(sample, prompt, task_z, own_z),
            grade_s=self.grading.at(normal(grade)) if self.grading is not None else 0.0,
            reward=self.reward(sample),
            prefix=Prefix(group, prompt, "" if single else sample),
        )

    def reward(self, sample: str) -> float:
        """1 if the sample solves its task, else 0."""
        task_length, task_own, *_ = uniforms(self.seed, f"task/{sample.partition('.')[0]}")
        _, solved, *_ = uniforms(self.seed, sample)
        return float(solved < self.solving.probability(normal(task_length), normal(task_own)))

    def has_signal(self, group: int) -> bool:
        """Whether the rewards of a group differ, so that it is kept."""
        return len({self.reward(sample) for sample in self.samples_of(group)}) > 1

    def train_s(self, groups: Iterable[int]) -> float:
        """Seconds of training on whole groups."""
        tokens = sum(self.episode(sample).tokens for group in groups for sample in self.samples_of(group))
        return tokens / self.train_tokens_per_s

    def _only_turn(self, prompt: int, task_z: float, own_z: float) -> tuple[EpisodeTurn, ...]:
        return (EpisodeTurn(prompt, self.responses.tokens(task_z, own_z), 0.0),)

    def _turns(self, sample: str, prompt: int, task_z: float, own_z: float) -> tuple[EpisodeTurn, ...]:
        """The number of turns is uniform between minimum and maximum; half of its variance belongs to the task."""
        fewest, most = self.turns
        number = fewest + int(share_below(blend(task_z, own_z, 0.5**0.5)) * (most - fewest + 1))
        turns = []
        for turn in range(number):
            length, observation, latency, straggler, *_ = uniforms(self.seed, f"{sample}/{turn}")
            new_tokens = self.responses.tokens(task_z, normal(length))
            step_s = self.environment.seconds(latency, straggler) if self.environment is not None else 0.0
            turns.append(EpisodeTurn(prompt, new_tokens, step_s))
            observed = self.observations.tokens(task_z, normal(observation)) if self.observations is not None else 0
            prompt += new_tokens + observed
        return tuple(turns)


def needed(workload: Workload, steps: int) -> list[StepGroups]:
    """The groups that `steps` steps try and keep if tasks come in order and each group without signal is replaced by the
    next one. Which groups these are is only known by trying, so no scheduler needs fewer."""
    found = []
    group = 0
    for _ in range(steps):
        tried: list[int] = []
        kept: list[int] = []
        while len(kept) < workload.groups_per_step and len(tried) < workload.most_groups_per_step:
            tried.append(group)
            if workload.has_signal(group):
                kept.append(group)
            group += 1
        found.append(StepGroups(tuple(tried), tuple(kept)))
    return found


ENGINE = EngineSpec(
    base_s=0.008,
    per_sequence_s=0.00003,
    per_cached_token_s=4e-8,
    prefill_tokens_per_s=30_000.0,
    max_running=64,
    kv_tokens=320_000,
    reserve_tokens=3_200,
)

RLVR = Workload(
    name="rlvr",
    engines=8,
    engine=ENGINE,
    groups_per_step=512,
    group_size=8,
    prompts=Lengths(mean_tokens=200, sigma=0.5, alike=1.0, max_tokens=1024, min_tokens=32),
    responses=Lengths(mean_tokens=1050, sigma=0.9, alike=0.5, max_tokens=8192, min_tokens=16),
    solving=Solving(bias=0.5, spread=2.6, by_length=0.5),
    grading=LogNormal(mean=0.3, sigma=0.8),
    graders=64,
)
"""Questions with a verifier, as in mathematics: one response of about 1,000 tokens, half of them under 700, three in a
thousand at the limit of 8,192; graded in a process (0.3 s: parsing and comparing, some tests), 8 graders per GPU, like
the CPU cores of a node. Tasks vary enough that nearly four groups in ten are solved by all or by none."""

AGENTIC = Workload(
    name="agentic",
    engines=8,
    engine=ENGINE,
    groups_per_step=512,
    group_size=8,
    prompts=Lengths(mean_tokens=300, sigma=0.4, alike=1.0, max_tokens=2048, min_tokens=64),
    responses=Lengths(mean_tokens=200, sigma=0.7, alike=0.3, max_tokens=1024, min_tokens=8),
    solving=Solving(bias=0.5, spread=2.6, by_length=0.5),
    turns=(2, 10),
    observations=Lengths(mean_tokens=80, sigma=0.7, alike=0.3, max_tokens=1024, min_tokens=8),
    environment=EnvironmentSteps(LogNormal(mean=1.0, sigma=0.3)),
)
"""Tools, games, web pages: 2 to 10 turns of about 200 tokens, each followed by an environment step of about a second, one
in a hundred of them 50 times slower, so that one episode in seventeen has such a step. The environment gives the
reward."""
