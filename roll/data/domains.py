"""The tasks of a run with domains, from any number of sources.

Invariants: every task belongs to a domain that has a section; its id begins with the section whose source it is from, so
that ids of two sources never collide; a domain of weight 0 has no training tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from roll.config.domains import DomainConfig, SourceConfig
from roll.config.errors import UserError
from roll.config.suggest import did_you_mean
from roll.data.sources import EXTERNAL_SOURCES, TaskSet, find_generator, load_splits
from roll.data.task import Task

UNLABELLED = Task.domain
"""The domain of a task whose source does not name one."""


def load_domains(domains: Mapping[str, DomainConfig], root: str = "") -> TaskSet:
    """All tasks of all domains, domain by domain; files are resolved from `root`."""
    train: list[Task] = []
    held_out: list[Task] = []
    skipped: list[str] = []
    for name, domain in domains.items():
        if domain.tasks.source:
            found = _load(name, domain.tasks, root)
            train += _of_domains(name, domain.tasks, found.train, domains)
            held_out += _of_domains(name, domain.tasks, found.held_out, domains)
            skipped += found.skipped
    train = [task for task in train if domains[task.domain].weight > 0]
    trained, measured = {task.domain for task in train}, {task.domain for task in held_out}
    for name, domain in domains.items():
        if domain.weight > 0 and name not in trained:
            raise UserError(f"domains.{name} has no tasks to train on: {_remedy(name, domain)}")
        if domain.weight == 0 and name not in measured:
            raise UserError(f"domains.{name} has weight 0 and no held-out tasks, so it is of no use: remove it")
    return TaskSet(tuple(train), tuple(held_out), skipped=tuple(skipped))


def domains_of(tasks: Sequence[Task]) -> list[str]:
    """The domains of the tasks, sorted."""
    return sorted({task.domain for task in tasks})


def first_of_each(tasks: Sequence[Task], count: int) -> list[Task]:
    """The first `count` tasks of every domain, to check instead of all."""
    seen: dict[str, int] = {}
    chosen: list[Task] = []
    for task in tasks:
        seen[task.domain] = seen.get(task.domain, 0) + 1
        if seen[task.domain] <= count:
            chosen.append(task)
    return chosen


def _load(name: str, config: SourceConfig, root: str) -> TaskSet:
    with prefix_errors(f"domains.{name}", f"domains.{name}.tasks"):
        return load_splits(config, root=root)


@contextmanager
def prefix_errors(section: str, tasks: str) -> Iterator[None]:
    """Makes the errors of a source name its setting: a leading `tasks` in a message becomes the argument `tasks`; other
    messages get the prefix `section`."""
    try:
        yield
    except UserError as error:
        text = str(error)
        message = f"{tasks}{text.removeprefix('tasks')}" if text.startswith("tasks") else f"{section}: {text}"
        raise UserError(message) from error.__cause__


def _of_domains(
    section: str, config: SourceConfig, tasks: Sequence[Task], domains: Mapping[str, DomainConfig]
) -> Iterator[Task]:
    """The tasks of a section's source with their domains: the section's, unless the source names another."""
    labelled = find_generator(config.source, {}) is None and config.source not in EXTERNAL_SOURCES
    for task in tasks:
        domain = task.domain if labelled and task.domain != UNLABELLED else section
        if domain not in domains:
            raise UserError(
                f"domains.{section}: its source gave the task {task.id!r} of the domain {domain!r}, which has no section"
                f"{did_you_mean(domain, domains)}: write domains.{domain} with a reward, or leave the task's domain out "
                f"for it to be of {section!r}"
            )
        yield replace(task, id=f"{section}/{task.id}", domain=domain)


def _remedy(name: str, domain: DomainConfig) -> str:
    if domain.tasks.source:
        return f"the source {domain.tasks.source!r} gave none"
    return f"write domains.{name}.tasks, or let another domain's source give tasks of the domain {name!r}"
