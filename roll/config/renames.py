"""Settings and metrics that have another name now, and the present names.

A configuration that a user writes is refused with the present name (`error_messages.unknown`). What an older version has
written into a run's folder is read under the present names: `config_of_run` for its settings, `metric` for its metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

_Path: TypeAlias = tuple[Any, ...]

_ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward_model", "judge", "rollout", "reward", "env")

SETTINGS: Mapping[str, str] = {
    "run.keep_checkpoints": "run.keep.checkpoints",
    **{f"roles.{role}.tensor_parallel": f"roles.{role}.parallel.tensor" for role in _ROLES},
    "tasks.sample_by": "tasks.sampler",
    "tasks.weights": "tasks.domain_weights",
    "rollout.stale": "rollout.staleness_policy",
    "rollout.stale_wait_s": "rollout.staleness_timeout_s",
    "rollout.on_update": "rollout.on_weight_update",
    "rollout.cut": "rollout.batch_selection",
    "rollout.order": "rollout.task_order",
    "rollout.end_early": "rollout.early_stop",
    "rollout.kv_tokens": "rollout.kv_cache_tokens",
    "rollout.tries": "rollout.max_attempts",
    "reward.tries": "reward.max_attempts",
    "algorithm.overlong_share": "algorithm.overlong_buffer_ratio",
    "algorithm.difficulty": "algorithm.difficulty_range",
    "weights.path": "weight_sync.transport",
    "weights": "weight_sync",
    "supervise": "fault_tolerance",
}
"""Dotted names before and now. A section that is listed stands for all of its settings, unless one is listed itself."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "rollout.batch_selection": {"first": "first_finished"},
    "rollout.task_order": {"lookahead": "longest_first", "tail_rounds": "tail_batching"},
}
"""Values that have another name now, by the present name of the setting."""

METRICS: Mapping[str, str] = {
    "train/rows": "train/packed_tokens",
    "train/mismatch": "train/rollout_logprob_diff",
    "train/mismatch_max": "train/rollout_logprob_diff_max",
    "train/mismatch_k3": "train/rollout_kl",
    "train/mismatch_ess": "train/is_ess",
    "train/correction": "train/is_weight_mean",
    "train/correction_cut": "train/is_weight_clip_frac",
    "train/clipped": "train/clip_frac",
    "waste/tokens": "rollout/discarded_tokens",
    "waste/share": "rollout/discarded_token_ratio",
    "bias/length": "rollout/length_bias",
    "queue/graders_full_s": "rollout/grader_backpressure_s",
    "data/controller_bytes_a_sample": "controller/bytes_per_sample",
}
METRIC_PREFIXES: Mapping[str, str] = {"stage/": "state/"}


def setting(name: str) -> str | None:
    """The present name of a setting that has another name now; None if `name` is not one of those.

    `supervise.ping_s` is `fault_tolerance.ping_s`, because the section has another name.
    """
    path = tuple(name.split("."))
    now = _now(path)
    return None if now == path else ".".join(map(str, now))


def value(name: str, old: Any) -> str | None:
    """The present name of a value of the setting `name`; None if it has not changed."""
    return VALUES.get(name, {}).get(old) if isinstance(old, str) else None


def metric(name: str) -> str:
    """The present name of a metric."""
    if name in METRICS:
        return METRICS[name]
    for before, now in METRIC_PREFIXES.items():
        if name.startswith(before):
            return now + name.removeprefix(before)
    return name


def config_of_run(settings: Any) -> Any:
    """The settings in a run's config.yaml under their present names, each with the present name of its value."""
    if not isinstance(settings, Mapping):
        return settings
    found: dict[Any, Any] = {}
    for path, content in _leaves(settings, ()):
        now = _now(path)
        section = found
        for name in now[:-1]:
            section = section.setdefault(name, {})
        new = value(".".join(map(str, now)), content)
        section[now[-1]] = content if new is None else new
    return found


def _leaves(settings: Mapping[Any, Any], above: _Path) -> Iterator[tuple[_Path, Any]]:
    for key, content in settings.items():
        if isinstance(content, Mapping) and content:
            yield from _leaves(content, (*above, key))
        else:
            yield (*above, key), content


def _now(path: _Path) -> _Path:
    """A path under its present name; the longest listed part of it decides."""
    for end in range(len(path), 0, -1):
        if (now := SETTINGS.get(".".join(map(str, path[:end])))) is not None:
            return (*now.split("."), *path[end:])
    return path
