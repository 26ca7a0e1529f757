"""The algorithm: how rewards become advantages, and which loss trains on them. Built from the config's pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from roll.algorithm.advantages import (
    index_of,
    leave_one_out,
    mean_within,
    returns_of,
    scaled,
    std_within,
    turn_relative,
    without_noise,
)
from roll.algorithm.loss_inputs import CorrectionSpec, CreditSpec, LossSpec
from roll.algorithm.reward_shaping import Floats, overlong, shaped, too_easy_or_hard, turn_factors
from roll.algorithm.running_stats import AdaptiveKLController, RunningScores
from roll.config.algorithm import AlgorithmConfig
from roll.config.errors import RunError, UserError
from roll.config.schema import Config
from roll.config.user_code import load_user_code
from roll.data.batch import Batch
from roll.data.finite import LARGEST_REWARD

_COMPARABLE = 1e150
EVERYWHERE = ""
"""The domain of statistics that are not kept per domain."""


class Algorithm:
    """Combines the pieces that an `AlgorithmConfig` names. A user's subclass may replace any method.

    Invariant: `credit` compares samples on the controller and reads only sample columns; everything per token is
    described by `loss` and happens in the trainer.
    """

    def __init__(self, config: AlgorithmConfig, max_new_tokens: int) -> None:
        self.config = config
        self._longest = max_new_tokens
        self.longest_of: Mapping[str, int] = {}
        """The longest response of each domain."""
        self.root = ""
        """The folder that user code named in the config is imported from."""
        self._kl = AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon)
        self._running = RunningScores()

    @property
    def needs_reference(self) -> bool:
        """Whether batches need the column `ref` before an update."""
        return self.config.needs_reference

    @property
    def needs_critic(self) -> bool:
        """Whether batches need the column `values`, and a critic is trained."""
        return self.config.needs_critic

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether rewards, including those that a critic learns from, contain a KL penalty."""
        return self.config.needs_reference and self.config.kl_in == "reward"

    @property
    def needs_sample_kl(self) -> bool:
        """Whether batches need the column `kl`: samples are compared with the KL penalty included in their reward."""
        return self.has_kl_in_reward and self.config.credit == "sample"

    @property
    def loss_to_send(self) -> LossSpec:
        """The loss with the folder of its user code, also if a subclass replaces `loss`."""
        return replace(self.loss, root=self.root)

    @property
    def loss(self) -> LossSpec:
        """The loss that trains on these advantages, as it is sent to the trainer."""
        config = self.config
        in_loss = config.kl_in == "loss"
        correction = None
        if config.correction != "none":
            correction = CorrectionSpec(
                config.correction, config.correction_level, config.correction_low, config.correction_cap
            )
        credit = CreditSpec(
            kind=config.credit,
            discount=config.discount,
            gae_lambda=config.gae_lambda,
            kl_coef=0.0 if in_loss or config.credit == "sample" else self._kl.value,
            kl_estimator=config.kl_estimator,
            whiten=config.whiten,
            clip=config.advantage_clip,
        )
        return LossSpec(
            name=config.loss,
            params=loss_params(config),
            aggregation=config.aggregation,
            length=config.length_normaliser or self._longest,
            credit=credit,
            correction=correction,
            kl_coef=self._kl.value if in_loss else 0.0,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
        )

    def credit(self, batch: Batch) -> Batch:
        """The samples to train on, with the column `advantage` (and `turn_advantage` if turns are compared). Samples that
        are left out still count in the baselines of the others."""
        check_rewards(batch)
        config, scores = self.config, self.scores(batch)
        if "turn_reward" in batch:
            rewards = np.repeat(batch["reward"], np.diff(batch.turn_offsets))
            factors = turn_factors(rewards, config.reward_clip, config.reward_scale)
            batch = batch.with_columns(turn_reward=factors * batch["turn_reward"])
        keep = np.ones(len(batch), np.bool_)
        if config.positive_above is not None:
            keep, advantage = scores > config.positive_above, np.ones(len(batch))
        else:
            advantage = self._checked_advantages(self.relative(batch, scores), len(batch))
        batch = batch.with_columns(advantage=advantage)
        if config.turn_weight > 0:
            batch = self._with_turns(batch, advantage)
        if config.mask_truncated:
            keep &= ~batch["truncated"]
        if config.difficulty_range is not None:
            keep &= ~too_easy_or_hard(batch["reward"], batch["group"], config.difficulty_range)
        return batch if keep.all() else batch.select(np.flatnonzero(keep))

    def _checked_advantages(self, advantage: Floats, samples: int) -> Floats:
        """The advantages from `relative`, which may be the user's code, checked to be one per sample."""
        given = np.asarray(advantage, np.float64)
        if given.shape != (samples,):
            raise UserError(
                f"algorithm.name {self.config.name!r}: `relative` gave advantages of shape {given.shape} for {samples} "
                "samples: return an array with one for each"
            )
        return given

    def scores(self, batch: Batch) -> Floats:
        """Rewards after shaping, as they are compared."""
        config = self.config
        scores = shaped_alone(batch["reward"], config)
        if config.overlong_buffer_ratio > 0:
            longest = np.array([self.longest_of.get(domain, self._longest) for domain in batch["domain"].tolist()])
            lengths = batch["response_tokens"] / np.maximum(batch["turns"], 1)
            buffer = config.overlong_buffer_ratio * longest
            scores = scores + config.overlong_penalty * overlong(lengths, longest, buffer)
        if self.needs_sample_kl:
            scores = scores - self._kl.value * batch["kl"]
        return scores

    def relative(self, batch: Batch, scores: Floats) -> Floats:
        """Scores minus their baseline, divided by their scale; 0 if the scores they are compared with have no
        variance."""
        config, group = self.config, index_of(batch["group"])
        domains = batch["domain"] if config.per_domain else np.full(len(batch), EVERYWHERE)
        mean, std = self._moments(scores, domains) if "running" in (config.baseline, config.scale) else (scores, scores)
        if config.baseline == "group":
            advantage = without_noise(scores - mean_within(scores, group), std_within(scores, group))
        elif config.baseline == "leave_one_out":
            advantage = without_noise(scores - leave_one_out(scores, group), std_within(scores, group))
        elif config.baseline == "batch":
            domain = index_of(domains)
            advantage = without_noise(scores - mean_within(scores, domain), std_within(scores, domain))
        elif config.baseline == "running":
            advantage = scores - mean
        elif config.baseline == "greedy":
            advantage = scores - shaped_alone(batch["baseline"], config)
        else:
            advantage = scores
        if config.scale == "group":
            return scaled(advantage, std_within(scores, group))
        if config.scale == "batch":
            return scaled(advantage, std_within(scores, index_of(domains)))
        return scaled(advantage, std) if config.scale == "running" else advantage

    def _moments(self, scores: Floats, domains: Any) -> tuple[Floats, Floats]:
        """For each score, the running mean and standard deviation of its domain, these scores included."""
        mean, std = np.zeros(len(scores)), np.zeros(len(scores))
        for domain in np.unique(domains):
            here = domains == domain
            moments = self._running.of(str(domain))
            moments.add(scores[here])
            mean[here], std[here] = moments.mean, moments.std
        return mean, std

    def _with_turns(self, batch: Batch, advantage: Floats) -> Batch:
        """Adds to the sample's advantage, for each turn, its return relative to turns that started in the same state."""
        if "turn_state" not in batch:
            raise UserError(
                "algorithm.turn_weight compares turns that began in the same state, but these tasks have no environment: "
                "write algorithm.turn_weight=0, or choose tasks with environments"
            )
        config, turns = self.config, np.diff(batch.turn_offsets)
        returns = returns_of(batch["turn_reward"], batch.turn_offsets, config.turn_discount)
        groups = np.repeat(batch["group"], turns)
        step = turn_relative(returns, batch["turn_state"], groups, config.scale != "none")
        return batch.with_columns(turn_advantage=np.repeat(advantage, turns) + config.turn_weight * step)

    def metrics(self) -> dict[str, float]:
        """Values that change from step to step and that the next step is trained with; they become metrics of that
        step."""
        return {"kl_coef": self._kl.value} if self.config.kl_coef > 0 else {}

    def observe(self, metrics: dict[str, float], samples: int) -> None:
        """Called after a step was trained, with the means of its metrics over tokens."""
        if "kl" in metrics:
            self._kl.observe(metrics["kl"], samples)

    def state(self) -> dict[str, Any]:
        """Its state as JSON, for a checkpoint."""
        return {"kl_coef": self._kl.value, "scores": self._running.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned."""
        self._kl.restore(state["kl_coef"])
        self._running.restore(state["scores"])


def check_rewards(batch: Batch) -> None:
    """Raises if a reward cannot be compared: its square overflows fp64, and all advantages would be 0 or NaN. In a run
    such a sample has failed before (`roll.data.finite`); a custom loop may pass any value."""
    invalid = np.flatnonzero(~(np.abs(batch["reward"]) <= _COMPARABLE))
    if len(invalid):
        where = "".join(f" {what} {str(batch[what][invalid[0]])!r}" for what in ("task", "sample") if what in batch)
        raise RunError(
            f"the reward of{where or ' a sample'} is {batch['reward'][invalid[0]]:g}, which cannot be compared with "
            f"others: a reward is from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}, so divide it by its scale"
        )


def check_advantages(batch: Batch, name: str) -> None:
    """Raises if the algorithm of this name gave advantages that are not finite in fp32, in which trainers compute: their
    update could only be skipped."""
    with np.errstate(over="ignore"):
        invalid = np.flatnonzero(~np.isfinite(np.asarray(batch["advantage"]).astype(np.float32)))
    if not len(invalid):
        return
    first = int(invalid[0])
    more = f" and to {len(invalid) - 1} more" if len(invalid) > 1 else ""
    facts = ", ".join(f"{what} {batch[what][first]:g}" for what in ("reward", "baseline", "kl") if what in batch)
    raise RunError(
        f"algorithm.name {name!r} gave the advantage {batch['advantage'][first]:g} to sample {batch['sample'][first]} of "
        f"task {str(batch['task'][first])!r} ({facts}){more}: look for a reward that is not finite or too large, and for "
        "a division by a spread that is 0 where the rewards of a group are all equal (add 1e-6 to it)"
    )


def shaped_alone(rewards: Any, config: AlgorithmConfig) -> Floats:
    """Rewards clipped, scaled and shifted as the config says."""
    return shaped(rewards, config.reward_clip, config.reward_scale, config.reward_shift)


def loss_params(config: AlgorithmConfig) -> dict[str, Any]:
    """The arguments of the config's loss."""
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high, "ratio": config.ratio}
    known: dict[str, dict[str, Any]] = {
        "clipped": {**clips, "dual_clip": config.dual_clip},
        "cispo": clips,
        "sapo": {"tau_positive": config.tau_positive, "tau_negative": config.tau_negative, "ratio": config.ratio},
        "topr": {},
        "reinforce": {},
    }
    return known.get(config.loss, config.loss_options)


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm a run's configuration names."""
    longest, section = config.rollout.max_new_tokens, config.algorithm
    made = Algorithm(section, longest) if ":" not in section.name else _users_algorithm(section, longest, config.root)
    made.root = config.root
    made.longest_of = {domain: config.rollout_of(domain).max_new_tokens for domain in config.domains}
    return made


def _users_algorithm(config: AlgorithmConfig, longest: int, root: str) -> Algorithm:
    users = load_user_code(config.name, what="algorithm.name", root=root)
    if not isinstance(users, type) or not issubclass(users, Algorithm):
        kind = "class" if isinstance(users, type) else type(users).__name__
        raise UserError(
            f"algorithm.name {config.name!r} is a {kind} that is no roll.algorithm.Algorithm: make it a subclass of that"
        )
    return users(config, longest)
