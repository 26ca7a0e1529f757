from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_runs import EXACT, ONE, RANKS, SMALL, TINY, Remains

from roll import load_config
from roll.pipeline.entrypoints import train
from roll.pipeline.report import SilentReporter


@pytest.fixture
def run_small(tmp_path: Path) -> Callable[..., Remains]:
    """Trains small_configs/tiny.yaml, made small, with further overrides, in this process."""

    def run(*overrides: str, name: str = "run", base: tuple[str, ...] = SMALL, **options: object) -> Remains:
        config = load_config(TINY, [*base, f"run={tmp_path / name}", *overrides])
        train(config, reporter=SilentReporter(), **options)
        return Remains(tmp_path / name)

    return run


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty working directory: a run whose settings are in no file records all loaded modules of the working
    directory, and in the repository these are hundreds of tests."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    """A deterministic run that nothing happened to."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(load_config(TINY, [*EXACT, f"run={path}"]), reporter=SilentReporter())
    return Remains(path)


@pytest.fixture(scope="session")
def over_ranks(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    """Six steps on two ranks, to which nothing happened."""
    path = tmp_path_factory.mktemp("sharded") / "run"
    train(load_config(TINY, [*ONE, RANKS, f"run={path}"]), reporter=SilentReporter())
    return Remains(path)
