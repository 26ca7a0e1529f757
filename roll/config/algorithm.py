"""How rewards become gradients: pieces that combine, and recipes that name combinations.

A recipe is a set of defaults. `algorithm: dapo` is its pieces; any of them may be set beside it. A setting that the
chosen pieces do not read is refused, so that nothing is believed to be on that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from roll.config.section import Bound, Limit, NonNegative, Positive, Section, Share, Whole
from roll.config.suggest import did_you_mean

LOSSES = ("clipped", "cispo", "topr", "sapo", "reinforce")
RATIO_LOSSES = ("clipped", "cispo", "sapo")

_GROUP = {"baseline": "group", "scale": "group"}

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {**_GROUP},
    "ppo": {"credit": "gae", "whiten": True},
    "dapo": {**_GROUP, "clip_high": 0.28, "overlong_buffer_ratio": 0.2},
    "dr_grpo": {"baseline": "group", "aggregation": "fixed_length"},
    "reinforce_pp": {"credit": "returns", "whiten": True, "kl_coef": 0.001, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"baseline": "group", "whiten": True, "kl_coef": 0.001, "kl_estimator": "k2"},
    "rloo": {
        "baseline": "leave_one_out",
        "loss": "reinforce",
        "aggregation": "sequence_sum",
        "kl_coef": 0.001,
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "remax": {"baseline": "greedy", "loss": "reinforce", "aggregation": "sequence_sum"},
    "gspo": {**_GROUP, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "cispo": {**_GROUP, "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "topr": {"baseline": "group", "loss": "topr", "aggregation": "sequence_sum", "correction": "none"},
    "raft_pp": {"positive_above": 0.0, "aggregation": "sequence_mean"},
    "lite_ppo": {"baseline": "group", "scale": "batch"},
    "sapo": {**_GROUP, "loss": "sapo", "aggregation": "sequence_mean"},
    "starpo": {**_GROUP, "clip_high": 0.28},
    "gigpo": {**_GROUP, "turn_weight": 1.0},
}
"""What each algorithm sets; all else has its default."""


class AlgorithmConfig(Section):
    """How rewards become gradients: a recipe, and any of its pieces."""

    short: ClassVar[str | None] = "name"

    name: str = "grpo"
    """`grpo`, `ppo`, `dapo`, `dr_grpo`, `reinforce_pp`, `reinforce_pp_baseline`, `rloo`, `remax`, `gspo`, `cispo`,
    `topr`, `raft_pp`, `lite_ppo`, `sapo`, `starpo`, `gigpo`, or a class: `module:name` or `file.py:name`. It sets the
    defaults of all below (`docs/guides/algorithms.md`)."""

    reward_clip: tuple[Bound, Bound] | None = None
    """Rewards are clipped to this range first; the rewards of an episode's turns are scaled with them."""
    reward_scale: float = 1.0
    """Factor of clipped rewards."""
    reward_shift: float = 0.0
    """Added to scaled rewards."""
    overlong_buffer_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """DAPO's overlong penalty: the reward decreases linearly over this last share of `rollout.max_new_tokens`; 0 disables
    it. For episodes with several turns the mean over the turns is used."""
    overlong_penalty: NonNegative = 1.0
    """The penalty of a response of maximum length."""
    mask_truncated: bool = False
    """Leave out responses that were cut off at the longest length."""
    difficulty_range: tuple[Bound, Bound] | None = None
    """Leave out groups whose mean reward is outside this range."""
    positive_above: float | None = None
    """Train on responses with a reward above this alone, each with advantage 1."""

    baseline: Literal["none", "group", "leave_one_out", "batch", "running", "greedy"] = "none"
    """What is subtracted from a reward: the mean of its group, of its siblings, of the batch, of all so far, or the
    reward of the task's greedy answer."""
    scale: Literal["none", "group", "batch", "running"] = "none"
    """What it is divided by: the standard deviation of the group, the batch, or all so far."""
    per_domain: bool = False
    """Statistics of the batch and of all so far are taken within each domain."""
    turn_weight: NonNegative = 0.0
    """Weight of a turn's advantage over turns of its group that began in the same state."""
    turn_discount: Share = 0.95
    """Discount a turn of the returns such turns are compared by."""
    credit: Literal["sample", "returns", "gae"] = "sample"
    """How a sample's advantage reaches its tokens: all the same, discounted returns with a KL penalty at each token, or
    generalised advantage estimation with a critic."""
    discount: Share = 1.0
    """Discount a token."""
    gae_lambda: Share = 0.95
    """How far advantages look beyond the critic's next prediction."""
    whiten: bool = False
    """Shift and scale the tokens' advantages to mean 0 and deviation 1 over the step."""
    advantage_clip: Positive | None = None
    """Largest size of a token's advantage."""
    critic_lr: Positive = 1e-5
    """Peak learning rate of the critic; its course is that of `train.lr`."""
    critic_warmup_steps: Whole = 0
    """Steps in which the critic alone is trained, before the first of the model's own."""
    value_clip: Positive | None = 0.2
    """How far a prediction may move from the one the step began with before it gains nothing more; null for no limit."""

    kl_coef: NonNegative = 0.0
    """Weight of the KL penalty against the initial model; above 0 a reference is used."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the penalty is part of the loss or of the reward."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """How the KL is estimated from log-probs."""
    kl_target: Positive | None = None
    """KL a token towards which the weight is steered; null leaves it as it is."""
    kl_horizon: Positive = 10_000.0
    """Samples over which a KL far from its target changes the weight by a fifth."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""

    loss: str = "clipped"
    """`clipped`, `cispo`, `topr`, `sapo`, `reinforce`, or a function: `module:name` or `file.py:name`."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a loss of your own."""
    ratio: Literal["token", "turn", "sequence"] = "token"
    """Whether the ratio to the proximal policy is a token's, or the geometric mean of a turn's or a sequence's."""
    clip_low: Share = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Limit = 0.2
    """The ratio is clipped above at 1 + clip_high; `.inf`: it is not."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative, the loss is at most this many times its size."""
    tau_positive: Positive = 1.0
    """Temperature of `sapo`'s gate where the advantage is positive."""
    tau_negative: Positive = 1.05
    """Temperature of `sapo`'s gate elsewhere."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = "token_mean"
    """Mean over all response tokens; over samples of their token means; over samples of their token sums; or that sum
    divided by a fixed length."""
    length_normaliser: Whole = 0
    """The fixed length, 0 for `rollout.max_new_tokens`."""
    correction: Literal["truncated", "masked", "none"] = "truncated"
    """Importance weights from the sampler's to the trainer's log-probs: cut at `correction_cap`, or 0 outside
    `correction_low` to `correction_cap`."""
    correction_level: Literal["token", "turn", "sequence"] = "token"
    """Whether a weight is a token's, or the product of its turn's or its sequence's."""
    correction_low: NonNegative = 0.5
    """Smallest weight that `masked` leaves."""
    correction_cap: Limit = 2.0
    """Largest importance weight; `.inf`: any."""

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, value: Any, handler: ModelWrapValidatorHandler[AlgorithmConfig]) -> AlgorithmConfig:
        """Puts the recipe's settings beneath those that were written."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            return handler(value)
        name = value.get("name", "grpo")
        recipe = RECIPES.get(name if isinstance(name, str) and ":" not in name else "grpo", {})
        config = handler({**recipe, **value})
        written = {key for key in value if key in cls.model_fields}
        config.check({key for key in written if getattr(config, key) != _default(recipe, key)})
        return config

    def check(self, changed: set[str]) -> None:
        """Raises where pieces contradict each other, or where one of the `changed` settings is read by none."""
        if ":" not in self.name and self.name not in RECIPES:
            raise ValueError(_unknown("name", self.name, list(RECIPES)))
        if ":" not in self.loss and self.loss not in LOSSES:
            raise ValueError(_unknown("loss", self.loss, list(LOSSES)))
        for wrong, text in _contradictions(self):
            if wrong:
                raise ValueError(text)
        for key in sorted(changed):
            if key in _READ_IF and not (condition := _READ_IF[key])[0](self):
                raise ValueError(f"algorithm.{key} is set, but nothing reads it unless {condition[1]}")

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of one sample teaches nothing."""
        return self.baseline in ("group", "leave_one_out") or self.scale == "group"

    @property
    def needs_critic(self) -> bool:
        return self.credit == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0


def _default(recipe: Mapping[str, Any], key: str) -> Any:
    return recipe.get(key, AlgorithmConfig.model_fields[key].get_default(call_default_factory=True))


def _unknown(key: str, value: str, known: list[str]) -> str:
    meant = did_you_mean(value, known) or f": write {', '.join(known)}, module:name or file.py:name"
    return f"algorithm.{key} {value!r} is not known{meant}"


def _contradictions(c: AlgorithmConfig) -> list[tuple[bool, str]]:
    relative = c.baseline != "none" or c.scale != "none"
    return [
        (
            c.credit == "gae" and relative,
            "algorithm.credit=gae has the critic as its baseline: write algorithm.baseline=none algorithm.scale=none",
        ),
        (
            c.positive_above is not None and (relative or c.credit != "sample" or c.whiten),
            "algorithm.positive_above gives every response it keeps the advantage 1: write algorithm.baseline=none "
            "algorithm.scale=none algorithm.credit=sample algorithm.whiten=false",
        ),
        (
            c.turn_weight > 0 and (c.credit != "sample" or c.baseline != "group"),
            "algorithm.turn_weight compares turns within a group: write algorithm.baseline=group algorithm.credit=sample",
        ),
        (
            c.loss == "topr" and c.correction != "none",
            "algorithm.loss=topr weighs samples by the sampler's log-probs itself: write algorithm.correction=none",
        ),
        (
            c.correction == "masked" and c.correction_low > c.correction_cap,
            f"algorithm.correction_low is {c.correction_low:g}, above algorithm.correction_cap={c.correction_cap:g}: no "
            "token would be left",
        ),
        *(
            (
                bounds is not None and bounds[0] > bounds[1],
                f"algorithm.{key} is {bounds}: write the lower bound first",
            )
            for key, bounds in (("reward_clip", c.reward_clip), ("difficulty_range", c.difficulty_range))
        ),
    ]


_READ_IF: Mapping[str, tuple[Callable[[AlgorithmConfig], bool], str]] = {
    "overlong_penalty": (lambda c: c.overlong_buffer_ratio > 0, "algorithm.overlong_buffer_ratio is above 0"),
    "per_domain": (
        lambda c: bool({c.baseline, c.scale} & {"batch", "running"}),
        "algorithm.baseline or algorithm.scale is batch or running",
    ),
    "turn_discount": (lambda c: c.turn_weight > 0, "algorithm.turn_weight is above 0"),
    "discount": (lambda c: c.credit != "sample", "algorithm.credit is returns or gae"),
    "gae_lambda": (lambda c: c.credit == "gae", "algorithm.credit is gae"),
    "critic_lr": (lambda c: c.credit == "gae", "algorithm.credit is gae"),
    "critic_warmup_steps": (lambda c: c.credit == "gae", "algorithm.credit is gae"),
    "value_clip": (lambda c: c.credit == "gae", "algorithm.credit is gae"),
    "kl_in": (lambda c: c.kl_coef > 0, "algorithm.kl_coef is above 0"),
    "kl_estimator": (lambda c: c.kl_coef > 0, "algorithm.kl_coef is above 0"),
    "kl_target": (lambda c: c.kl_coef > 0, "algorithm.kl_coef is above 0"),
    "kl_horizon": (lambda c: c.kl_target is not None, "algorithm.kl_target is set"),
    "loss_options": (lambda c: ":" in c.loss, "algorithm.loss is a function of your own"),
    "ratio": (lambda c: c.loss in RATIO_LOSSES, f"algorithm.loss is {', '.join(RATIO_LOSSES)}"),
    "clip_low": (lambda c: c.loss in ("clipped", "cispo"), "algorithm.loss is clipped or cispo"),
    "clip_high": (lambda c: c.loss in ("clipped", "cispo"), "algorithm.loss is clipped or cispo"),
    "dual_clip": (lambda c: c.loss == "clipped", "algorithm.loss is clipped"),
    "tau_positive": (lambda c: c.loss == "sapo", "algorithm.loss is sapo"),
    "tau_negative": (lambda c: c.loss == "sapo", "algorithm.loss is sapo"),
    "length_normaliser": (lambda c: c.aggregation == "fixed_length", "algorithm.aggregation is fixed_length"),
    "correction_level": (lambda c: c.correction != "none", "algorithm.correction is truncated or masked"),
    "correction_low": (lambda c: c.correction == "masked", "algorithm.correction is masked"),
    "correction_cap": (lambda c: c.correction != "none", "algorithm.correction is truncated or masked"),
}
"""When a setting is read, as a test and in words."""
