"""Configurations that no one should write: what costs more to read than it says, and numbers that are none."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config import Config, UserError, dump_config, load_config, schema_tree


def refusal(source: Any, overrides: Any = ()) -> str:
    with pytest.raises(UserError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def bomb(levels: int, width: int) -> str:
    """Lists of aliases of lists: `width` to the power of `levels` values in a few hundred bytes."""
    lines = ["tasks:", " options:", "  l0: &l0 [x]"]
    lines += [f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (bomb(9, 9), "with its aliases written out"),
        (bomb(60, 2), "with its aliases written out"),
        (bomb(9, 9).replace("[", "{a: [").replace("]", "]}"), "with its aliases written out"),
        (
            f"tasks:\n options:\n  a: &a {'x' * 500_000}\n  b: [{', '.join(['*a'] * 1000)}]",
            "with its aliases written out",
        ),
        ("tasks: {options: &a {b: *a}}", "inside the value it names"),
        ("x" * (1 << 20) + ": 1", "longer than 1 MiB"),
        (f"tasks: {{options: {{a: [{'1,' * 60_000}]}}}}", "more than 50,000 values"),
        ("[" * 50_000, "nested more than 64 deep"),
        (f"tasks: {{options: {'[' * 100}{']' * 100}}}", "nested more than 64 deep"),
        ("- " * 5000, "nested more than 64 deep"),
        ("a: &a {lr: 1}\ntrain: {<<: *a}", "merge key"),
        ("tasks: {options: {<<: {a: 1}}}", "merge key"),
        ("seed: 1\nseed: 2", "seed is written twice"),
        ("tasks: {options: {a: 1, a: 2}}", "tasks.options.a is written twice"),
        ("tasks: !!python/object/apply:os.system [echo]", "tag"),
        ("tasks: {options: {a: !!binary aGk=}}", "tag"),
        ("seed: 1\x00", "not allowed"),
        (b"seed: 1\xff", "not UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_costly_yaml_is_refused_before_it_is_built(text: str | bytes, part: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert part in refusal(written(tmp_path, text))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, "kilobytes of memory"


def test_aliases_of_small_things_are_read(tmp_path: Path) -> None:
    text = "tasks: {options: {a: &a [1, 2], b: *a}}\nrun: {dir: &d x}\nmodel: *d"
    config = load_config(written(tmp_path, text))
    assert config.tasks.options == {"a": [1, 2], "b": [1, 2]}
    assert config.model.path == "x"


def test_pipes_are_read_and_devices_are_not(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"seed: 5")
    os.close(writing)
    assert load_config(f"/dev/fd/{reading}").seed == 5
    os.close(reading)
    assert "is a device" in refusal("/dev/zero")


def test_a_pipe_that_nobody_writes_to_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.config.load._PIPE_WAIT_S", 0.05)
    os.mkfifo(tmp_path / "x.yaml")
    assert "a pipe that nobody has written to" in refusal(str(tmp_path / "x.yaml"))


NUMBERS = [path for path in schema_tree.known_paths() if schema_tree.unwrapped(schema_tree.type_at(path)) in (int, float)]
NO_LIMIT = {"train.clip_grad_norm", "algorithm.clip_high", "algorithm.correction_cap"}
ODD = [".nan", ".inf", "-.inf", "1e400", "-1e400", "1e999999999", str(10**30), str(-(10**30)), "9" * 5000]


def test_no_number_of_any_setting_takes_what_is_no_number(tmp_path: Path) -> None:
    assert len(NUMBERS) > 80
    for path in NUMBERS:
        name = schema_tree.dotted(path)
        for odd in ODD:
            large = schema_tree.unwrapped(schema_tree.type_at(path)) is float and odd.endswith("000")
            if large or (odd == ".inf" and name in NO_LIMIT):
                continue
            said = refusal({}, [f"{name}={odd}"])
            assert name in said, f"{name}={odd}: {said}"
        for value in (math.nan, -math.inf, "nan", "-inf"):
            assert name in refusal({}, {name: value})


@pytest.mark.parametrize("name", sorted(NO_LIMIT))
def test_limits_may_be_infinite(name: str, tmp_path: Path) -> None:
    config = load_config({}, [f"{name}=.inf"])
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_ends_of_ranges_may_be_open_but_are_numbers() -> None:
    config = load_config({}, ["rollout.filter=mean_range", "rollout.filter_range=[-.inf, 0.9]"])
    assert config.rollout.filter_range == (-math.inf, 0.9)
    assert "rollout.filter_range[0] is NaN" in refusal({}, ["rollout.filter_range=[.nan, 1]"])


def test_no_option_of_anything_is_nan() -> None:
    assert "reward.options.x is .nan" in refusal({}, ["reward.options={x: .nan}"])
    assert "tasks.options.a[1].b is .nan" in refusal({"tasks": {"options": {"a": [1, {"b": math.nan}]}}})


def test_an_override_is_shown_on_one_short_line() -> None:
    said = refusal({}, ["train.steps=" + "x" * 10_000 + "\n"])
    assert len(said) < 400
    assert "\n" not in said


def test_a_mapping_that_holds_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["tasks"] = {"options": endless}
    assert "holds itself" in refusal(endless)


GOOD = """\
model: tiny
seed: 3
tasks: {source: echo, options: {symbols: "0123"}}
rollout: {groups_per_step: 4, group_size: 4, stop: ["\\n", a], temperature: 0.7}
train:
  steps: 20
  lr: 1e-5
  betas: [0.9, 0.99]
reward: &r {name: exact, options: {words: &w [a, b]}}
eval: {sets: {other: {source: echo, reward: *r}}}
"""
SIGNS = [
    "&a ",
    "*a",
    "*r",
    "<<: *r",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "- ",
    "? ",
    "| ",
    "\t",
    "'",
    '"',
    "\x00",
    "\x85",
    "\n",
    "# ",
]
WORDS = ["!!python/name:os.system ", "!!float ", ".nan", "1e999", "0x1F", "-1", "~", "%YAML 1.1\n", "---\n", "\ufeff"]
PIECES = st.sampled_from([*SIGNS, *WORDS])
CUTS = st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 6), PIECES | st.text(max_size=3)), max_size=6)
LEAVES = [path for path in schema_tree.known_paths() if schema_tree.section_in(schema_tree.type_at(path)) is None]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def outcome(source: Any, overrides: Any = ()) -> Config | None:
    """What loads; None where it is refused in words."""
    try:
        return load_config(source, overrides)
    except UserError as error:
        said = str(error)
    assert said.strip()
    return None


def check_sane(config: Config) -> None:
    """Every number of a config that was accepted can be counted with, and it comes back as it was."""
    for path in NUMBERS:
        value: Any = config
        for part in path:
            value = getattr(value, str(part), None)
        if isinstance(value, float):
            assert math.isfinite(value) or schema_tree.dotted(path) in NO_LIMIT
        assert not isinstance(value, int) or abs(value) <= 2**64
    assert load_config(load_config(config)) == config


@given(cuts=CUTS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_yaml_is_read_or_refused_in_words(cuts: list[tuple[int, int, str]], tmp_path: Path) -> None:
    text = GOOD
    for at, gone, put in cuts:
        text = text[:at] + put + text[at + gone :]
    config = outcome(written(tmp_path, text.encode("utf-8", "surrogatepass")))
    if config is not None:
        check_sane(config)


@given(data=st.binary(max_size=40))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(data=b"\xff\xfe\x00")
@example(data=b"\xef\xbb\xbfseed: 1")
def test_any_bytes_are_read_or_refused_in_words(data: bytes, tmp_path: Path) -> None:
    outcome(written(tmp_path, data))


@given(path=st.sampled_from(LEAVES), value=ANYTHING)
@settings(max_examples=examples(100), deadline=None)
@example(path=("domains", "NAME", "filter_range"), value={-3: None})
def test_any_value_of_any_setting_is_sane_or_refused_in_words(path: tuple[str, ...], value: Any) -> None:
    config = outcome({}, {schema_tree.dotted(path).replace("NAME", "x"): value})
    if config is not None:
        check_sane(config)
