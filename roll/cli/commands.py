"""The command line: `roll train`, `eval`, `rollout`, `plan`, `ledger`, `export`, `doctor`.

Exit status 0: done. 1: the run failed. 2: the user's error, reported in one message. 128 + n: stopped early by signal n,
so 130 after Ctrl-C, 143 after `kill`, 129 when the terminal was closed; `roll train` has saved by then, unless it was
stopped twice. Output without a reader (`| head`, `>&-`) changes none of these.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import traceback
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from roll.config.errors import RunError, UserError
from roll.config.hints import command_line
from roll.pipeline.output import tolerant_output
from roll.pipeline.signals import Stopped, exit_status

if TYPE_CHECKING:
    from roll.config import Config
    from roll.pipeline.run_code import Code


class _Commands(TyperGroup):
    """All commands. Keeps the signal's number, which typer's own exit status for a KeyboardInterrupt would lose."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            # asyncio (Python 3.11) warns when a child process ends after its event loop was closed, as graders may here.
            logging.getLogger("asyncio").setLevel(logging.ERROR)
            _errors.print("stopped")
            raise typer.Exit(exit_status(stop)) from None


app = typer.Typer(
    name="roll",
    cls=_Commands,
    help="Reinforcement learning of language models: the same program on a laptop's CPU and on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_console = Console()
_errors = Console(stderr=True)

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file: docs/reference/config.md, examples/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file: train.lr=1e-6 seed=1"),
]

CodeOption = Annotated[
    str | None,
    typer.Option(
        "--code",
        metavar="run|current",
        help="Of a run: the code that it was trained with and keeps, or the files as they are now.",
    ),
]


def _version(requested: bool) -> None:
    if requested:
        from roll.config.version import __version__

        print(f"roll {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run folder's newest checkpoint.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Move an existing run folder aside and start over.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per step instead of a live display.")] = False,
    code: CodeOption = None,
) -> None:
    """Train a model as CONFIG says.

    Ctrl-C, SIGTERM and a closed terminal (SIGHUP) end the step, save, and print how to continue; a second one ends at
    once. The exit status is then 128 + the signal's number.
    """
    from roll.config import load_config

    if resume and restart:
        raise UserError("--resume continues a run and --restart begins it again: write one of them")
    if code and not resume:
        raise UserError("--code says which code a run is resumed with: write --resume too, or leave it out")
    from roll.pipeline.preflight import check_folder
    from roll.pipeline.run_code import check_code

    check_code(code)
    settings = load_config(config, overrides or [])
    check_folder(settings, resume=resume, restart=restart)
    chosen = _check_code(settings, code) if resume else None
    found = _checked(settings, read=not resume)
    from roll.pipeline.executors import connecting_executor_of

    # Ray starts while the libraries are imported. A resumed run may have other code, and connects when that is known.
    with nullcontext() if resume else connecting_executor_of(settings) as executor, tolerant_output(every_error=True):
        _quiet_libraries()
        from roll.cli.display import LiveReporter
        from roll.pipeline.entrypoints import train as run_training

        run = partial(run_training, settings, resume=resume, restart=restart, code=chosen, found=found, executor=executor)
        live = not plain and _console.is_terminal
        if not live:
            summary = run()
        else:
            with LiveReporter(_console) as reporter:
                summary = run(reporter=reporter)
        again = ["roll", "train", config, *(overrides or []), "--resume", *(["--code", code] if code else [])]
        _print_end(summary, live, shlex.join(again))


def _print_end(summary: dict[str, Any], live: bool, again: str) -> None:
    """Prints the summary of a finished run; of a stopped one the command that continues it, and exits with its signal."""
    from roll.cli.display import print_summary
    from roll.pipeline.report import held_out_lines

    if not summary["stopped"]:
        print_summary(_console, summary)
        return
    for line in held_out_lines(summary) if live else ():  # the plain reporter has printed them
        _console.print(line, markup=False, highlight=False)
    done = f"stopped after step {summary['steps']} of {summary['steps_planned']}; continue with"
    _console.print(done, highlight=False)
    _console.print(f"  {again}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(exit_status(Stopped(signal.Signals[summary["stopped_by"]])))


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="CONFIG|RUN", help="A YAML file, or the folder of a run.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with all numbers.")] = False,
    code: CodeOption = None,
) -> None:
    """Measure the held-out reward, for sft the held-out loss: of a CONFIG's model, or of a RUN's newest checkpoint."""
    settings = _config_of(target, overrides or [], code)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # user code may print when it is imported
        found = _found(settings)
        from roll.pipeline.entrypoints import evaluate as run_evaluation

        result = run_evaluation(settings, found=found)
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
        return
    from roll.cli.display import print_evaluation

    print_evaluation(_console, result)


@app.command()
def rollout(
    target: Annotated[str, typer.Argument(metavar="CONFIG|RUN", help="A YAML file, or the folder of a run.")],
    overrides: Overrides = None,
    episodes: Annotated[int, typer.Option(min=1, metavar="N", help="Attempts to make.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, with every passage.")] = False,
    code: CodeOption = None,
) -> None:
    """Make rollouts without training and show them: who said what, rewards, and which tokens would be trained on."""
    from roll.pipeline.preflight import check_has_rollouts

    settings = _config_of(target, overrides or [], code)
    check_has_rollouts(settings)
    found = _found(settings)
    from roll.cli.transcripts import print_json, print_transcripts
    from roll.pipeline.entrypoints import play

    transcripts = play(settings, episodes, found=found)
    if as_json:
        print_json(transcripts)
    else:
        print_transcripts(_console, transcripts)


@app.command()
def plan(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check everything and show which role runs where, sizes and memory, without starting anything."""
    from roll.config import load_config

    settings = load_config(config, overrides or [])
    found = _found(settings)
    from roll.devices.disk_estimate import check_disk, disk_warning
    from roll.devices.plan import check_memory, make_plan
    from roll.devices.render_plan import render_plan
    from roll.pipeline.executors import executor_of
    from roll.pipeline.prepare import prepare
    from roll.pipeline.roles import inventory_of

    pipeline = prepare(settings, found=found)
    with executor_of(settings) as executor:
        run_plan = make_plan(pipeline.config, pipeline.requirements, inventory_of(settings, executor))
    trained = f", of adapters {run_plan.adapters:,}" if run_plan.adapters else ""
    headline = (
        f"{run_plan.model}: {run_plan.parameters:,} parameters{trained} in {run_plan.dtype}, executor {settings.executor}"
    )
    _console.print(headline, markup=False, soft_wrap=True)
    for table in render_plan(run_plan, _console.width):
        _console.print(table)
    if pipeline.answer_check:
        _console.print(pipeline.answer_check, markup=False, highlight=False)
    for warning in pipeline.warnings:
        _console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)
    run_dir = Path(settings.run.dir)
    if (full_warning := disk_warning(run_plan.writes, run_dir)) is not None:
        _console.print(Text(f"warning: {full_warning}", "yellow"), soft_wrap=True)
    check_memory(run_plan)
    check_disk(run_plan.writes, run_dir)


@app.command()
def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or a ledger.log.")],
    task: Annotated[str | None, typer.Option(metavar="ID", help="What became of a task: every attempt at it.")] = None,
    sample: Annotated[str | None, typer.Option(metavar="ID", help="A sample's every transition.")] = None,
    dropped: Annotated[bool, typer.Option("--dropped", help="Why samples were dropped, failed or queued again.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="Seconds that samples were in each state.")] = False,
    solve_rates: Annotated[bool, typer.Option("--solve-rates", help="Each task's mean reward, hardest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with all rows.")] = False,
) -> None:
    """Show what became of every task and sample of a run, also while it is running."""
    from roll.cli.ledger import LedgerQuery, print_results, run_query
    from roll.run import LedgerIndex, RunFolder

    record = run if run.is_file() else RunFolder.open(run).ledger_path
    with _errors.status("reading the ledger") as status:
        index = LedgerIndex.open(record, lambda done, size: status.update(f"reading the ledger: {done / size:.0%}"))
    with index:
        found = run_query(index, LedgerQuery(task, sample, dropped, stages, solve_rates))
    if not as_json and not run.is_file():
        _print_reward(run)
    print_results(_console, found, as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it must not exist.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapters of a run with model.lora.")] = False,
) -> None:
    """Write a run's newest weights as a folder that transformers loads; adapters are merged into their model."""
    from roll.pipeline.export import export_model

    # transformers is imported only if there is something to merge
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    step = export_model(run, folder, adapter=adapter)
    loads = "PeftModel.from_pretrained(base, " if adapter else "AutoModelForCausalLM.from_pretrained("
    message = f"step {step} of {run} is in {folder}: {loads}{str(folder)!r})"
    _console.print(message, markup=False, soft_wrap=True)


@app.command()
def repair(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is damaged.")] = False,
) -> None:
    """Find and repair damage in a run's folder; what is taken out is moved aside, never deleted."""
    from roll.rollout.buffer_checkpoint import unfinished_samples
    from roll.run.repair import repair as repair_run

    repaired = repair_run(run, unfinished_samples, dry_run=dry_run)
    for finding in repaired.findings:
        _console.print(finding, markup=False, highlight=False, soft_wrap=True)
    if not repaired.findings:
        message = f"nothing in {run} is damaged"
    elif dry_run:
        message = f"nothing was changed: `roll repair {run}` repairs it"
    else:
        message = (
            f"repaired; what was there before is in {repaired.backup_folder}" if repaired.backup_folder else "repaired"
        )
    _console.print(message, markup=False, highlight=False, soft_wrap=True)
    if not dry_run:
        _console.print(f"next: {repaired.next_step}", markup=False, highlight=False, soft_wrap=True)
    if not repaired.can_continue:
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Show versions and devices, what is missing, and what optional packages are for."""
    from roll.cli.doctor import examine

    findings = examine()
    table = Table("", "what")
    for name in ("found", "for", "advice"):
        table.add_column(name, overflow="fold")  # a path that is cut off with … is useless
    colors = {"✓": "green", "✗": "red", "–": "yellow"}
    for finding in findings:
        mark = Text(finding.mark, colors[finding.mark])
        table.add_row(mark, *map(Text, (finding.what, finding.value, finding.purpose, finding.advice)))
    _console.print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _config_of(target: str, overrides: list[str], code: str | None) -> Config:
    """The config of a file, or of a run with its newest checkpoint as the model and the code that it was trained with."""
    from roll.config import load_config

    if not Path(target).is_dir():
        if code:
            raise UserError(f"--code says which code of a run is used, but {target} is a file: leave it out")
        return load_config(target, overrides)
    from roll.pipeline.run_code import config_of_run

    config, message = config_of_run(Path(target), overrides, code)
    if message:
        _errors.print(message, markup=False, highlight=False, soft_wrap=True)
    return config


def _check_code(config: Config, code: str | None) -> Code | None:
    """Refuses to resume a run whose code has changed, before the slow imports."""
    from roll.pipeline.run_code import check_code, code_to_resume
    from roll.run.folder import RunFolder

    chosen = check_code(code)
    run_dir = Path(config.run.dir)
    if RunFolder.is_run(run_dir):
        code_to_resume(config, {}, run_dir, chosen)
    return chosen


def _print_reward(run: Path) -> None:
    """Prints the reward of a run."""
    from roll.config import load_config
    from roll.run.code import RunCode, reward_of

    reward = reward_of(load_config(run / "config.yaml"), RunCode.open(run))
    if reward is not None:
        _console.print(f"reward: {reward}", markup=False, highlight=False, soft_wrap=True)


def _found(config: Config) -> Any:
    """The data that the config names, as its pipeline reads it. What is missing is refused before the slow imports."""
    found = _checked(config)
    _quiet_libraries()
    return found


def _checked(config: Config, read: bool = True) -> Any:
    """The data that the config names; without `read`, only the model is checked. Imports no slow library."""
    from roll.pipeline.preflight import check_model, find

    found = find(config) if read else None
    check_model(config)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return found


def _quiet_libraries() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main(arguments: list[str] | None = None) -> Any:
    """The entry point: here a user's errors become a message and an exit status."""
    try:
        with tolerant_output(), command_line():
            return _run(arguments)
    except RunError as error:  # the last output could not be written
        return _failed(error)
    except Exception as error:
        from roll.cli.doctor import is_needed, print_missing
        from roll.config.secrets import KNOWN

        if isinstance(error, ModuleNotFoundError) and error.name and is_needed(error.name):
            return print_missing(error.name, arguments)
        sys.stderr.write(KNOWN.redact("".join(traceback.format_exception(error))))
        return 1


def _run(arguments: list[str] | None) -> Any:
    try:
        app(arguments)
    except UserError as error:
        _errors.print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    except RunError as error:
        return _failed(error)
    except SystemExit as end:  # typer ends like this, also after it has reported wrong arguments
        return end.code
    return 0


def _failed(error: RunError) -> int:
    _errors.print(f"[bold red]the run failed:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
    return 1


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
