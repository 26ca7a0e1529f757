"""Rewards: how attempts are judged.

A reward is a plain function `(task, response) -> float`, or `-> {part: value}`. It runs in grader processes
(`GraderPool`), where it may print, hang, leak or crash without harming the run: every attempt ends with a `Verdict` or
with a `ScoreFailure` that has the reason.

    async with GraderPool(RewardSpec.of("number"), workers=4) as pool:
        verdict = await pool.score(task, response)

`GraderPool` is imported from `roll.reward.pool`: grader processes import this package too, and start faster without it.
"""

from roll.reward.base import RewardFn, ScoreFailure, Verdict
from roll.reward.compose import compose
from roll.reward.factory import make
from roll.reward.reward_spec import RewardSpec

__all__ = ["RewardFn", "RewardSpec", "ScoreFailure", "Verdict", "compose", "make"]
