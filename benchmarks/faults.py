"""How long a run on several nodes takes to notice that a worker or a node was killed, and to go on or to stop.

Every victim is killed in every phase, as the tests do it (`tests/pipeline/cluster_faults.py`): nodes are raylets on this
machine, with all their processes; a gate holds the run in the phase. `noticed_s` is the time from the kill until the run
says what it lost, `trains_s` until its next update begins, `stopped_s` until its process has ended, where it cannot go
on. What the run leaves is compared with a run that nothing happened to: weights, optimizer, samples and ledger. A plan
(see `--plans`) is one run with several kills.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("pipeline", "")]
from cluster_faults import PHASES, PLANS, VICTIMS, Cell, Outcome, Plan, assert_same_ending, endure, undisturbed
from common import parser, report
from small_runs import Remains


def measure(plan: Plan, folder: Path) -> tuple[list[Outcome], str]:
    """What came of its cells, and what did not hold, if anything."""
    outcomes: list[Outcome] = []
    try:
        endure(plan, folder, outcomes)
        assert_same_ending(Remains(folder / "run"), undisturbed(plan.steps, folder))
    except AssertionError as error:
        return outcomes, str(error) or "the run does not end as one to which nothing happened"
    return outcomes, ""


def told(outcome: Outcome) -> str:
    """A cell of the table."""
    if outcome.stopped_s is not None:
        return f"stops: {outcome.stopped_s:.1f} s"
    return f"continues: {outcome.noticed_s:.1f} s, {outcome.trains_s:.1f} s"


def table(found: Mapping[Cell, str]) -> str:
    """In Markdown, a line per victim."""
    lines = [f"| killed | {' | '.join(PHASES)} |", f"| --- |{' --- |' * len(PHASES)}"]
    for victim in VICTIMS:
        cells = [found.get(Cell(victim, phase), "") for phase in PHASES]
        if any(cells):
            lines.append(f"| {victim} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--plans", type=int, nargs="*", help=f"numbers of some of {len(PLANS)} plans (default: all)")
    args = options.parse_args()
    found: dict[Cell, str] = {}
    seconds: dict[str, float] = {}
    for name, plan in [list(PLANS.items())[number] for number in args.plans or range(len(PLANS))]:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcomes, wrong = measure(plan, Path(folder))
        found |= {outcome.cell: told(outcome) for outcome in outcomes}
        if wrong:
            found |= {cell: f"{found.get(cell, '')} FAILS".strip() for cell in plan.cells}
        for outcome in outcomes:
            seconds[f"{outcome.cell.victim}, {outcome.cell.phase}"] = outcome.stopped_s or outcome.trains_s or 0.0
            print(f"{outcome.cell.victim}, {outcome.cell.phase}: {told(outcome)}: {outcome.said}", flush=True)
        print(f"{name}: {time.monotonic() - began_s:.0f} s: {wrong or 'the same bits'}\n", flush=True)
    print(table(found))
    report({"seconds": seconds} if args.json else {}, args.json)


if __name__ == "__main__":
    main()
