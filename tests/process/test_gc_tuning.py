"""The garbage collector while a process starts, and afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from roll.process.gc_tuning import freeze_gc, freeze_libraries, gc_paused


class Cycle:
    """Refers to itself: only the garbage collector deletes it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def dead_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def allocate() -> None:
    """More objects than two collections of the oldest generation are apart, by Python's default."""
    kept = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
    assert kept


def test_nothing_is_collected_while_a_process_starts() -> None:
    gc.collect()
    gc.set_threshold(700, 10, 10)
    before = dead_cycle()
    allocate()
    assert before() is None, "the collector of this test works"
    with gc_paused():
        garbage = dead_cycle()
        allocate()
        assert garbage() is not None
    assert gc.get_threshold() == (700, 10, 10)
    allocate()
    assert garbage() is None


def test_a_run_that_has_begun_collects_also_after_the_pause() -> None:
    with gc_paused():
        garbage = dead_cycle()
        freeze_gc()
        assert garbage() is None
        running = gc.get_threshold()
        assert running[0] > 0
        later = dead_cycle()
        allocate()
        assert later() is None
    assert gc.get_threshold() == running


def test_libraries_are_not_traversed() -> None:
    with gc_paused():
        library = [Cycle()]
        before = gc.get_freeze_count()
        freeze_libraries()
        assert gc.get_freeze_count() > before
        assert not any(each is library for each in gc.get_objects())
        freeze_gc()
    assert library[0].me is library[0]


def test_a_pause_ends_with_an_error() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="broken"), gc_paused():
        raise ValueError("broken")
    assert gc.get_threshold() == (700, 10, 10)
