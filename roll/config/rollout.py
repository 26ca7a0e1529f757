"""The settings of generation: how samples are made, and which of them make a step."""

from __future__ import annotations

from typing import Literal

from roll.config.section import Bound, Count, NonNegative, Positive, Seconds, Section, Share, Stops, Whole


class RolloutConfig(Section):
    """How samples are made: `groups_per_step × group_size = samples_per_step`."""

    groups_per_step: Count = 8
    """Tasks whose groups train one step."""
    group_size: Count = 8
    """Samples of one task."""
    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probs of training are under the same one."""
    top_p: Share = 1.0
    """Nucleus sampling; below 1 needs `train_on_truncated`."""
    top_k: Whole = 0
    """Sample from the k likeliest tokens, 0 for all; above 0 needs `train_on_truncated`."""
    train_on_truncated: bool = False
    """Allow training on samples of a truncated distribution (top_p, top_k)."""
    stop: Stops = ()
    """Strings that end a response (their tokens stay in it)."""
    filter: str = "no_signal"
    """Which finished groups are dropped and replaced: `no_signal` (rewards all equal), `mean_range`, `none`, or a
    function: `module:name` or `file.py:name`."""
    filter_range: tuple[Bound, Bound] = (0.05, 0.95)
    """`mean_range` keeps groups whose mean reward is in it."""
    max_replacements: NonNegative = 1.0
    """At most this many times `groups_per_step` dropped groups are replaced in a step."""
    max_staleness: Whole = 0
    """Versions of the weights a sample may be behind when it is trained on. 0 is on-policy; above, generation continues
    while training runs, which needs `executor: ray`."""
    staleness_policy: Literal["wait", "mask", "drop"] = "wait"
    """How samples that would exceed `max_staleness` are handled: `wait` for them, `mask` their old tokens, or `drop`
    them."""
    staleness_timeout_s: Seconds = 600.0
    """Seconds that `wait` waits; after that the samples are dropped."""
    on_weight_update: Literal["pause", "abort"] = "pause"
    """While new weights arrive, running samples `pause` and then continue, or `abort` and continue from their prefix,
    which is computed again."""
    oversample: NonNegative = 0.0
    """Groups issued in addition to those a step needs, as a share of them."""
    batch_selection: Literal["in_order", "first_finished"] = "in_order"
    """Which groups make a step: the oldest issued, or the first to finish, which favours short answers."""
    task_order: str = "in_order"
    """Which task is next: `in_order`, `longest_first` (by expected length), `tail_batching` (long ones in steps of their
    own), or a class: `module:name` or `file.py:name`."""
    lookahead: Count = 64
    """Tasks that `task_order: longest_first` chooses from."""
    early_stop: tuple[str, ...] = ()
    """What ends a response early: `repetition`, `length_budget=4` (times its siblings' mean), or a function."""
    policy: str = "none"
    """The policy that controls in-flight groups: `none`, `stragglers=60` (the last responses of a step are ended after
    that many seconds), or a class: `module:name` or `file.py:name`."""
    max_running: Count = 64
    """Samples an engine generates at once."""
    kv_cache_tokens: Whole = 0
    """Most tokens in an engine's KV cache. A full engine gets no more samples, and in the embedded engine some requests
    wait. 0 for what the samples need, within the available memory."""
    router_replay: bool = True
    """For mixtures of experts: engines record the experts of each token, and trainers route it to the same ones. No
    effect on other models."""
    deadline_s: Seconds = 600.0
    """Seconds that engines may spend on one response; then its sample fails."""
    max_attempts: Count = 3
    """Attempts at a sample whose worker dies or hangs."""
    quarantine_after: Count = 3
    """Workers that a task's samples may kill or hang; after that the task is not drawn any more."""
