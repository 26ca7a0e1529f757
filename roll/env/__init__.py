"""Environments for multi-turn episodes.

An environment is a class with `reset(seed)`, `step(action)` and `close()`. Many of them share environment processes
(`EnvPool`), where they may print, hang, leak or crash without harming the run: every call returns the environment's
result or raises an `EnvFailure` with the reason.

    async with EnvPool(workers=2) as pool:
        opened = await pool.reset("17.3", EnvSpec("guess", seed=5))
        step = await pool.step("17.3", "50")

`EnvPool` is imported from `roll.env.pool`: environment processes import this package too, and start faster without it.
"""

from roll.env.base import EnvFailure, Environment, Observation, ResetResult, Step
from roll.env.preflight import check
from roll.env.resolve import register, resolve

__all__ = ["EnvFailure", "Environment", "Observation", "ResetResult", "Step", "check", "register", "resolve"]
