"""AdamW over fp32 master weights, for parameters in the serving precision.

Invariants: gradients are summed in fp32 across micro-batches, the update happens in fp32, and the parameters are the
rounded master weights, written in place (an engine may be using that storage). fp32 and fp64 parameters are their own
masters.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from roll.config.errors import RunError, UserError
from roll.config.schema import TrainConfig
from roll.model.shard_loading import Tensors, copy_from
from roll.strategy.train.out_of_memory import error_sentence, is_out_of_memory


@dataclass(frozen=True)
class OptimizerStep:
    norm: float
    """Norm of the gradients before clipping."""
    applied: bool
    nonfinite: tuple[str, ...] = ()
    """If the update was not applied: parameters with a non-finite gradient."""


class MasterAdamW:
    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._config = config
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        assert not (self._sharded and config.optimizer == "adamw_8bit"), "the device map refuses it"
        self._masters: dict[str, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype in (torch.float32, torch.float64):
                self._masters[name] = parameter
            else:
                self._masters[name] = nn.Parameter(parameter.detach().float().clone())
                parameter.register_post_accumulate_grad_hook(self._summing_hook(self._masters[name]))  # type: ignore[no-untyped-call]
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        vectors = [m for m in self._masters.values() if m.ndim < 2]
        self._adamw = _adamw(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            config,
        )

    @staticmethod
    def _summing_hook(master: nn.Parameter) -> Callable[[Tensor], None]:
        def add_to_master(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        return add_to_master

    def step(self, step: int, loss: Tensor | None = None) -> OptimizerStep:
        """Applies the summed gradients at training step `step` (from 0).

        If the norm or the loss is not finite, weights and moments stay unchanged. The host waits for the device once.
        Running out of memory here ends the run: some weights may have been written already, so the step cannot be
        repeated.
        """
        try:
            return self._step(step, loss)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            less = (
                "more GPUs for the role" if self._sharded else "train.optimizer=adamw_8bit (its moments take a quarter)"
            )
            raise RunError(
                f"the GPU ran out of memory in the optimizer's step ({error_sentence(error)}), where micro-batches play "
                f"no part and weights may have been written already: write {less} or a smaller rollout.kv_cache_tokens, "
                "or leave the GPU more memory, and resume the run from its last checkpoint"
            ) from error

    def _step(self, step: int, loss: Tensor | None) -> OptimizerStep:
        slopes = self.gradients()
        norm = total_norm(slopes.values())
        read = torch.stack([norm, norm if loss is None else loss.to(norm)])
        read_norm, read_loss = read.tolist()
        applied = math.isfinite(read_norm) and math.isfinite(read_loss)
        nonfinite = () if applied else tuple(name for name, slope in slopes.items() if not _is_finite(slope))
        if applied:
            clip(slopes.values(), self._config.clip_grad_norm, norm)
            self._set_lr(learning_rate(self._config, step))
            self._adamw.step()
            self._write_parameters()
        self.zero_grad()
        return OptimizerStep(read_norm, applied, nonfinite)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients summed so far, by parameter."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def zero_grad(self) -> None:
        """Drops all gradients, including one that a failed backward pass left before it was added to its master."""
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _write_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def _set_lr(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            if isinstance(group["lr"], Tensor):  # a compiled optimizer has a tensor here
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _state(self, name: str) -> dict[str, Tensor]:
        """Moments and step count of a parameter, if it was ever updated; a quantised moment as its component tensors."""
        state = self._adamw.state.get(self._masters[name], {})
        return {key: tensor for moment, value in state.items() for key, tensor in plain_tensors(moment, value).items()}

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that only the optimizer has: moments, and masters that are not the parameters themselves."""
        own: dict[str, Tensor] = {f"master/{n}": m for n, m in self._masters.items() if m is not self._parameters[n]}
        for name in self._masters:
            own.update({f"{key}/{name}": tensor for key, tensor in self._state(name).items()})
        return own

    def state(self) -> dict[str, Tensor]:
        """Everything that resuming needs: masters, including those that are the parameters themselves, and moments."""
        return {f"master/{name}": master for name, master in self._masters.items()} | self.tensors()

    def save(self, path: Path) -> None:
        save_file({name: tensor.detach() for name, tensor in self.tensors().items()}, path)

    def has_masters(self, saved: Tensors) -> bool:
        """Whether the checkpoint has all masters. If not, the parameters are their own masters and were saved with the
        model."""
        return all(f"master/{name}" in saved for name in self._masters)

    @torch.no_grad()
    def load(self, saved: Tensors) -> None:
        """Reads masters and moments (this process may have only shards of them) and writes the parameters. A parameter
        that is its own master, and is not in the checkpoint's state, keeps its value."""
        self._make_state([name for name in self._masters if f"step/{name}" in saved])
        own = {f"master/{name}" for name, master in self._masters.items() if master is self._parameters[name]}
        for name, tensor in self.state().items():
            if name in own and name not in saved:
                continue
            if name not in saved or saved.shape(name) != tuple(tensor.shape):
                raise UserError(
                    f"the checkpoint has no {name} as train.optimizer={self._config.optimizer} keeps it: write the "
                    "optimizer that wrote it"
                )
            copy_from(saved, name, tensor)
        self._write_parameters()

    def _make_state(self, names: list[str]) -> None:
        """Allocates the moments of these parameters by updates with learning rate 0: one by one, so that only one
        gradient exists at a time."""
        self._set_lr(0.0)
        self.zero_grad()
        for name in names:
            self._masters[name].grad = torch.zeros_like(self._masters[name])
            self._adamw.step()
            self._masters[name].grad = None


class PartwiseAdamW(torch.optim.AdamW):
    """AdamW over this rank's shard of each parameter. The update needs no communication, and DTensor operations on
    hundreds of parameters would keep the host busy for longer than the device."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None]
            states = [self._state_of(master) for master in masters]
            beta1, beta2 = group["betas"]
            adamw(
                [_local(master) for master in masters],
                [_local(master.grad) for master in masters],
                [_local(state["exp_avg"]) for state in states],
                [_local(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        """Moments and step count, with the names and initial values that AdamW uses."""
        state: dict[str, Tensor] = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        return state


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together: the norm of each rank's shards first, then one sum over the ranks that hold the
    others. A model may be on several meshes."""
    meshes: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        mesh_dims = _sharded_over(gradient) if isinstance(gradient, DTensor) else None
        meshes.setdefault(mesh_dims, []).append(_local(gradient))
    norms = [_summed(nn.utils.get_total_norm(parts), mesh_dims) for mesh_dims, parts in meshes.items()]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def _sharded_over(gradient: DTensor) -> tuple[DeviceMesh, tuple[int, ...]]:
    """The mesh, and the dimensions of it over which the tensor is sharded; over the others it is replicated."""
    return gradient.device_mesh, tuple(
        dim for dim, placed in enumerate(gradient.placements) if not isinstance(placed, Replicate)
    )


def _summed(norm: Tensor, mesh_dims: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    """The norm of the whole gradient from that of this rank's shards."""
    if mesh_dims is None:
        return norm
    mesh, dims = mesh_dims
    norm = norm.to(mesh.device_type)  # gradients may be in host memory
    for dim in dims:
        if mesh.size(dim) > 1:
            squares = norm.square()
            dist.all_reduce(squares, group=mesh.get_group(dim))
            norm = squares.sqrt()
    for dim in range(mesh.ndim):  # replicas may have summed in different orders: make all clip by the same number
        if dim not in dims and mesh.size(dim) > 1:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return norm


@torch.no_grad()
def clip(gradients: Iterable[Tensor], limit: float, norm: Tensor) -> None:
    """Scales the gradients, whose total norm is given, so that the norm does not exceed the limit."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(_local(gradient))
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard, in the same storage. To be called without gradients."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def _is_finite(gradient: Tensor) -> bool:
    finite = gradient.isfinite().all()
    return bool(finite.full_tensor() if isinstance(finite, DTensor) else finite)


def plain_tensors(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor by its name, or the component tensors of a quantised one: `exp_avg.codes`, `exp_avg.scale`. A sharded
    tensor counts as plain; the components of a quantised one are those of this rank's shard."""
    with torch.no_grad():
        local = _local(value)
    if not hasattr(local, "__tensor_flatten__"):
        return {name: value}
    return {f"{name}.{part}": getattr(local, part) for part in local.__tensor_flatten__()[0]}


def check_optimizer(name: str) -> None:
    """Raises if the optimizer's package is not installed."""
    if name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise UserError(
            "train.optimizer is adamw_8bit, but the package torchao is not installed: run `pip install torchao`, or "
            "write train.optimizer=adamw"
        )


def _adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    check_optimizer(config.optimizer)
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.optimizer == "adamw":
        return PartwiseAdamW(groups, **settings, fused=True)
    from torchao.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(groups, **settings)
    return made


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then the schedule down to 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min((step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
