"""A run without held-out tasks says that it measures nothing."""

from __future__ import annotations

import pytest

from roll.config import load_config
from roll.data.sources import TaskSet
from roll.data.task import Task
from roll.pipeline.run_warnings import run_warnings

pytestmark = pytest.mark.usefixtures("elsewhere")

ASKED = (Task.ask("a", "1+1=", 2),)


@pytest.mark.parametrize(("held_out", "told"), [((), 1), ((Task.ask("b", "2+2=", 4),), 0)])
def test_a_run_without_held_out_tasks_is_told(held_out: tuple[Task, ...], told: int) -> None:
    said = run_warnings(load_config({"model": "tiny", "tasks": "echo"}), TaskSet(ASKED, held_out), {})
    assert len([remark for remark in said if "no tasks are held out" in remark]) == told
