"""Model folders whose JSON files are damaged, or say what cannot be, are refused by a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.errors import UserError
from roll.config.schema import ModelConfig
from roll.model.find import ModelSource, find_model
from roll.model.loading import context_of, load_model_config, load_tokenizer, stop_ids_of
from roll.model.lora import BASE_FILE, CONFIG_FILE
from roll.model.tiny import character_tokenizer, tiny_config

DEEP = "[" * 100_000
DAMAGED = {"deep": DEEP, "deep value": f'{{"eos_token_id": {DEEP}', "cut off": "{", "a list": "[1]", "no text": "\x00"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights: they are not read."""
    tiny_config().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def _read_all(folder: Path) -> None:
    source = ModelSource("mine", str(folder))
    load_model_config(source)
    context_of(source)
    stop_ids_of(load_tokenizer(source, ModelConfig()), source)


def test_a_whole_folder_is_read(folder: Path) -> None:
    _read_all(folder)


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_damaged_settings_are_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(UserError, match="model: "):
        _read_all(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_position_embeddings": float("inf")},
        {"max_position_embeddings": "many"},
        {"hidden_size": None},
        {"eos_token_id": "end"},
        {"eos_token_id": [{"a": 1}]},
        {"layer_types": 5},
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(folder: Path, wrong: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UserError, match="model: "):
        _read_all(folder)


@pytest.mark.parametrize("text", [*DAMAGED.values(), '{"path": 5}'], ids=[*DAMAGED, "a number"])
@pytest.mark.parametrize("name", [BASE_FILE, CONFIG_FILE])
def test_damaged_adapters_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / CONFIG_FILE).write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="model: "):
        find_model(str(tmp_path))
