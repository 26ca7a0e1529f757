"""Every mistake is refused, named, and answered with what to write instead."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from pydantic import Field, ValidationError

from roll.config import UserError, error_messages, load_config, schema_tree
from roll.config.error_messages import Origin
from roll.config.schema import Section

JARGON = ("Input should", "pydantic", "https", "Extra inputs", "valid dictionary", "ctx", "Traceback")


def message(source: Any, overrides: list[str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(source, overrides or [])
    text = str(caught.value)
    assert not [word for word in JARGON if re.search(rf"\b{word}\b", text)]
    return text


BAD_FILES = [
    ("lr: 1e-3", ["x.yaml:1: lr is not a setting; did you mean train.lr?"]),
    ("\nmodle: tiny", ["x.yaml:2: modle is not a setting; did you mean model?"]),
    ("train:\n  lrr: 1", ["x.yaml:2: train.lrr is not a setting; did you mean train.lr?"]),
    ("train: {LR: 1}", ["train.LR is not a setting; did you mean train.lr?"]),
    ("rollout: {group-size: 4}", ["did you mean rollout.group_size?"]),
    ("train: {group_size: 4}", ["train.group_size is not a setting; did you mean rollout.group_size?"]),
    ("train: {temperature: 4}", ["did you mean rollout.temperature or eval.temperature?"]),
    ("train: {learning_rate: 4}", ["train.learning_rate is not a setting; did you mean train.lr, "]),
    ("eval: {zzzzzz: 4}", ["eval.zzzzzz is not a setting; eval has: every, samples, attempts, temperature, pass_at"]),
    ("zzzzzz: 4", ["zzzzzz is not a setting; there are: pipeline, model, seed"]),
    ("3: 4", ["x.yaml:1: 3 is not a setting; there are: "]),
    ("~: 4", ["x.yaml: None is not a setting"]),
    ("train: {steps: many}", ['train.steps is "many", but takes a whole number ≥ 1 (Training steps.)']),
    ("train: {steps: 1.5}", ["train.steps is 1.5, but takes a whole number ≥ 1 (Training steps.)"]),
    ("train: {steps: null}", ["train.steps is null, but takes a whole number ≥ 1"]),
    ("train: {lr: true}", ["train.lr is true, but takes a number > 0 (Peak learning rate.)"]),
    ("train: {steps: true}", ["train.steps is true, but takes a whole number ≥ 1"]),
    ("train: {lr: .nan}", ["train.lr is NaN, but takes a number > 0"]),
    ("train: {lr: {a: 1}}", ['train.lr is {"a": 1}, but takes a number > 0']),
    ("train: {betas: [0]}", ["train.betas is [0], but takes a list of 2, each a number ≥ 0 and < 1 (AdamW's mo"]),
    ("train: {betas: [0, 0, 0]}", ["train.betas is [0, 0, 0], but takes a list of 2"]),
    ("train: {betas: [0, -1]}", ["train.betas[1] is -1, but takes a number ≥ 0 and < 1 (AdamW's"]),
    ("train: {betas: [1, 0.9]}", ["train.betas[0] is 1, but takes a number ≥ 0 and < 1 (AdamW's"]),
    ("train: {betas: 0.9}", ["train.betas is 0.9, but takes a list of 2, each a number ≥ 0 and < 1 (AdamW's"]),
    ("train: {betas: [0.5, false]}", ["train.betas[1] is false, but takes a number ≥ 0"]),
    ("rollout:\n  group_size: 0", ["x.yaml:2: rollout.group_size is 0, but takes a whole number ≥ 1 (Samples of one"]),
    ("rollout: {top_p: 1.5}", ["rollout.top_p is 1.5, but takes a number > 0 and ≤ 1"]),
    ("rollout: {stop: x}", ['rollout.stop is "x", but takes a list of text: write ["x"]']),
    ("rollout:\n  stop:\n    - a\n    - 1", ["x.yaml:4: rollout.stop[1] is 1, but takes text: write it in quotes"]),
    ("model: 7", ["model.path is 7, but takes text: write it in quotes"]),
    ("model: [a]", ['model is ["a"], but takes path alone, or settings of its own: path, dtype, chat_template']),
    ("model: {chat_template: 1}", ["model.chat_template is 1, but takes text or `null`"]),
    ("eval: 5", ["eval is 5, but takes settings of its own: every, samples, attempts, temperature, pass_at"]),
    ("model: {dtype: bf61}", ['is "bf61", but takes `auto`, `bf16` or `fp32`; did you mean `bf16`? (Precision']),
    ("model: {dtype: 16}", ["model.dtype is 16, but takes `auto`, `bf16` or `fp32`"]),
    ("algorithm: gpro", ["algorithm.name 'gpro' is not known; did you mean 'grpo'"]),
    ("run: {tensorboard: maybe}", ['run.tensorboard is "maybe", but takes `true` or `false`']),
    ("tasks: {options: [1]}", ["tasks.options is [1], but takes a mapping of names to values"]),
    ("tasks: {options: {1: 2}}", ["tasks.options has the key 1, but keys are text: write it in quotes"]),
    ("seed: 1\ntrain:\n  lr: 1\n  lr: 2", ["x.yaml:4: train.lr is written twice, first on line 3: keep one"]),
    ("seed: " + "9" * 5000, ["cannot be read as int"]),
    ("seed: a" + "b" * 500, ["…, but takes a whole number"]),
    ("[1]", ["x.yaml holds [1], but takes settings"]),
    ("hello", ['x.yaml holds "hello", but takes settings']),
    ("a: [1", ["x.yaml:1:6: not readable as YAML: "]),
    ("a: b: c", ["x.yaml:1:5: not readable as YAML: mapping values are not allowed here"]),
    ("a:\n\tb: 1", ["x.yaml:2:1: not readable as YAML: a tab cannot indent YAML: use spaces"]),
    ("a: 1\n---\nb: 2", ["not readable as YAML: but found another document"]),
    ("a: *b", ["not readable as YAML: found undefined alias"]),
    ("a: &a [*a]", ["not readable as YAML: this alias stands inside the value it names"]),
    ("a: !!python/name:os.system x", ["the tag !!python/name:os.system is not for configurations"]),
    ("a: !x {b: 1}", ["the tag !x is not for configurations"]),
    ("{a: 1}: 2", ["a key must be a single word"]),
    ("seed: !!int x", ["'x' cannot be read as int"]),
    ("seed: 1\nmodel: \x07", ["x.yaml:2: not readable as YAML: the character '\\x07' is not allowed"]),
    ("rollout: {group_size: 1}", ["x.yaml:1: rollout.group_size is 1, but grpo compares samples of one task"]),
    ("train: {steps: 2, warmup_steps: 3}", ["train.warmup_steps is 3, more than train.steps=2: write"]),
]


@pytest.mark.parametrize(("text", "parts"), BAD_FILES, ids=[text[:40] for text, _ in BAD_FILES])
def test_bad_file(text: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text, encoding="utf-8")
    said = message(file)
    assert said.startswith(str(file))
    assert "\n" not in said
    for part in parts:
        assert part in said


BAD_OVERRIDES = [
    ("train.lrr=3", "override train.lrr=3: train.lrr is not a setting; did you mean train.lr?"),
    ("trian.lr=4", "trian.lr is not a setting; did you mean train.lr?"),
    ("optimizer.lr=4", "optimizer.lr is not a setting; did you mean train.lr?"),
    ("lr=4", "lr is not a setting; did you mean train.lr?"),
    ("train.lr", "train.lr has no value: an override is written key=value, as in train.lr=1e-06"),
    ("train.lr=", "train.lr has no value: an override is written key=value, as in train.lr=1e-06"),
    ("model", "model has no value: an override is written key=value"),
    ("tasks.options.a=", "tasks.options.a has no value"),
    ("--train.lr=3", "an override has no dashes: write train.lr=3"),
    ("=3", "an override is written key.sub=value"),
    ("train..lr=3", "an override is written key.sub=value"),
    ("train.lr.x=3", "train.lr.x is not a setting: train.lr takes a number > 0, which has no parts"),
    ("train=5", "train is 5, but takes settings of its own: steps, lr"),
    ("train={lrr: 5}", "override train={lrr: 5}: train.lrr is not a setting; did you mean train.lr?"),
    ("model=null", "model is null, but takes path alone, or settings of its own: path"),
    ("tasks.options=[", "the value of tasks.options is not readable YAML"),
    ("tasks.options.seed.x=1", "tasks.options.seed is 1 and holds no other values"),
    ("train.lr=-1", "override train.lr=-1: train.lr is -1, but takes a number > 0 (Peak learning rate.)"),
    ("rollout.group_size=1", "override rollout.group_size=1: rollout.group_size is 1, but grpo compares"),
]


@pytest.mark.parametrize(("override", "part"), BAD_OVERRIDES)
def test_bad_override(override: str, part: str) -> None:
    said = message({"tasks": {"options": {"seed": 1}}}, [override])
    assert said.startswith(f"override {override}: ")
    assert "\n" not in said
    assert part in said


def test_every_mistake_is_listed_once_in_reading_order(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("zeed: 1\ntrain:\n  steps: false\n  lr: x\n  lr: y\nrollout: {group_size: -1}\neval: {evry: 1}\n")
    said = message(file, ["train.eps=x", "model.dtyp=fp32", "train.eps=0", "nonsense"]).splitlines()
    assert [line.removeprefix(str(file)).split(" is ")[0] for line in said] == [
        ":1: zeed",
        ":3: train.steps",
        ":4: train.lr",
        ":5: train.lr",
        ":6: rollout.group_size",
        ":7: eval.evry",
        "override model.dtyp=fp32: model.dtyp",
        "override train.eps=0: train.eps",
        "override nonsense: nonsense",
    ]


def test_a_contradiction_names_every_place_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("train:\n  steps: 2\n")
    said = message(file, ["train.warmup_steps=3"])
    assert said.startswith(f"{file}:2, override train.warmup_steps=3: train.warmup_steps is 3, more than")


def test_a_mapping_has_no_place_to_name() -> None:
    assert message({"train": {"lrr": 1}}) == "train.lrr is not a setting; did you mean train.lr?"


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "addition.yaml").write_text("")
    (tmp_path / "echo.yml").write_text("")
    file = tmp_path / "addition.yaml"
    assert message(tmp_path / "adition.yaml") == f"{tmp_path / 'adition.yaml'} does not exist; did you mean {file}?"
    assert message(tmp_path / "addition").endswith(f"did you mean {file}?")
    assert message(tmp_path / "addition.yml").endswith(f"did you mean {file}?")
    assert message(tmp_path / "zzz.yaml").endswith(f"does not exist; there is {file}, {tmp_path / 'echo.yml'}")
    assert message(tmp_path / "no" / "x.yaml").endswith(f"does not exist, nor does its folder {tmp_path / 'no'}")
    assert f"{tmp_path} is a folder, but a configuration is a YAML file; there is {file}" in message(tmp_path)
    assert message(file / "x.yaml").endswith("cannot be read: Not a directory")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"seed: \xff\xfe")
    assert "is not UTF-8 text" in message(file)


KEYS = [
    path
    for path in schema_tree.known_paths()
    if schema_tree.section_in(schema_tree.type_at(path)) is None or len(path) == 1
]


def misspelt(name: str, rng: random.Random) -> str:
    """One slip of the keyboard: a letter doubled, lost, replaced, or two swapped."""
    at = rng.randrange(len(name))
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz_")
    slips = [name[:at] + name[at] + name[at:], name[:at] + letter + name[at + 1 :]]
    if len(name) > 2:
        slips += [name[:at] + name[at + 1 :], name[: at - 1] + name[at - 1 : at + 1][::-1] + name[at + 1 :]]
    return rng.choice(slips)


@given(path=st.sampled_from(KEYS), rng=st.randoms(use_true_random=False))
@settings(max_examples=examples(300), deadline=None)
def test_a_misspelt_key_is_refused_with_the_right_one(path: tuple[str, ...], rng: random.Random) -> None:
    wrong = misspelt(path[-1], rng)
    if not wrong or wrong in {known[-1] for known in schema_tree.known_paths()}:
        return
    here = (*path[:-1], wrong)
    nested: Any = 1
    for part in reversed(here):
        nested = {part: nested}
    for said in (message(nested), message({}, [f"{schema_tree.dotted(here)}=1"])):
        assert f"{schema_tree.dotted(here)} is not a setting; did you mean " in said
        guesses = said.partition("did you mean ")[2].rstrip("?").replace(" or ", ", ").split(", ")
        assert schema_tree.dotted(path) in guesses


def complaint(source: dict[str, Any], overrides: list[str]) -> str:
    try:
        load_config(source, overrides)
    except UserError as error:
        return str(error)
    return ""


WORDS = st.sampled_from(["train", "lr", "model", "path", "rollout", "stop", "x"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)


@given(value=ANYTHING)
@settings(max_examples=examples(50), deadline=None)
def test_no_value_anywhere_breaks_the_messages(value: Any) -> None:
    for data in ({"train": value}, {"model": value}, {"train": {"betas": value}}, {"rollout": {"stop": value}}):
        said = complaint(data, [])
        assert not [word for word in JARGON if word in said]


@given(text=st.text(max_size=20))
@settings(max_examples=examples(50), deadline=None)
def test_no_override_breaks_the_messages(text: str) -> None:
    for override in (text, f"train.lr={text}", f"tasks.options.{text}", f"run={text}"):
        said = complaint({}, [override])
        assert not [word for word in JARGON if word in said]


def test_constraints_without_words_of_their_own_are_still_said_plainly() -> None:
    class Other(Section):
        seed: Annotated[int, Field(multiple_of=2)] = 0
        """Even."""
        model: Annotated[str, Field(pattern="^a")] = "a"
        needed: int

    with pytest.raises(ValidationError) as caught:
        Other.model_validate({"seed": 3, "model": "b"})
    said = {str(mistake) for mistake in error_messages.mistakes_of(caught.value, {}, Origin(0, "x.yaml"))}
    assert any(line.startswith("x.yaml: seed is 3: it should be a multiple of 2") for line in said)
    assert any(line.startswith('x.yaml: model is "b": it should match pattern') for line in said)
    assert any(line.startswith("x.yaml: needed must be set") for line in said)
