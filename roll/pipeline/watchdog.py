"""The watchdog: when nothing has made progress for a while, it reports who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roll.cluster.pending_calls import PendingCall
from roll.cluster.supervisor import Supervisor
from roll.pipeline.recorder import Recorder
from roll.pipeline.roles import TrainRoles

_LINES = 12
"""Maximum number of calls and of workers listed."""


class Watchdog:
    def __init__(
        self,
        roles: TrainRoles,
        supervisor: Supervisor,
        recorder: Recorder | None,
        silent_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self._roles = roles
        self._supervisor = supervisor
        self._recorder = recorder
        self._silent_s = silent_s
        self._warn = warn

    async def run(self) -> None:
        """Checks progress periodically, for ever. Warns once per period of silence."""
        seen, warned = self._progress(), False
        quiet_s, pause_s = 0.0, min(self._silent_s / 4, 10.0)
        while True:
            await asyncio.sleep(pause_s)
            now = self._progress()
            quiet_s = quiet_s + pause_s if now == seen else 0.0
            warned, seen = warned and now == seen, now
            if quiet_s >= self._silent_s and not warned:
                warned = True
                self._warn(self.describe_waits(quiet_s))

    def _progress(self) -> tuple[int, ...]:
        return self._roles.moves, 0 if self._recorder is None else self._recorder.steps

    def describe_waits(self, quiet_s: float) -> str:
        """Lists samples by state with the one that has waited longest, unanswered calls, and unhealthy workers."""
        lines = [f"nothing has moved for {quiet_s:.0f} s. Who waits on whom:"]
        if self._recorder is not None:
            lines += [
                f"  sample {w.sample} has been {w.state} for {w.seconds:.0f} s" + (f" ({w.where})" if w.where else "")
                for w in self._recorder.clock.longest_waits()
            ]
        lines += [f"  {sentence}" for sentence in self._roles.waiting()]
        lines += [
            f"  the controller waits for {call.worker}.{call.method} since {call.since_s:.0f} s" for call in self._calls()
        ]
        unhealthy = [status for status in self._supervisor.status() if status.state != "well"]
        lines += [
            f"  {s.worker} has been {s.state} for {s.since_s:.0f} s: {s.why.splitlines()[0]}" for s in unhealthy[:_LINES]
        ]
        return "\n".join(lines)

    def _calls(self) -> list[PendingCall]:
        calls = [call for cluster in self._roles.clusters for call in cluster.pending()]
        return sorted(calls, key=lambda call: -call.since_s)[:_LINES]
