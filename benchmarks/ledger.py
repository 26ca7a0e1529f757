"""How fast the ledger records transitions, and how fast its index reads them, on one core.

- `ledger`: transitions a second through `Ledger.append`, with a flush (fsync) every so many of them, into a file in the
  folder given. They are made before; `made` has the making of each `Transition` in it too.
- `floor`: the same bytes by `os.write` in the same portions with the same fsyncs: what the disk alone takes.
- `index`: records a second into a new SQLite index; `again` is to open it when there is nothing new, `questions` to ask
  it everything that `roll ledger` shows.

The best of some repeats is taken; `cpu` figures count the processor's time only, as on a machine with nothing else to do.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.ledger.index import LedgerIndex
from roll.ledger.log import Ledger, Transition

GROUP_SIZE = 8
GROUPS_AT_ONCE = 64
LIFE: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
    ("queued", lambda group: {"task": f"math-{group % 5000}", "group": group, "domain": "math"}),
    ("generating", lambda group: {"engine": group % 8, "worker": group % 4, "version": group // 64}),
    ("scoring", lambda group: {"tokens": 300 + group % 700, "finish": "stop", "versions": [group // 64, group // 64]}),
    ("scored", lambda group: {"reward": group % 10 / 10}),
    ("kept", lambda group: {}),
    ("trained", lambda group: {"version": group // 64 + 1}),
]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--transitions", type=int, default=300_000)
    options.add_argument("--flush-every", type=int, default=4096, help="transitions between two flushes")
    options.add_argument("--repeats", type=int, default=3, help="the best of so many is taken")
    options.add_argument("--dir", default=None, help="where to write (default: the temporary folder)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = Path(folder) / "ledger.log"
        result = measure(path, lives(args.transitions), args.flush_every, args.repeats)
    report(result, args.json)


def measure(path: Path, transitions: list[Transition], flush_every: int, repeats: int) -> dict[str, Any]:
    count = len(transitions)
    contents = portions(transitions, flush_every)
    seconds = {
        "made": best(path, repeats, lambda: record(path, map(copy, transitions), flush_every)),
        "floor": best(path, repeats, lambda: write_raw(path, contents)),
        "ledger": best(path, repeats, lambda: record(path, transitions, flush_every)),
    }
    size = path.stat().st_size
    index = path.with_suffix(".sqlite")
    seconds["index"] = best(index, repeats, lambda: LedgerIndex.open(path).close())
    again = timed(lambda: LedgerIndex.open(path).close())[0]
    questions = timed(lambda: ask(path))[0]
    return {
        "transitions": count,
        "bytes_a_record": size / count,
        "flush_every": flush_every,
        "ledger_transitions_per_s": count / seconds["ledger"][0],
        "ledger_cpu_transitions_per_s": count / seconds["ledger"][1],
        "ledger_made_transitions_per_s": count / seconds["made"][0],
        "floor_transitions_per_s": count / seconds["floor"][0],
        "ledger_of_floor": seconds["floor"][0] / seconds["ledger"][0],
        "index_rows_per_s": count / seconds["index"][0],
        "index_cpu_rows_per_s": count / seconds["index"][1],
        "index_bytes_a_record": index.stat().st_size / count,
        "again_s": again,
        "questions_s": questions,
    }


def lives(count: int) -> list[Transition]:
    """So many transitions of samples that live at the same time, some groups of them."""
    made: list[Transition] = []
    first, now_s = 0, 1.7e9
    while len(made) < count:
        for state, info in LIFE:
            for number in range(GROUPS_AT_ONCE * GROUP_SIZE):
                group = first + number // GROUP_SIZE
                now_s += 0.00137
                made.append(Transition(f"{group}.{number % GROUP_SIZE}", state, "", now_s, info(group)))
        first += GROUPS_AT_ONCE
    return made[:count]


def copy(transition: Transition) -> Transition:
    return Transition(transition.sample, transition.state, transition.reason, transition.time_s, transition.info)


def record(path: Path, transitions: Any, flush_every: int) -> None:
    with Ledger.open(path) as ledger:
        for number, transition in enumerate(transitions, start=1):
            ledger.append(transition)
            if not number % flush_every:
                ledger.flush()


def portions(transitions: list[Transition], flush_every: int) -> list[bytes]:
    encoded = [transition.encode() for transition in transitions]
    return [b"".join(encoded[start : start + flush_every]) for start in range(0, len(encoded), flush_every)]


def write_raw(path: Path, contents: list[bytes]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for content in contents:
        os.write(descriptor, content)
        os.fsync(descriptor)
    os.close(descriptor)


def ask(path: Path) -> None:
    with LedgerIndex.open(path) as index:
        (
            index.states(),
            index.rolled_back_samples(),
            index.balance(),
            index.reasons(),
            index.state_latencies(),
            index.solve_rates(),
        )


def best(path: Path, repeats: int, run: Callable[[], None]) -> tuple[float, float]:
    """Least seconds, and least seconds of the processor, with nothing at `path` before each run."""
    measured = []
    for _ in range(repeats):
        path.unlink(missing_ok=True)
        measured.append(timed(run))
    return min(wall for wall, _ in measured), min(cpu for _, cpu in measured)


def timed(run: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
