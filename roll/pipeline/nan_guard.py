"""Guard against non-finite updates: reports updates that were skipped or repeated after running out of memory, and ends
the run after too many skipped in a row."""

from __future__ import annotations

from collections import Counter

from roll.config.errors import RunError
from roll.pipeline.report import Reporter
from roll.strategy.train.base import UpdateStats
from roll.strategy.train.out_of_memory import retry_warning


class NanGuard:
    def __init__(self, reporter: Reporter, max_skipped_in_a_row: int) -> None:
        self._reporter = reporter
        self._max_in_a_row = max_skipped_in_a_row
        self._in_a_row: Counter[str] = Counter()
        """Steps in a row with skipped updates, by role."""

    def check(self, step: int, stats: UpdateStats, role: str = "actor_train") -> None:
        """Checks the update of a role in a step."""
        if stats.oom_retries:
            warning = retry_warning("train.micro_batch_tokens", stats.micro_batch_tokens)
            self._reporter.warned(f"step {step}: {warning} ({role})")
        if not stats.skipped:
            self._in_a_row[role] = 0
            return
        self._in_a_row[role] += 1
        skipped = "the update was" if stats.updates == 1 else f"{stats.skipped} of {stats.updates} updates were"
        self._reporter.warned(f"step {step}: {skipped} skipped: {stats.not_finite} was not finite ({role})")
        if self._in_a_row[role] >= self._max_in_a_row:
            raise RunError(
                f"{role} skipped updates in {self._max_in_a_row} steps in a row (train.max_skipped_in_a_row), the last "
                f"in step {step}, where {stats.not_finite} was not finite: look at the rewards of these samples, or "
                "write a smaller train.lr"
            )
