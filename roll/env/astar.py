"""The shortest path between states: A*; without a lower bound it is Dijkstra's algorithm."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

S = TypeVar("S", bound=Hashable)
A = TypeVar("A")


def shortest_path(
    start: S,
    moves: Callable[[S], Iterable[tuple[A, int, S]]],
    is_goal: Callable[[S], bool],
    at_least: Callable[[S], int] = lambda state: 0,
    most_states: int = 200_000,
) -> list[A] | None:
    """The actions of a cheapest path to a goal; None if there is none, or none was found within `most_states`.

    `moves` returns the actions from a state, with their costs and the states they lead to. `at_least` is a lower bound of
    the remaining cost that never decreases by more than a move's cost.
    """
    order = itertools.count()  # tie-break: among states of equal cost the first found goes first
    came: dict[S, tuple[S, A] | None] = {}
    queue: list[tuple[int, int, int, S, tuple[S, A] | None]] = [(at_least(start), next(order), 0, start, None)]
    while queue and len(came) < most_states:
        _, _, cost, state, step = heapq.heappop(queue)
        if state in came:
            continue
        came[state] = step
        if is_goal(state):
            return _way(came, state)
        for action, price, after in moves(state):
            if after not in came:
                so_far = cost + price
                heapq.heappush(queue, (so_far + at_least(after), next(order), so_far, after, (state, action)))
    return None


def _way(came: dict[S, tuple[S, A] | None], state: S) -> list[A]:
    actions: list[A] = []
    while (step := came[state]) is not None:
        state, action = step
        actions.append(action)
    return actions[::-1]
