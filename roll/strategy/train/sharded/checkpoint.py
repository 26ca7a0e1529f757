"""Saves the shards of a sharded trainer's ranks in the background.

Invariants: when `save` returns, the values are copied to host memory, and training may change the trainer's own. The
ranks of one replica write, each its own shards, and each hashes the files that it wrote. The writers communicate in a
process group of their own: in the trainer's group, their messages would mix with its gradients.

    shards/
      .metadata      which file has which shard, written by rank 0 once all others have written
      __0_0.distcp   the shards of rank 0
      __1_0.distcp   …
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture
from transformers import PreTrainedModel

from roll.atomic_files import file_digest
from roll.config.errors import RunError
from roll.model.find import SHARDS
from roll.model.lora import Adapters
from roll.model.shard_folder import FROZEN, MASTER
from roll.run.disk import full_disk
from roll.strategy.train.optimizer import MasterAdamW
from roll.strategy.train.sharded.process_group import RankGroup

_WRITE_S = 3600.0
"""How long a rank waits for the slowest writer. Callers that wait for the checkpoint have their own deadline."""


class ShardWriter:
    """Writes the tensors of this rank to a folder, together with the other ranks."""

    def __init__(self, group: RankGroup) -> None:
        """A collective call: every rank creates its writer at the same time."""
        self._group = group
        writers = list(range(group.shape.copy))  # the ranks of the first replica: the others hold the same
        self._own = dist.new_group(writers, backend="gloo", timeout=timedelta(seconds=_WRITE_S))
        self._written: Future[dict[str, str]] | None = None

    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Copies the values to host memory and starts writing them to `folder/shards`. Waits for the previous write, if
        one is in progress."""
        if self._group.replica:
            return
        if self._written is not None:
            self._written.exception()
        captured = capture(tensors, self._group)
        written: Future[dict[str, str]] = Future()
        # A daemon thread: a write that waits for a dead rank must not keep the process alive.
        threading.Thread(target=self._write, args=(captured, folder, written), name="checkpoint", daemon=True).start()
        self._written = written

    def saved(self) -> dict[str, str]:
        """Waits until all ranks have written. Returns the digests of the files that this rank wrote, by their names in
        the folder of `save`."""
        return {} if self._written is None else self._written.result()

    def _write(self, captured: dict[str, Tensor], folder: Path, written: Future[dict[str, str]]) -> None:
        try:
            shards = folder / SHARDS
            writer = _Writer(shards, per_thread_copy_ahead=0)  # nothing is on a GPU
            save(captured, storage_writer=writer, process_group=self._own)
            files = sorted(shards.glob(f"__{self._group.rank}_*.distcp"))
            if self._group.is_first:
                files += [shards / ".metadata"]
            written.set_result({f"{SHARDS}/{file.name}": file_digest(file) for file in files})
        except CheckpointException as error:
            written.set_exception(_failed(error, folder))
        except BaseException as error:
            written.set_exception(error)


class _Writer(FileSystemWriter):
    """Reports a full disk as the operating system does. Torch writes zip files, reports only a wrong file position, and
    sends nothing else to the other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        with _reporting_full_disk():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with _reporting_full_disk():
            super().finish(metadata, results)


@contextmanager
def _reporting_full_disk() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (reason := full_disk(error)) is None:
            raise
        raise RunError(reason) from error


def capture(tensors: Mapping[str, Tensor], group: RankGroup) -> dict[str, Tensor]:
    """The part of the tensors that this rank writes, in host memory: its shards, and on the first rank the tensors that
    every rank has in full."""
    found = {name: tensor for name, tensor in tensors.items() if _is_written_here(tensor, group)}
    captured = {name: _on_host(tensor.detach()) for name, tensor in found.items()}
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return captured


def _is_written_here(tensor: Tensor, group: RankGroup) -> bool:
    return tensor.to_local().numel() > 0 if isinstance(tensor, DTensor) else group.is_first


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned if it comes from a GPU; it is complete after the device is synchronised."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    host.copy_(local, non_blocking=True)
    if not isinstance(tensor, DTensor):
        return host
    # `from_local` would copy it to the mesh's device type.
    sharded: Tensor = DTensor(host, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return sharded


def _failed(error: CheckpointException, folder: Path) -> RunError:
    """The error of a rank as one sentence."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    failed = RunError(f"cannot write to {folder / SHARDS}: {reason} (rank {rank})")
    failed.__cause__ = cause if isinstance(cause, Exception) else None
    return failed


def state_of(model: nn.Module, optimizer: MasterAdamW, *, adapters: bool = False) -> dict[str, Tensor]:
    """Everything that a checkpoint has of a trainer, by name: masters and moments, and, unless only adapters are trained,
    the model's other tensors."""
    state = optimizer.state()
    if adapters:
        return state
    tensors = model.state_dict(keep_vars=True)
    trained = {id(tensor) for name, tensor in state.items() if name.startswith(MASTER)}
    rest = {name: tensor for name, tensor in tensors.items() if id(tensor) not in trained}
    return state | {f"{FROZEN}{name}": tensor for name, tensor in rest.items()}


def save_settings(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    """Writes the files of a model folder besides weights: the model's config, with the precision it is served in."""
    settings: Any = copy.deepcopy(model.config)
    settings.dtype = dtype
    settings.architectures = [type(model).__name__]
    settings.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def save_adapters(adapters: Adapters, dtype: torch.dtype, folder: Path, group: RankGroup) -> None:
    """Writes adapters as a single process would, in the precision they are served in. They are small: the first rank
    gathers them in full. Every rank calls this."""
    values: dict[str, Tensor] = {}
    for name, parameter in adapters.parameters().items():
        whole = _gathered(parameter.detach(), group.device)
        if group.is_first:
            values[name] = whole.to("cpu", dtype)
    if group.is_first:
        adapters.save(folder, values)


def _gathered(tensor: Tensor, device: torch.device) -> Tensor:
    """The whole tensor, on the device; its shards may be in host memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    here, sharded, size = tensor.to_local().to(device), tensor.placements, tensor.shape
    whole = DTensor.from_local(here, tensor.device_mesh, sharded, run_check=False, shape=size, stride=tensor.stride())
    return whole.full_tensor()
