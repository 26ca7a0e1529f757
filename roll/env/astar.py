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
    lower_bound: Callable[[S], int] = lambda state: 0,
    max_states: int = 200_000,
) -> list[A] | None:
    """The actions of a cheapest path to a goal; None if there is none, or none was found within `max_states`.

    `moves` returns the actions from a state, with their costs and the states they lead to. `lower_bound` is a lower bound
    of the remaining cost that never decreases by more than a move's cost.
    """
    tie_break = itertools.count()  # tie-break: among states of equal cost the first found goes first
    came_from: dict[S, tuple[S, A] | None] = {}
    queue: list[tuple[int, int, int, S, tuple[S, A] | None]] = [(lower_bound(start), next(tie_break), 0, start, None)]
    while queue and len(came_from) < max_states:
        _, _, cost, state, previous = heapq.heappop(queue)
        if state in came_from:
            continue
        came_from[state] = previous
        if is_goal(state):
            return _reconstruct_path(came_from, state)
        for action, step_cost, next_state in moves(state):
            if next_state not in came_from:
                path_cost = cost + step_cost
                heapq.heappush(
                    queue, (path_cost + lower_bound(next_state), next(tie_break), path_cost, next_state, (state, action))
                )
    return None


def _reconstruct_path(came_from: dict[S, tuple[S, A] | None], state: S) -> list[A]:
    actions: list[A] = []
    while (step := came_from[state]) is not None:
        state, action = step
        actions.append(action)
    return actions[::-1]
