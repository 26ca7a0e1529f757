"""Whose turn it is: held against a plain model of the rule."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.env.admission import AdmissionQueue


@dataclass(eq=False)
class Guest:
    kind: str
    queue_position: int
    admitted: asyncio.Future[None] | None = None


MOVES = st.lists(st.sampled_from(["join a", "join b", "join c", "enter", "leave", "give up"]), max_size=60)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(MOVES, st.dictionaries(st.sampled_from("ab"), st.integers(1, 3)))
def test_the_first_whose_kind_has_a_free_slot_is_next(moves: list[str], limits: dict[str, int]) -> None:
    loop = asyncio.new_event_loop()
    waiting: AdmissionQueue[Guest] = AdmissionQueue(limits)
    outside: list[Guest] = []
    inside: list[Guest] = []
    for number, move in enumerate(moves):
        if move.startswith("join"):
            outside.append(Guest(move[-1], number, loop.create_future()))
            waiting.add(outside[-1])
        elif move == "leave" and inside:
            waiting.release(inside.pop(number % len(inside)))
        elif move == "give up" and outside:
            gone = outside.pop(number % len(outside))
            assert gone.admitted is not None
            gone.admitted.cancel()
        free = [g for g in outside if sum(i.kind == g.kind for i in inside) < limits.get(g.kind, 99)]
        assert waiting.first() is (free[0] if free else None)
        if move == "enter" and free:
            waiting.admit(free[0])
            outside.remove(free[0])
            inside.append(free[0])
        assert sum(waiting.admitted_counts.values()) == len(inside)
        assert {id(g) for g in outside} <= {id(g) for g in waiting}
    assert {id(g) for g in outside} <= {id(g) for g in waiting.clear()}
    assert (len(waiting), waiting.first()) == (0, None)
    loop.close()
