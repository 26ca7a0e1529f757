"""What loads, what it loads to, and that it comes back from YAML unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config import Config, ModelConfig, TrainConfig, UserError, changed_keys, dump_config, load_config, schema_tree
from roll.config.yaml_document import parse, write

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TRICKY = st.sampled_from(
    ["1e-6", "no", "~", "", "007", "1:30", "2024-01-01", "a: b", "# x", "<<", "=", ".nan", "\x85", "a\u2028 b\n", "\t"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | TRICKY
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | TRICKY, inner, max_size=3), max_leaves=6
)

TRAIN = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(50, 10**9),
        "lr": st.floats(1e-300, 1e300),
        "warmup_steps": st.integers(0, 50),
        "schedule": st.sampled_from(["constant", "linear", "cosine"]),
        "betas": st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
        "micro_batch_tokens": st.integers(1, 10**12),
    },
)
ROLLOUT = st.fixed_dictionaries(
    {},
    optional={
        "group_size": st.integers(2, 1000),
        "temperature": st.floats(1e-3, 10),
        "stop": st.lists((TEXT | TRICKY).filter(bool), max_size=3),
        "filter": st.sampled_from(["no_signal", "none"]),
    },
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**64),
        "deterministic": st.booleans(),
        "model": TEXT | TRICKY | st.fixed_dictionaries({"chat_template": st.none() | TEXT | TRICKY}),
        "run": TEXT | st.fixed_dictionaries({"dir": TRICKY}),
        "tasks": st.fixed_dictionaries({"options": st.dictionaries(TEXT | TRICKY, PLAIN, max_size=3)}),
        "train": TRAIN,
        "rollout": ROLLOUT,
    },
)


def load_text(text: str, folder: Path, overrides: list[str] | None = None) -> Config:
    file = folder / "x.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides or [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@given(data=CONFIGS)
@settings(max_examples=examples(60), deadline=None)
def test_what_is_dumped_loads_back_equal(data: dict[str, Any], folder: Path) -> None:
    config = load_config(data)
    text = dump_config(config)
    again = load_text(text, folder)
    assert again == config
    assert changed_keys(again, config) == []


@given(data=PLAIN)
@settings(max_examples=examples(200), deadline=None)
def test_plain_data_survives_yaml(data: Any) -> None:
    assert repr(parse(write(data)).data) == repr(data)


def test_dump_names_every_setting_in_field_order() -> None:
    tree = parse(dump_config(Config())).data
    listed = [(key,) for key in tree]
    assert listed == [path for path in schema_tree.known_paths() if len(path) == 1]
    assert list(tree["train"]) == list(TrainConfig.model_fields)
    assert "lr: 1e-06\n" in dump_config(Config())
    assert "betas: [0.9, 0.99]\n" in dump_config(Config())


def test_a_value_yaml_cannot_hold_is_refused_by_dump() -> None:
    config = load_config({"tasks": {"options": {"f": object()}}})
    with pytest.raises(UserError, match="cannot be written as YAML"):
        dump_config(config)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "train:\n", "train: {}\nmodel:\n"])
def test_empty_means_defaults(text: str, folder: Path) -> None:
    assert changed_keys(load_text(text, folder), Config()) == []


def test_source_may_be_a_path_a_string_or_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("seed: 3\n")
    expected = Config(seed=3)
    for source in (file, str(file), {"seed": 3}):
        assert changed_keys(load_config(source), expected) == []
    mapping = {"model": ModelConfig(path="a"), "run": Path("runs/b"), "rollout": {"stop": ("x",)}}
    config = load_config(mapping)
    assert (config.model.path, config.run.dir, config.rollout.stop) == ("a", "runs/b", ("x",))


def test_the_given_mapping_is_left_alone() -> None:
    mapping: dict[str, Any] = {"model": "a", "train": {"lr": 1e-3}, "tasks": {"options": {"x": 1}}}
    load_config(mapping, ["train.lr=1", "tasks.options.x=2", "model.dtype=fp32"])
    assert mapping == {"model": "a", "train": {"lr": 1e-3}, "tasks": {"options": {"x": 1}}}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-6", 1e-6),
        ("1E+3", 1000.0),
        ("1.e-3", 1e-3),
        (".5", 0.5),
        ("3", 3.0),
        ("1_000.5", 1000.5),
    ],
)
def test_numbers_as_people_write_them(written: str, value: float, folder: Path) -> None:
    assert load_text(f"train: {{lr: {written}}}", folder).train.lr == value
    assert load_config({}, [f"train.lr={written}"]).train.lr == value


def test_a_whole_number_may_be_written_as_a_power() -> None:
    assert load_config({}, ["train.steps=1e3"]).train.steps == 1000
    assert load_config({}, ["train.steps=10_000"]).train.steps == 10000


def test_words_yaml_1_1_takes_for_something_else(folder: Path) -> None:
    config = load_text("rollout: {stop: [no, On, 2024-01-01, '1e-6']}\nrun: {tensorboard: off}", folder)
    assert config.rollout.stop == ("no", "On", "2024-01-01", "1e-6")
    assert config.run.tensorboard is False


def test_aliases_work(folder: Path) -> None:
    config = load_text("train: {steps: &n 7}\nseed: *n", folder)
    assert (config.train.steps, config.seed) == (7, 7)


@pytest.mark.parametrize(
    ("data", "overrides", "expected"),
    [
        ({"model": {"path": "x", "dtype": "fp32"}}, ["model=runs/a"], {"path": "runs/a", "dtype": "fp32"}),
        ({"model": "x"}, ["model.dtype=fp32"], {"path": "x", "dtype": "fp32"}),
        ({"model": "x"}, ["model={dtype: fp32}"], {"path": "x", "dtype": "fp32"}),
        ({}, ["model.dtype=fp32", "model=a", "model.path=b"], {"path": "b", "dtype": "fp32"}),
        ({"model": {"dtype": "fp32"}}, ["model={}"], {"dtype": "fp32"}),
        ({}, ["model=12"], {"path": "12"}),
        ({}, ["model.path=@odd: name"], {"path": "@odd: name"}),
        ({}, ['model.path="a b"'], {"path": "a b"}),
        ({}, ["model.path=a=b"], {"path": "a=b"}),
        ({}, ["model.chat_template=x", "model.chat_template=null"], {}),
    ],
)
def test_overrides_and_short_forms_merge(data: dict[str, Any], overrides: list[str], expected: dict[str, Any]) -> None:
    assert load_config(data, overrides).model == ModelConfig(**expected)


def test_an_override_mends_what_the_file_got_wrong(folder: Path) -> None:
    assert load_text("train: {lr: fast}", folder, ["train.lr=1"]).train.lr == 1


def test_overrides_reach_into_options() -> None:
    config = load_config({"tasks": {"options": {"a": 1}}}, ["tasks.options.b.c=[1, x]", "tasks.options.a=1e-6"])
    assert config.tasks.options == {"a": 1e-6, "b": {"c": [1, "x"]}}
    assert load_config({"tasks": {"options": {"a": 1}}}, ["tasks.options={b: 2}"]).tasks.options == {"b": 2}


SETTABLE = {
    "seed": st.integers(0, 99),
    "train.lr": st.floats(1e-9, 1),
    "train.steps": st.integers(1, 99),
    "rollout.max_running": st.integers(1, 99),
    "eval.temperature": st.floats(0, 2),
    "run": st.sampled_from(["a", "b"]),
    "run.dir": st.sampled_from(["c", "d"]),
    "model.dtype": st.sampled_from(["auto", "bf16", "fp32"]),
}
ASSIGNMENTS = st.lists(
    st.sampled_from(sorted(SETTABLE)).flatmap(lambda key: st.tuples(st.just(key), SETTABLE[key])), max_size=8
)


@given(in_file=ASSIGNMENTS, overrides=ASSIGNMENTS)
@settings(max_examples=examples(100), deadline=None)
def test_the_last_word_wins(in_file: list[tuple[str, Any]], overrides: list[tuple[str, Any]]) -> None:
    base = load_config({}, [f"{key}={value}" for key, value in in_file])
    config = load_config(base.model_dump(), [f"{key}={value}" for key, value in overrides])
    last = {("run.dir" if key == "run" else key): value for key, value in [*in_file, *overrides]}
    assert set(changed_keys(Config(), config)) <= set(last)
    for key, value in last.items():
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value


def test_changed_keys_are_dotted_and_in_field_order() -> None:
    changed = load_config({}, ["train.lr=1", "model=a", "tasks.options.x=1", "seed=4"])
    assert changed_keys(Config(), changed) == ["model.path", "seed", "tasks.options", "train.lr"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'ray', 'vllm'}"
    code = f"import sys, roll.config; sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_setting_that_was_renamed_names_the_new_one() -> None:
    for source, overrides in (({"run": {"keep_checkpoints": 3}}, []), ({}, ["run.keep_checkpoints=3"])):
        with pytest.raises(UserError, match=r"run\.keep_checkpoints has another name: write run\.keep\.checkpoints"):
            load_config(source, overrides)
