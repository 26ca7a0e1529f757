"""Texts of the right form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll.data import Response, Task
from roll.reward.format import FormatReward, read_json
from roll.reward.json_schema import check_shape, fits

jsonschema = pytest.importorskip("jsonschema")


def judged(text: str, **options: Any) -> float:
    return FormatReward(**options)(Task.ask("t", "?"), Response(text, 1, "stop"))


@pytest.mark.parametrize(
    ("options", "text", "value"),
    [
        ({"pattern": "a.c"}, "abc", 1),
        ({"pattern": "a.c"}, " a\nc\n", 1),
        ({"pattern": "a.c"}, "abcd", 0),
        ({"pattern": "a.c", "search": True}, "xabcd", 1),
        ({"tags": ["think", "answer"]}, "<think>a</think> so <answer>b</answer>", 1),
        ({"tags": ["think", "answer"], "only_tags": True}, "<think>a</think>\n<answer>b</answer>\n", 1),
        ({"tags": ["think", "answer"], "only_tags": True}, "<think>a</think> so <answer>b</answer>", 0),
        ({"tags": ["think", "answer"], "only_tags": True}, "<think>a</think><answer>b</answer>!", 0),
        ({"tags": ["think", "answer"]}, "<answer>b</answer><think>a</think>", 0),
        ({"tags": ["think", "answer"]}, "<think>a<answer>b</answer></think>", 0),
        ({"tags": ["answer"]}, "<answer>a</answer><answer>b</answer>", 0),
        ({"tags": ["answer"]}, "</answer><answer>", 0),
        ({"tags": ["answer"]}, "<answer>a", 0),
        ({"json": True}, '{"a": 1}', 1),
        ({"json": True}, '```json\n{"a": 1}\n```', 1),
        ({"json": True}, 'So: {"a": 1}', 0),
        ({"json": True}, "NaN", 0),
        ({"json": True}, "[" * 100_000, 0),
        ({"schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', 1),
        ({"schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', 0),
        ({"json": True, "schema": {"type": "array"}, "share": True}, "{}", 0.5),
        ({"pattern": "x", "json": True, "tags": ["a"], "share": True}, "{}", 1 / 3),
    ],
)
def test_forms(options: dict[str, Any], text: str, value: float) -> None:
    assert judged(text, **options) == value


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "at least one of pattern, tags, json and schema"),
        ({"pattern": "["}, "is not a regular expression"),
        ({"only_tags": True}, "there are no tags"),
        ({"search": True, "json": True}, "there is no pattern"),
        ({"schema": {"typ": "object"}}, "schema.typ is not known here; did you mean 'type'"),
        ({"schema": {"type": "strin"}}, "'strin' is not a type of JSON; did you mean 'string'"),
        ({"schema": {"properties": {"a": {"items": 3}}}}, "schema.properties.a.items is 3"),
        ({"schema": {"minItems": "x"}}, "schema.minItems is 'x', but takes a number"),
        ({"schema": {"enum": "x"}}, "schema.enum is 'x', but takes a list"),
        ({"schema": {"pattern": "("}}, r"schema.pattern '\(' is not a regular"),
    ],
)
def test_a_form_that_cannot_be_held_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FormatReward(**options)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 2.5]) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)
types = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])
small = st.integers(0, 3)
flat = st.fixed_dictionaries(
    {},
    optional={
        "type": types | st.lists(types, min_size=1, max_size=2, unique=True),
        "enum": st.lists(values, min_size=1, max_size=3),
        "const": values,
        "minItems": small,
        "maxItems": small,
        "minLength": small,
        "maxLength": small,
        "minimum": small,
        "maximum": small,
        "pattern": st.sampled_from(["a", "^b", "b$"]),
        "required": st.lists(st.sampled_from("xyz"), max_size=2, unique=True),
    },
)
shapes = st.recursive(
    flat,
    lambda inner: st.builds(
        lambda own, more: {**own, **more},
        flat,
        st.fixed_dictionaries(
            {},
            optional={
                "properties": st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
                "items": inner,
                "additionalProperties": st.booleans() | inner,
            },
        ),
    ),
    max_leaves=4,
)


@given(values, shapes)
@example([False, False, False], {"enum": [[False, False, 0]]})
@example({"x": True}, {"const": {"x": 1}})
def test_shapes_hold_what_json_schema_says(value: Any, shape: dict[str, Any]) -> None:
    check_shape(shape)
    assert fits(value, shape) == jsonschema.Draft202012Validator(shape).is_valid(value)


@given(values)
def test_json_is_read_in_a_fence_or_not(value: Any) -> None:
    text = json.dumps(value, indent=1)
    for written in (text, f"```json\n{text}\n```", f"\n```\n{text}```\n"):
        assert read_json(written) == (True, value)
