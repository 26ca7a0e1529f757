"""The names of a step's metrics (`kl` for `train/kl`) and which component provides each.

Invariant: no two components provide the same name.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from roll.config.errors import UserError

OF_MIXTURE = frozenset({"expert_load_max", "experts_idle", "router_entropy", "router_balance_loss", "dropped_tokens"})
"""Additional metrics of a trainer for a model with experts."""
OF_TRAINER = frozenset(
    {
        *("loss", "grad_norm", "lr", "tokens", "packed_tokens", "updates", "skipped"),
        *("micro_batch_tokens", "oom_retries"),
        *("entropy", "kl", "is_weight_mean", "is_weight_clip_frac"),
        *("rollout_logprob_diff", "rollout_logprob_diff_max", "rollout_kl", "is_ess"),
        "imbalance",  # of a sharded trainer
        *OF_MIXTURE,
    }
)
OF_ALGORITHM = frozenset({"kl_coef"})
"""Metrics of an `Algorithm` that does not replace `metrics`."""
OF_CRITIC = "critic_"
"""Prefix of all metrics of a critic."""


def check_unique(names: Iterable[str], taken: Container[str], whose: str) -> None:
    """Raises if a name is already taken; `whose` names the component in the message."""
    for name in names:
        if name in taken or name.startswith(OF_CRITIC):
            raise UserError(
                f"{whose} gives a metric {name!r}, but train/{name} is not its own: write another name, as 'my_{name}'"
            )
