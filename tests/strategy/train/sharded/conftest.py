"""One launch of ranks for all tests of this folder that leave them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from roll.cluster.mesh import MeshShape
from tests.ranks import Ranks, ranks_of

LAYOUTS = {
    "two shards": MeshShape(shard=2),
    "four shards": MeshShape(shard=4),
    "two replicas of two": MeshShape(replicate=2, shard=2),
}


@pytest.fixture(scope="package")
def launched() -> Iterator[Callable[[str], Ranks]]:
    """The ranks of a layout, started when they are asked for first."""
    with ExitStack() as open_ranks:
        yield cache(lambda layout: open_ranks.enter_context(ranks_of(LAYOUTS[layout])))


@pytest.fixture(params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, launched: Callable[[str], Ranks]) -> Ranks:
    return launched(request.param)


@pytest.fixture
def two(launched: Callable[[str], Ranks]) -> Ranks:
    return launched("two shards")


@pytest.fixture
def four(launched: Callable[[str], Ranks]) -> Ranks:
    return launched("four shards")
