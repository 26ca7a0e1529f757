"""LoRA adapters on a model's linear layers, through `peft`: y = W x + scale · B (A x), where only A and B are trained.

The layers are replaced in place, so the model keeps its class, its modules and the names of its other parameters.
Adapters are created in the model's own precision, like all parameters; the optimizer keeps fp32 master weights of them. B
starts at zero: a model with new adapters equals the model without them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from roll.config.errors import RunError, UserError
from roll.config.schema import LoraConfig
from roll.model.settings_file import read_settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

ADAPTER = "default"
ALL = "all-linear"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE = "roll_base.json"
BLOCK_ELEMENTS = 1 << 22
"""Elements of a merged matrix that are computed at once."""
_PREFIX = "base_model.model."
"""The prefix that `peft` adds to every name it saves."""
_WRAPPED = ".base_layer."
"""What `peft` inserts into the name of a parameter whose layer has an adapter."""

T = TypeVar("T")


@dataclass(frozen=True)
class BaseModelRef:
    """The model that adapters belong to: the value of `model` for it, and the seed if it is made from scratch."""

    path: str
    seed: int | None = None

    @classmethod
    def of(cls, folder: Path) -> BaseModelRef:
        """The base of saved adapters, whether ROLL or `peft` alone saved them."""
        if (folder / BASE_FILE).is_file():
            saved = read_settings(folder / BASE_FILE)
            if isinstance(saved.get("path"), str) and isinstance(saved.get("seed"), int | None):
                return cls(saved["path"], saved.get("seed"))
            raise UserError(f"model: {folder / BASE_FILE} is damaged: it does not say what model the adapters are for")
        path = read_settings(folder / CONFIG_FILE).get("base_model_name_or_path")
        if not path or not isinstance(path, str):
            raise UserError(f"model: the adapters in {str(folder)!r} do not say what model they are for")
        return cls(path)

    def is_same_model(self, other: BaseModelRef) -> bool:
        """Whether both are the same model: a model that was moved is, another checkpoint of the same run is not."""
        return Path(self.path).parts[-2:] == Path(other.path).parts[-2:] and self.seed == other.seed


class Adapters:
    """The adapters of one model, which are its only trained parameters."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, base: BaseModelRef, seed: int) -> None:
        """Adds new adapters to the model; their values come from the seed."""
        import torch

        self._model, self._base, self._seed, self._dropout = model, base, seed, config.dropout
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject(model, config)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disables the adapters in the block, so that the model is its base."""
        layers = list(adapted_layers(self._model).values())
        try:
            for layer in layers:
                layer.enable_adapters(False)
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    @contextmanager
    def dropping(self, step: int, device: torch.device, rank: int = 0) -> Iterator[None]:
        """Enables dropout in the block, if configured, with random numbers that depend only on the seed, the step and the
        rank. Each rank of a sharded trainer has its own samples and its own random numbers; `device` is where it
        computes."""
        if not self._dropout:
            yield
            return
        import numpy as np
        import torch

        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence((self._seed, step, rank)).generate_state(1)[0]))
            try:
                self._set_dropping(True)
                yield
            finally:
                self._set_dropping(False)

    def _set_dropping(self, on: bool) -> None:
        for layer in adapted_layers(self._model).values():
            layer.lora_dropout.train(on)

    def save(self, folder: Path, values: Mapping[str, Tensor] | None = None) -> None:
        """Writes the adapters as `peft` does, and the reference to their base. `values` are given if the model has only
        shards of the parameters."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config: Any = self._model.peft_config[ADAPTER]
        config.save_pretrained(folder)
        saved = {_saved_name(name): value.detach() for name, value in (values or self.parameters()).items()}
        save_file(saved, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / BASE_FILE).write_text(json.dumps(asdict(self._base), indent=2))

    def load(self, folder: Path) -> None:
        """Reads adapters written by `save` into the existing storage of the parameters, of which this process may have
        shards."""
        import torch

        from roll.model.shard_loading import SafeFolder, copy_from

        self.check_base(folder)
        saved = SafeFolder(folder, WEIGHTS_FILE)
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                copy_from(saved, _saved_name(name), parameter)

    def check_base(self, folder: Path) -> None:
        """Raises if saved adapters belong to another model."""
        base = BaseModelRef.of(folder)
        if not base.is_same_model(self._base):
            raise RunError(
                f"the adapters in {folder} belong to {base.path}, but the run's model is now {self._base.path}: restore "
                "that model, or start a new run"
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._model.named_parameters() if is_adapter(name)}


def inject(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freezes the model and adds adapters to the layers that the config names."""
    peft = _peft()
    known = f"write {'' if config.targets == (ALL,) else 'all-linear, or '}some of {', '.join(_linear_names(model))}"
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale * config.rank,
        lora_dropout=config.dropout,
        target_modules=ALL if config.targets == (ALL,) else list(config.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    model.requires_grad_(False)
    try:
        with warnings.catch_warnings():  # about patterns that `peft` itself makes for experts, which are refused below
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            peft.inject_adapter_in_model(lora, model, ADAPTER)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.lora.targets: {reason} Instead {known}") from error
    model.train(model.training)  # new modules would apply dropout even if the model is not being trained
    output = model.get_output_embeddings()
    for name, layer in adapted_layers(model).items():
        if layer is output or type(layer).__name__ != "Linear":
            what = (
                "gives the logits" if layer is output else f"is no linear layer ({type(layer.get_base_layer()).__name__})"
            )
            raise UserError(
                f"model.lora.targets: {name} {what}, and adapters go to the linear layers inside the decoder: {known}"
            )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name; empty if `peft` was never used."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def merged_weight(layer: Any) -> Tensor:
    """W + scale · B A of an adapted layer, as `peft` merges it: a new tensor."""
    import torch

    with torch.no_grad():
        base: Tensor = layer.base_layer.weight
        a, b = adapter_weights(layer)
        rows = block_rows(base.shape[1])
        blocks = [
            base[start : start + rows] + delta_rows(a, b, scale_of(layer), start) for start in range(0, len(base), rows)
        ]
    return torch.cat(blocks) if len(blocks) > 1 else blocks[0]


def adapter_weights(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """A [rank, inputs] and B [outputs, rank] of an adapted layer."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def scale_of(layer: Any) -> float:
    return float(layer.scaling[ADAPTER])


def block_rows(inputs: int) -> int:
    """How many rows of scale · B A are computed at once, for a layer with this many inputs.

    The bits of a product may depend on its number of rows. So a row is always computed in the same block, which starts at
    a multiple of this number in the whole matrix, however the matrix is split over ranks and buckets.
    """
    return max(1, BLOCK_ELEMENTS // inputs)


def delta_rows(a: Tensor, b: Tensor, scale: float, start: int) -> Tensor:
    """The block of scale · B A that starts at the row `start`, with the arithmetic of `peft`'s `get_delta_weight`."""
    import torch

    dtype, b = b.dtype, b[start : start + block_rows(a.shape[1])]
    if b.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
        return ((b.float() @ a.float()) * scale).to(dtype)
    return (b @ a) * scale


def rows_of_delta(a: Tensor, b: Tensor, scale: float, begin: int, end: int) -> Tensor:
    """Some rows of scale · B A."""
    import torch

    block = block_rows(a.shape[1])
    first = begin // block * block
    rows = torch.cat([delta_rows(a, b, scale, start) for start in range(first, end, block)])
    return rows[begin - first : end - first]


def base_name(saved: str) -> str:
    """The name of the weight that a saved adapter matrix belongs to, in the model without adapters."""
    return saved.removeprefix(_PREFIX).replace(".lora_A.", ".").replace(".lora_B.", ".")


def without_adapters(tensors: Mapping[str, T]) -> dict[str, T]:
    """A model's tensors without those of its adapters, by their names in the model without adapters."""
    return {name.replace(_WRAPPED, "."): tensor for name, tensor in tensors.items() if not is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def merge_saved(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with saved adapters merged into its weights, and no other trace of them."""
    merged: PreTrainedModel = (
        _peft().PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False).merge_and_unload()
    )
    if hasattr(merged, "peft_config"):
        del merged.peft_config
    return merged


def saved_dtype(folder: Path) -> torch.dtype:
    """The precision of saved adapters."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        dtype: torch.dtype = file.get_tensor(next(iter(file.keys()))).dtype
    return dtype


def _saved_name(name: str) -> str:
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")


def _linear_names(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers inside the decoder."""
    from torch import nn

    layers = model.get_decoder().named_modules()
    return sorted({name.rpartition(".")[2] for name, module in layers if isinstance(module, nn.Linear)})


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise UserError(
            f"model.lora needs the package {error.name}, which is not installed: run "
            "`pip install -e '.[lora]'` in ROLL's folder, or "
            "remove model.lora to train all weights"
        ) from error
    return peft
