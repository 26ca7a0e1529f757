"""Which code a run is evaluated or resumed with: the copy in its folder, or the current files.

Imports no compute library: a run that must not be resumed is refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from roll.config import Config, UserError, load_config
from roll.config.hints import option
from roll.config.root import is_object, root_of
from roll.config.suggest import either
from roll.config.user_code import format_path
from roll.pipeline.resume import changes_of
from roll.run.code import SETTINGS, Given, RunCode, config_to_save
from roll.run.folder import RunFolder

Code: TypeAlias = Literal["run", "current"]
"""`run` is the copy in the run's folder, `current` the files as they are now."""


@dataclass(frozen=True)
class Chosen:
    """The code that a run resumes with."""

    config: Config
    """The config that names the code."""
    given: dict[str, Any]
    """Objects passed in Python that the run uses."""
    compared: Config
    """The config to compare with the run's own: objects given in Python are not settings."""
    messages: tuple[str, ...] = ()
    recorded: RunCode | None = None
    changed: bool = False
    """Whether the code differs from the recorded code and must be recorded."""


def check_code(code: str | None) -> Code | None:
    if code is not None and code not in get_args(Code):
        raise UserError(f"code is {code!r}: write {either(get_args(Code))}")
    return cast("Code | None", code)


def config_of_run(run: Path, overrides: Sequence[str] = (), code: str | None = None) -> tuple[Config, str]:
    """The config of a run with its newest checkpoint as the model, and a sentence about the code that it names: the run's
    copy unless `code` is `current`."""
    check_code(code)
    folder = RunFolder.open(run)
    config = load_config(folder.config_path, [f"model={folder.path}", "model.lora=0", *overrides])
    recorded = RunCode.open(folder.path)
    if recorded is None:
        return (
            config,
            "" if code is None else f"{format_path(folder.path)} keeps no code: using the files as they are now",
        )
    if not recorded.manifest.pieces:
        return config, ""
    if code == "current":
        return recorded.with_objects(config), f"using the code as it is now, found from {root_of(config)}"
    message = f"using the code the run was trained with: {format_path(recorded.folder)} ({recorded.label})"
    return recorded.with_recorded_code(config), message


def code_to_resume(config: Config, given: Given, run: Path, code: str | None) -> Chosen:
    """The code that the run in a folder resumes with. Refused if it has changed and `code` does not say which to use."""
    check_code(code)
    given = {name: value for name, value in given.items() if value is not None}
    recorded = RunCode.open(run)
    if recorded is None:
        warning = (
            f"{format_path(run)} does not record the code it was trained with: continuing with the code as it is now"
        )
        return Chosen(config, given, config_to_save(config, given), (warning,), changed=True)
    config, messages = _with_recorded_objects(config, given, recorded)
    differing = recorded.differences(config, given)
    compared = recorded.with_objects(config, given)
    if differing and code is None:
        changes_of(compared, RunFolder(run))  # a changed setting is the larger difference, and names other files
    if code == "run" or (code is None and recorded.manifest.files and not Path(config.root).is_dir()):
        if data := [difference for difference in differing if difference.is_data]:
            raise UserError(
                f"data of the run in {format_path(run)} has changed since it was started, and a run keeps no copies of "
                f"data: bring it back, or write {option('code', 'current')} to continue with it as it is now"
                f"{_listed(data)}"
            )
        messages.append(f"using the code the run was trained with: {format_path(recorded.folder)} ({recorded.label})")
        return Chosen(recorded.with_recorded_code(config), {}, compared, tuple(messages), recorded)
    if differing and code is None:
        raise UserError(
            f"the run in {format_path(run)} was trained with other code or data: write {option('code', 'run')} to "
            f"continue with the copy of the code that the run keeps, or {option('code', 'current')} to continue with "
            f"the current files, which the history records{_listed(differing)}"
        )
    messages += [f"continuing with other code or data: {difference}" for difference in differing]
    for name in given:
        if name not in {SETTINGS_OF_PIECES[piece.setting] for piece in recorded.objects}:
            section = SETTINGS[name][0]
            compared = compared.model_copy(update={section: getattr(load_config(run / "config.yaml"), section)})
    return Chosen(config, given, compared, tuple(messages), recorded, changed=bool(differing))


SETTINGS_OF_PIECES = {".".join(keys): name for name, keys in SETTINGS.items()}


def _with_recorded_objects(config: Config, given: Given, recorded: RunCode) -> tuple[Config, list[str]]:
    """The config with the objects that the run was given before and is not given now, and sentences about them."""
    messages = []
    for piece in recorded.objects:
        name = SETTINGS_OF_PIECES[piece.setting]
        if name not in given:
            section, key = SETTINGS[name]
            now = getattr(getattr(config, section), key)
            if now != piece.written and not is_object(now):
                raise UserError(
                    f"{piece.setting} is {now!r}, but the run was given its {name} in Python ({piece.name}): leave the "
                    f"setting as it was, {piece.written!r}, to continue with that"
                )
            messages.append(
                f"using the {name} that the run was given in Python: {piece.name}, kept in {format_path(recorded.folder)}"
            )
    return (recorded.with_objects(config, given) if messages else config), messages


def _listed(differences: Sequence[object]) -> str:
    return "".join(f"\n  {difference}" for difference in differences)


__all__ = ["Chosen", "Code", "check_code", "code_to_resume", "config_of_run", "config_to_save"]
