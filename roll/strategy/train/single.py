"""The `single` training strategy: a policy trained in one process on one device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.config.schema import TrainConfig
from roll.model.loading import quiet
from roll.model.lora import Adapters
from roll.model.shard_loading import load_shards
from roll.strategy.offload import Residency, TensorOffloader
from roll.strategy.train.forward import ForwardRunner
from roll.strategy.train.policy import PolicyTrainer
from roll.strategy.train.probe import Probe
from roll.strategy.train.saved_state import OPTIMIZER_FILE, load_state
from roll.strategy.train.work_split import OneProcess
from roll.weight_sync.merged_state_dict import published_tensors
from roll.weight_sync.weights import Weights


class SingleStrategy(PolicyTrainer):
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        config: TrainConfig,
        *,
        trainable: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        """With `adapters` (LoRA), only the adapters are trained and saved."""
        device = next(model.parameters()).device
        super().__init__(
            model, config, OneProcess(device), ForwardRunner(model, config), trainable=trainable, adapters=adapters
        )
        self._tokenizer = tokenizer
        self._probe = Probe(model)
        self._offloader = TensorOffloader(device)

    def weights(self, version: int) -> Weights:
        """The current weights, for an engine in the same process."""
        parameters = dict(self.model.named_parameters())
        return Weights(version, self.model, parameters, *self.probe())

    def published(self) -> Mapping[str, Tensor]:
        return published_tensors(self.model)

    def probe(self) -> tuple[Tensor, Tensor]:
        return self._probe.prompt, self._probe.log_probs()

    def set_residency(self, level: Residency) -> None:
        own = self._optimizer.tensors() if self._optimizer is not None else {}
        self._offloader.set_residency(level, dict(self.model.named_parameters()), own)

    def save(self, folder: Path) -> None:
        assert self._optimizer is not None, "a frozen model has nothing to save"
        if self._adapters is not None:
            self._adapters.save(folder / "model")
        else:
            with quiet():
                self.model.save_pretrained(folder / "model", max_shard_size="1TB")  # one file, whatever the size
        self._tokenizer.save_pretrained(folder / "model")
        self._optimizer.save(folder / OPTIMIZER_FILE)
        self._runner.save(folder)

    def saved(self) -> dict[str, str]:
        return {}

    def load(self, folder: Path) -> None:
        """Reads a checkpoint written by `save` into the existing storage of the parameters."""
        assert self._optimizer is not None, "a frozen model is not resumed"
        if self._adapters is not None:
            self._adapters.check_base(folder / "model")
        load_state(folder, self._optimizer, lambda parameters: self._load_model(folder / "model", parameters))
        self._runner.load(folder)

    def close(self) -> None:
        """There is nothing to free: all tensors belong to this process."""

    def _load_model(self, folder: Path, parameters: bool) -> None:
        if self._adapters is None:
            load_shards(self.model, folder, parameters=parameters)
        elif parameters:
            self._adapters.load(folder)
