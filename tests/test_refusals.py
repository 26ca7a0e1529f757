"""What can be refused without the model is refused without importing torch or transformers, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = """
from roll import Task

def none(split):
    return []

def broken(split):
    raise RuntimeError("broken")
"""
COMMANDS = [
    "train absent.yaml",
    "train tiny.yaml train.lrr=1",
    "train tiny.yaml train.steps=many",
    "train tiny.yaml algorithm=gpro",
    "train tiny.yaml rollout.group_size=1",
    "train tiny.yaml train.updates_per_step=99",
    "train tiny.yaml --resume --restart",
    "train tiny.yaml --resume",
    "train tiny.yaml --code run",
    "train tiny.yaml run=a_run",
    "train tiny.yaml run=a_folder",
    "train tiny.yaml run=tiny.yaml",
    "train tiny.yaml model=no-such-model",
    "train tiny.yaml model=./models/mine",
    "train tiny.yaml model=a_folder",
    "train tiny.yaml model.chat_template=absent.jinja",
    "train tiny.yaml tasks=no-such-source",
    "train tiny.yaml tasks=absent.jsonl",
    "train tiny.yaml tasks=absent.py:tasks",
    "train tiny.yaml tasks=sources.py:absent",
    "train tiny.yaml tasks=sources.py:none",
    "train tiny.yaml tasks=sources.py:broken",
    "train tiny.yaml tasks.options={symbol:a}",
    "train tiny.yaml tasks=wrong.jsonl",
    "train tiny.yaml tasks=environment tasks.options.name=no_such_place",
    "train tiny.yaml env.limits={frozen_lake:1}",
    "train tiny.yaml algorithm.turn_weight=1",
    "train tiny.yaml rollout.filter=signal",
    "train tiny.yaml rollout.filter=absent.py:keep",
    "train tiny.yaml rollout.task_order=backwards",
    "train tiny.yaml rollout.policy=absent.py:Policy",
    "train tiny.yaml rollout.early_stop=[absent]",
    "train tiny.yaml algorithm.loss=absent.py:loss",
    "train tiny.yaml reward=nummer",
    "train tiny.yaml reward=absent.py:score",
    "train tiny.yaml reward.options={colour:red}",
    "train tiny.yaml pipeline=sft",
    "train sft.yaml data=absent.jsonl",
    "train sft.yaml data=no-such-source",
    "eval absent.yaml",
    "eval tiny.yaml model=no-such-model",
    "eval a_folder",
    "eval tiny.yaml tasks=absent.jsonl",
    "rollout tiny.yaml reward=nummer",
    "rollout sft.yaml",
    "plan tiny.yaml tasks=absent.jsonl",
    "plan tiny.yaml model=no-such-model",
    "ledger absent",
    "export absent out",
]
CALLS = [
    "roll.train(model='no-such-model', tasks='echo', run='r')",
    "roll.train(model='tiny', tasks=[], run='r')",
    "roll.train(model='tiny', tasks=[{'question': '?'}], run='r')",
    "roll.train(model='tiny', tasks='echo', reward='nummer', run='r')",
    "roll.train(model='tiny', tasks='echo', reward=lambda task: 1, run='r')",
    "roll.train(model='tiny', tasks='echo', run='a_run')",
    "roll.train(model='tiny', tasks='echo', resume=True, run='r')",
    "roll.train(steps=3)",
    "roll.train(model='tiny', code='run')",
    "roll.evaluate('a_folder')",
    "roll.evaluate('tiny.yaml', tasks=[{'question': '?'}])",
    "roll.play('sft.yaml')",
    "roll.play('tiny.yaml', 0)",
    "roll.load_config(None)",
]
SCRIPT = """
import json, shlex, sys
import roll
from roll.cli import main

commands, calls = json.loads(sys.argv[1])
heavy = ("torch", "transformers")
found = []
for command in commands:
    status = main(shlex.split(command))
    found.append([command, status, [name for name in heavy if name in sys.modules]])
for call in calls:
    try:
        status = eval(call)
    except roll.UserError:
        status = 2
    found.append([call, status, [name for name in heavy if name in sys.modules]])
print(json.dumps(found))
"""


def test_refusals_that_need_no_model_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    for name in ("tiny", "sft"):
        (tmp_path / f"{name}.yaml").write_text((ROOT / "examples" / f"{name}.yaml").read_text())
    (tmp_path / "sources.py").write_text(SOURCES)
    (tmp_path / "wrong.jsonl").write_text('{"question": "?"}\n')
    for folder, file in (("a_run", "config.yaml"), ("a_run", "ledger.log"), ("a_folder", "notes.txt")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / file).touch()
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([COMMANDS, CALLS])],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [case for case in found if case[1:] != [2, []]] == []
    assert "Traceback" not in done.stderr
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before
