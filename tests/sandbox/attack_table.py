"""All attacks, and the table of what becomes of them on each level of this machine.

    PYTHONPATH=. python tests/sandbox/attack_table.py [level …]

prints it as Markdown, for this machine and this user.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import dataclasses

import attacks_on_files
import attacks_on_limits
import attacks_on_processes
import memory_attacks
from attack import Attack, probe_all, set_off
from boxes import BARE, NAMES, tried

from roll.sandbox import Limits, MissingLevel, Sandbox

PROBES: tuple[Attack, ...] = (*attacks_on_processes.PROBES, *attacks_on_files.PROBES)
UNSEEN: tuple[Attack, ...] = tuple(
    Attack(
        f"memory that belongs to no process: {name}",
        "memory",
        source.replace('print("held"', 'print("escaped: held"'),
        frozenset({"calls"}),
        ends=frozenset({"memory", "disk", "failed", "timeout"}),
        limits=Limits(wall_s=20, cpu_s=20, memory_mb=memory_attacks.LIMIT_MB),
        slow=True,
        counted=name == "locks of files",
    )
    for name, source in memory_attacks.ATTACKS.items()
)
BOMBS: tuple[Attack, ...] = attacks_on_limits.BOMBS


def column(name: str) -> Sandbox | MissingLevel:
    """A level by its name; the plain one also as it is without Landlock and seccomp."""
    found = tried("plain" if name == BARE else name)  # type: ignore[arg-type]
    if name == BARE and isinstance(found, Sandbox):
        return dataclasses.replace(found, guards=found.guards & {"user"})
    return found


def results(sandbox: Sandbox) -> dict[str, str]:
    """What became of each attack on a level."""
    probes = [probe for probe in PROBES if probe.here and not probe.gap(sandbox)]
    told = probe_all(sandbox, probes)
    found = {name: f"ESCAPED {escapes}" if escapes else "contained" for name, escapes in told.items()}
    for bomb in (*BOMBS, *UNSEEN):
        if not bomb.gap(sandbox):
            _, wrong = set_off(sandbox, bomb)
            found[bomb.name] = f"ESCAPED {wrong}" if wrong else "contained"
    for attack in (*PROBES, *BOMBS, *UNSEEN):
        found.setdefault(attack.name, "gap" if attack.here else "not possible here")
    return found


def main() -> None:
    """Prints the table."""
    names = sys.argv[1:] or NAMES
    columns = {name: found for name in names if isinstance(found := column(name), Sandbox)}
    who = "root" if os.geteuid() == 0 else "another user"
    print(f"{os.uname().machine}, Linux {os.uname().release}, as {who}\n")
    told = {name: results(sandbox) for name, sandbox in columns.items()}
    print("| attack |", " | ".join(columns), "|")
    print("| --- |", " --- |" * len(columns))
    for attack in (*PROBES, *BOMBS, *UNSEEN):
        print(f"| {attack.kind}: {attack.name} |", " | ".join(told[name][attack.name] for name in columns), "|")


if __name__ == "__main__":
    main()
