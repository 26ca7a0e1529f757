"""Writes safetensors files one tensor at a time.

Invariants: only the tensor that is being written is in memory. A finished folder is what `save_pretrained` leaves: one
`model.safetensors`, or several files with an index, each at most of the requested size unless a single part is larger.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

INDEX, FILE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNED = 8
"""Alignment of a file's tensors in bytes, as the format requires."""


@dataclass(frozen=True)
class TensorForm:
    """What a file's header says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafeFile:
    """A file of tensors whose forms are known. Each is written once, in any order."""

    def __init__(self, path: Path, forms: Mapping[str, TensorForm]) -> None:
        # Larger elements first, so that each tensor starts at a multiple of its element size.
        names = sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))
        self._forms, self._unwritten = forms, set(forms)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            form = forms[name]
            self._offsets[name], end = end, end + form.bytes
            offsets = [self._offsets[name], end]
            header[name] = {"dtype": _DTYPES[form.dtype], "shape": form.shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> SafeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                assert not self._unwritten, f"{min(self._unwritten)} was not written"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, name: str, tensor: Tensor) -> None:
        assert TensorForm.of(tensor) == self._forms[name], f"{name} is {TensorForm.of(tensor)}, not {self._forms[name]}"
        self._unwritten.remove(name)
        self._file.seek(self._data + self._offsets[name])
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def split_into_files(parts: Sequence[Mapping[str, TensorForm]], file_bytes: int) -> list[list[int]]:
    """The indices of the parts in each file. A part stays in one file; a file exceeds the size only if a single part
    does."""
    files: list[list[int]] = []
    size = 0
    for number, part in enumerate(parts):
        more = sum(form.bytes for form in part.values())
        if not files or size + more > file_bytes:
            files.append([])
            size = 0
        files[-1].append(number)
        size += more
    return files


def file_names(count: int) -> list[str]:
    if count == 1:
        return [FILE]
    stem, suffix = FILE.split(".")
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def write_index(folder: Path, files: Mapping[str, Iterable[Mapping[str, TensorForm]]]) -> None:
    """Writes the index: which tensor is in which file."""
    parts = [(file, part) for file, found in files.items() for part in found]
    size = sum(form.bytes for _, part in parts for form in part.values())
    where = {name: file for file, part in parts for name in part}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
