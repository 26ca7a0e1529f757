"""One launch of ranks for all tests of this folder that leave them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from roll.cluster.mesh import MeshShape
from tests.ranks import Ranks, ranks_of
from tests.thorough import but

LAYOUTS = {
    "two shards": MeshShape(shard=2),
    "four shards": MeshShape(shard=4),
    "two replicas of two": MeshShape(replicate=2, shard=2),
}
MESHES = {**LAYOUTS, "three shards": MeshShape(shard=3)}


@pytest.fixture(scope="package")
def launched() -> Iterator[Callable[[str], Ranks]]:
    """The ranks of a layout, started when they are asked for first."""
    with ExitStack() as open_ranks:
        yield cache(lambda layout: open_ranks.enter_context(ranks_of(MESHES[layout])))


@pytest.fixture(params=but({"two replicas of two"}, LAYOUTS))
def ranks(request: pytest.FixtureRequest, launched: Callable[[str], Ranks]) -> Ranks:
    """Each layout; `make test` has the one with both kinds of groups here, and the others where a test names them."""
    return launched(request.param)


@pytest.fixture(scope="package")
def two(launched: Callable[[str], Ranks]) -> Ranks:
    return launched("two shards")


@pytest.fixture(scope="package")
def four(launched: Callable[[str], Ranks]) -> Ranks:
    return launched("four shards")


@pytest.fixture(scope="package")
def three(launched: Callable[[str], Ranks]) -> Ranks:
    """Which divide few sizes of a model: shards are padded."""
    return launched("three shards")


@pytest.fixture(scope="package")
def replicas(launched: Callable[[str], Ranks]) -> Ranks:
    return launched("two replicas of two")
