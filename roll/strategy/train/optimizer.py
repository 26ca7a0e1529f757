"""AdamW over fp32 master weights, for parameters that live in the serving precision.

What always holds: gradients are summed in fp32 across micro-batches, the update happens in fp32, and the parameters are
the masters rounded, written in place (an engine may be using that very storage). Parameters that are fp32 already are
their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roll.config.schema import TrainConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterAdamW:
    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._config = config
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters: dict[str, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype == torch.float32:
                self._masters[name] = parameter
            else:
                self._masters[name] = nn.Parameter(parameter.detach().float().clone())
                parameter.register_post_accumulate_grad_hook(self._summing_hook(self._masters[name]))  # type: ignore[no-untyped-call]
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        vectors = [m for m in self._masters.values() if m.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    @staticmethod
    def _summing_hook(master: nn.Parameter) -> Callable[[Tensor], None]:
        def add_to_master(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        return add_to_master

    def step(self, step: int) -> float:
        """Applies the summed gradients at training step `step` (from 0) and returns their norm before clipping.

        A norm that is not finite leaves weights and moments as they are.
        """
        masters = list(self._masters.values())
        norm = float(nn.utils.clip_grad_norm_(masters, self._config.clip_grad_norm))
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate(self._config, step)
            self._adamw.step()
            self._write_parameters()
        self.zero_grad()
        return norm

    def gradients(self) -> dict[str, Tensor]:
        """The gradients summed so far, by parameter."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _write_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def tensors(self) -> dict[str, Tensor]:
        """What belongs to the optimizer alone: moments, and masters that are not the parameters themselves."""
        own: dict[str, Tensor] = {f"master/{n}": m for n, m in self._masters.items() if m is not self._parameters[n]}
        for name, master in self._masters.items():
            state = self._adamw.state.get(master, {})
            own.update({f"{moment}/{name}": state[moment] for moment in (*_MOMENTS, "step") if moment in state})
        return own

    def save(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state = self._adamw.state.get(master, {})
            tensors.update({f"{moment}/{name}": state[moment] for moment in _MOMENTS if moment in state})
            tensors[f"step/{name}"] = state.get("step", torch.zeros(()))
            if master is not self._parameters[name]:
                tensors[f"master/{name}"] = master.detach()
        save_file(tensors, path)

    def load(self, path: Path) -> None:
        tensors: Mapping[str, Tensor] = load_file(path)
        for name, master in self._masters.items():
            state = {moment: tensors[f"{moment}/{name}"] for moment in _MOMENTS if f"{moment}/{name}" in tensors}
            if state:
                device = master.device
                moments = {moment: value.to(device) for moment, value in state.items()}
                self._adamw.state[master] = {**moments, "step": tensors[f"step/{name}"].clone().to(device)}
            if master is not self._parameters[name]:
                with torch.no_grad():
                    master.copy_(tensors[f"master/{name}"])
        self._write_parameters()


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: a linear rise over the warm-up, then the schedule down to 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
