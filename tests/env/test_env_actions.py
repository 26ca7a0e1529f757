"""Formats of actions: what is written is read, what is not there is said, and nothing that a model may say breaks it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.env.actions import FORMATS, ActingEnvironment, Action, Format, Invalid, Tool, parse, write
from roll.env.base import Step, parse_reset, parse_step

MOVE = Tool("move", "direction")
PIECES = st.sampled_from(
    [
        "<answer>",
        "</answer>",
        "<ANSWER>",
        "{",
        "}",
        '"',
        "[",
        ":",
        ",",
        "\\",
        '"name"',
        '"arguments"',
        '"move"',
        "\\ud800",
    ]
)
SAID = st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join)
ACTIONS = st.text(min_size=1, max_size=20).map(str.strip).filter(lambda text: text and "answer>" not in text.lower())


class Corridor(ActingEnvironment):
    """Four cells in a row; the last is the goal."""

    tool = MOVE

    def begin(self, seed: int) -> str:
        self._cell = seed % 3
        return self.view()

    def act(self, action: Action) -> Step | Invalid:
        if action.text not in ("left", "right"):
            return Invalid(f"{action.text!r} is no direction.")
        self._cell = max(self._cell + (1 if action.text == "right" else -1), 0)
        return Step("There.", 1.0, terminated=True) if self._cell == 3 else Step(self.view())

    def view(self) -> str:
        return f"cell {self._cell}"

    def state(self) -> float:
        return self._cell

    def read(self, text: str) -> str | Invalid:
        words = [word for word in text.lower().split() if word in ("left", "right")]
        return words[-1] if words else Invalid("there is no direction in what you said.")


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(ACTIONS, SAID, st.sampled_from(FORMATS))
def test_what_is_written_is_read_whatever_was_said_before(action: str, before: str, format: Format) -> None:
    said = write(action, format, tool=MOVE)
    found = parse(said, format, tool=MOVE)
    assert isinstance(found, Action)
    assert found.text == action
    if format == "answer":
        assert parse(f"{before}{said}", format) == found
    if format == "json" and "{" not in before:
        assert parse(f"{before}{said}", format, tool=MOVE) == found


@settings(max_examples=examples(500), deadline=None, derandomize=True)
@given(SAID, st.sampled_from(FORMATS))
def test_anything_may_be_said(said: str, format: Format) -> None:
    found = parse(said, format, tool=MOVE)
    if isinstance(found, Invalid):
        assert found.reason.encode()
    else:
        assert found.text.encode()
        assert found.text == found.text.strip()
    world = Corridor(format=format)
    parse_reset(world.reset(1))
    parse_step(world.step(said))


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("<answer>left</answer>", "left"),
        ("<think>right?</think>\n<answer> up \n</answer> done", "up"),
        ("<answer>a</answer><answer>b</answer>", "b"),
        ("<answer>a<answer>b</answer></answer>", "b"),
        ("<answer>a</answer> or <answer>b", "a"),
        ("<Answer>a</Answer>", "a"),
        ("left", None),
        ("</answer>left<answer>", None),
        ("<answer> </answer>", None),
    ],
)
def test_an_answer_is_between_its_tags_and_the_last_one_counts(said: str, action: str | None) -> None:
    found = parse(said, "answer")
    assert (found.text if isinstance(found, Action) else None) == action


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ('{"name": "move", "arguments": {"direction": "left"}}', "left"),
        ('<tool_call>\n{"name": "move", "arguments": {"direction": "left"}}\n</tool_call>', "left"),
        ('```json\n{"name": "move", "parameters": {"direction": "left"}}\n```', "left"),
        ('{"type": "function", "function": {"name": "move", "arguments": "{\\"direction\\": \\"left\\"}"}}', "left"),
        ('{x} {"name": "move", "arguments": {}} {"name": "move", "arguments": {"direction": "left"}} {}', "left"),
        ('{"name": "move", "arguments": {"direction": "left", "name": "x", "arguments": {"direction": "up"}}}', "left"),
        ('{"name": "move", "arguments": {"direction": 3}}', "3"),
        ('{"name": "move", "arguments": {"direction": "\\ud800"}}', "?"),
        ('{"name": "move", "arguments": {"way": "left"}}', None),
        ('{"name": "jump", "arguments": {"direction": "left"}}', None),
        ('{"name": "move", "arguments": "left"}', None),
        ('{"name": "move"', None),
        ("left", None),
        ('{"a":' * 30_000, None),
        ("[" * 100_000 + '{"a":' + "[" * 100_000, None),
        ('{"n":' + "9" * 10_000 + "}", None),
    ],
)  # fmt: skip
def test_a_tool_call_is_found_in_what_was_said(said: str, action: str | None) -> None:
    found = parse(said, "json", tool=MOVE)
    assert (found.text if isinstance(found, Action) else None) == action


def test_free_text_is_read_by_the_environment() -> None:
    assert parse(" go left ", "free") == Action("go left")
    assert parse(" \n", "free") == Invalid("You said nothing.")
    world = Corridor(format="free")
    world.reset(1)
    assert world.step("not LEFT but right").observation == "cell 2"
    assert "no direction" in str(world.step("hm").observation)


@pytest.mark.parametrize("format", FORMATS)
def test_an_invalid_action_is_reported_costs_its_penalty_and_changes_nothing(format: Format) -> None:
    world = Corridor(format=format, invalid_penalty=0.25)
    assert world.reset(1) == ("cell 1", {"state": 1})
    for number, said in enumerate(["", world.format_action("jump"), "?!"], 1):
        step = world.step(said)
        assert str(step.observation).startswith("Invalid action: ")
        assert str(step.observation).endswith("\n\ncell 1")
        assert (step.reward, step.done, step.info) == (-0.25, False, {"invalid": number, "state": 1})
    step = world.step(world.format_action("right"))
    assert (step.observation, step.reward, step.info) == ("cell 2", 0.0, {"invalid": 3, "state": 2})
    assert world.step(world.format_action("right")) == Step("There.", 1.0, terminated=True, info={"invalid": 3})
    assert world.reset(1)[1] == {"state": 1}
    assert world.step("").info["invalid"] == 1, "another episode"


def test_turns_of_either_kind_are_counted_and_the_last_cuts_off() -> None:
    world = Corridor(turns=3)
    world.reset(0)
    assert [world.step(said).truncated for said in (world.format_action("right"), "?", world.format_action("right"))] == [
        False,
        False,
        True,
    ]
    world.reset(0)
    last = [world.step(world.format_action("right")) for _ in range(3)][-1]
    assert (last.terminated, last.truncated) == (True, False), "who arrives with the last turn has arrived"


@pytest.mark.parametrize(
    ("options", "says"), [({"format": "xml"}, "write answer, json or free"), ({"turns": -1}, "turns is -1")]
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Corridor(**options)  # type: ignore[arg-type]


def test_a_tool_call_keeps_its_other_arguments() -> None:
    call = {"name": "move", "arguments": {"direction": "left", "steps": 2}}
    assert parse(json.dumps(call), "json", tool=MOVE) == Action("left", call["arguments"])  # type: ignore[arg-type]
