"""Loads the tokenizer, the config and the weights of a model that was found.

Importing torch is half of a process's start time. A process that needs only the tokenizer must not import it, so
functions that need torch import it themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from roll.config.errors import RunError, UserError
from roll.config.schema import ModelConfig, RoleModel
from roll.model import lora
from roll.model.find import CHOICES, ModelSource, check_template, find_model, first_line, shards_of
from roll.model.rope import fix_angles, longest_sequence
from roll.model.settings_file import read_settings
from roll.model.tiny import CONTEXT, character_tokenizer, tiny_config, tiny_model

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound="PreTrainedModel")

_UNREADABLE = (OSError, ValueError, TypeError, RecursionError, SafetensorError, StrictDataclassError, RunError)
"""What reading a model's files raises where they are damaged, or say what cannot be."""


def load_tokenizer(source: ModelSource, config: ModelConfig | RoleModel) -> Tokenizer:
    adapter_folders = [folder for folder in source.adapters if (Path(folder) / "tokenizer_config.json").is_file()]
    source = replace(source, location=adapter_folders[-1]) if adapter_folders else source
    if source.location is None:
        tokenizer: Tokenizer = character_tokenizer()
    else:
        tokenizer = from_pretrained(_tokenizer_class(source), source)
    if (template := check_template(config)) is not None:
        tokenizer.chat_template = template.read_text()
    if not tokenizer.chat_template:
        raise UserError(
            f"model: {source.name!r} has no chat template, and tasks are conversations: "
            "write model.chat_template=FILE with a Jinja template, or choose an instruction-tuned model"
        )
    return tokenizer


def _tokenizer_class(source: ModelSource) -> Any:
    """The plain class if the model's own settings name it: `AutoTokenizer` imports torch."""
    settings = Path(source.location or "") / "tokenizer_config.json"
    named = read_settings(settings).get("tokenizer_class") if settings.is_file() else None
    if named in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def load_model_config(source: ModelSource) -> PretrainedConfig:
    """The model's config, without its weights."""
    from transformers import AutoConfig

    shape = tiny_config() if source.location is None else from_pretrained(AutoConfig, source)
    _check_supported(source, shape)
    return shape


def load_model(source: ModelSource, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model with its weights, and its attention replaced by ROLL's plans. A new model's weights come from `seed`."""
    from transformers import AutoModelForCausalLM

    from roll.model import attention

    load_model_config(source)
    if source.location is None:
        model: PreTrainedModel = in_precision(tiny_model(seed if source.seed is None else source.seed), dtype)
    elif shards_of(Path(source.location)) is not None:
        model = _load_sharded(source, dtype)
    else:
        model = from_pretrained(AutoModelForCausalLM, source, dtype=dtype)
    for folder in source.adapters:
        model = lora.merge_saved(model, folder)
    fix_angles(model)
    model.set_attn_implementation(attention.NAME)
    if not attention.takes_plans(model):
        raise UserError(f"model: {source.name!r} is a {type(model).__name__}, whose attention ROLL cannot compute yet")
    return model.eval()


def _load_sharded(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint written by several ranks, read tensor by tensor."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    from roll.model.shard_loading import load_shards

    folder = Path(source.location or "")
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(load_model_config(source), dtype=dtype)
    model.tie_weights()
    with readable(source):
        load_shards(model, folder)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def in_precision(model: Model, dtype: torch.dtype) -> Model:
    """The model with its parameters in that precision, and its buffers unchanged: rotary angles are fp32 also in a model
    that is loaded from a folder."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def write_merged(adapters: Path, target: Path) -> None:
    """Writes the base model of saved adapters, with the adapters merged, and its tokenizer to a folder."""
    source = find_model(str(adapters))
    model = load_model(source, lora.saved_dtype(adapters), 0)
    with quiet():
        model.save_pretrained(target, max_shard_size="1TB")
    load_tokenizer(source, ModelConfig()).save_pretrained(target)


def warm_up(path: str) -> None:
    """Imports everything that loading a model needs, without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from roll.model import attention

    source = find_model(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_model_config(source))
    model.set_attn_implementation(attention.NAME)


def context_of(source: ModelSource) -> int:
    """Longest sequence the model supports, in tokens."""
    if source.location is None:
        return CONTEXT
    settings = Path(source.location) / "config.json"
    if settings.is_file():  # read directly: `transformers` would import torch
        found = read_settings(settings).get("max_position_embeddings")
        if type(found) is int and "long_factor" not in settings.read_text():
            return found
    return longest_sequence(load_model_config(source))


def stop_ids_of(tokenizer: Tokenizer, source: ModelSource) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's and those that the model's own settings name."""
    ids = {tokenizer.eos_token_id}
    for named in _named_ends(source):
        each = named if isinstance(named, list) else [named]
        if not all(token is None or type(token) is int for token in each):
            raise UserError(f"model: {source.name!r} says eos_token_id: {named!r:.80}, which is no token id")
        ids.update(each)
    return tuple(sorted(i for i in ids if i is not None))


def _named_ends(source: ModelSource) -> list[Any]:
    """`eos_token_id` of the model's config and of its generation config: many models name their end-of-turn tokens only
    in the second, and some have no such file."""
    if source.location is None:
        return []
    if Path(source.location).is_dir():
        files = [Path(source.location) / name for name in ("config.json", "generation_config.json")]
        return [read_settings(file).get("eos_token_id") for file in files if file.is_file()]
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


@contextmanager
def quiet() -> Iterator[None]:
    """Disables the progress bars of `transformers`, which would overwrite a run's own display."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def from_pretrained(loader: Any, source: ModelSource, **options: object) -> Any:
    """Loads with a class of `transformers`. Raises a `UserError` if that fails."""
    with readable(source), quiet():
        return loader.from_pretrained(source.location, **options)


@contextmanager
def readable(source: ModelSource) -> Iterator[None]:
    """Turns errors while reading the model's files in the block into a `UserError`."""
    try:
        yield
    except _UNREADABLE as error:
        reason = first_line(error).rstrip(".")
        raise UserError(f"model: {source.name!r} could not be loaded: {reason}. Write {CHOICES}") from error


def _check_supported(source: ModelSource, shape: PretrainedConfig) -> None:
    """Raises for a model that the attention plans do not support, instead of computing it wrongly."""
    if set(getattr(shape, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise UserError(f"model: {source.name!r} has layers without full attention, which ROLL does not train yet")
    for setting in ("attn_logit_softcapping", "logit_scale", "logits_scaling", "sliding_window"):
        used = getattr(shape, setting, None)
        if used not in (None, 1, 1.0) and getattr(shape, f"use_{setting}", True):
            raise UserError(f"model: {source.name!r} uses {setting}={used}, which ROLL does not compute yet")
