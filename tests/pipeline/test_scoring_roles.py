"""Runs whose rewards are given by roles: a reward model and a judge, in one process and on Ray, killed and in turns."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from classifiers import save_liking
from small_runs import WAIT_S, start_roll

from roll import load_config, train
from roll.config import UserError
from roll.config.schema import Config
from roll.devices.inventory import Inventory, Node
from roll.devices.map import make_map
from roll.devices.plan import make_plan
from roll.devices.residency import make_residency_table
from roll.pipeline.prepare import prepare
from roll.pipeline.report import SilentReporter
from roll.pipeline.resume import why_immutable
from roll.run import Ledger, Metrics, RunFolder

pytestmark = pytest.mark.usefixtures("elsewhere")

WORDS = {letter: index / 100 for index, letter in enumerate("0123456789abcdefghijklmnopqrstuvwxyz")}
JUDGE = {"name": "judge", "weight": 0.01, "options": {"rubric": "Grade {response}", "words": WORDS, "max_tokens": 12}}


def settings(run: Path, liking: Path, **more: Any) -> dict[str, Any]:
    """A tiny run that is rewarded for what a reward model likes; more settings are laid over it, section by section."""
    base: dict[str, Any] = {
        "model": "tiny",
        "threads": 1,
        "run": {"dir": str(run), "tensorboard": False, "curve": False, "checkpoint_every": 0},
        "tasks": "echo",
        "roles": {"reward_model": {"model": str(liking)}},
        "reward": {"parts": {"liked": {"name": "reward_model", "options": {"sigmoid": True}}}},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_new_tokens": 1},
        "train": {"steps": 2, "lr": 2e-3},
        "eval": {"every": 0, "samples": 4},
    }
    for section, values in more.items():
        base[section] = {**base[section], **values} if isinstance(values, dict) and section in base else values
    return base


def both(run: Path, liking: Path, **more: Any) -> dict[str, Any]:
    parts = {"liked": {"name": "reward_model"}, "sound": JUDGE}
    roles = {"reward_model": {"model": str(liking)}, "judge": {"model": "tiny", "max_running": 32}}
    return settings(run, liking, **{"reward": {"parts": parts}, "roles": roles, "seed": 1, **more})


@pytest.fixture(scope="session")
def liking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_liking(tmp_path_factory.mktemp("models") / "liking", "7")


def trained(config: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = train(load_config(config), reporter=SilentReporter())
    rows = Metrics.read(RunFolder(Path(config["run"]["dir"])).metrics_path)
    return summary, [row for row in rows if "time/step_s" in row]


@pytest.mark.thorough
def test_a_run_learns_what_the_reward_model_likes(tmp_path: Path, liking: Path) -> None:
    more = {"rollout": {"groups_per_step": 8, "group_size": 16, "max_running": 128}, "train": {"steps": 15, "lr": 5e-3}}
    summary, steps = trained(settings(tmp_path / "run", liking, **more, eval={"samples": 64}))
    assert summary["reward_before"] < 0.35
    assert summary["reward_after"] > 0.6  # 0.73 is all there is
    assert steps[-1]["reward/liked/score"] > steps[0]["reward/liked/score"] + 1


def test_both_roles_in_one_process(tmp_path: Path, liking: Path) -> None:
    _, steps = trained(both(tmp_path / "run", liking, reward={"parts": {"liked": "reward_model", "sound": JUDGE}}))
    row = steps[-1]
    for role in ("reward_model", "judge"):
        assert row[f"{role}/answer_s"] > 0
        assert row[f"{role}/unanswered"] == 0
    assert row["reward/mean"] == pytest.approx(row["reward/liked"] + 0.01 * row["reward/sound"])
    samples = [t for t in Ledger.read(RunFolder(tmp_path / "run").ledger_path) if t.state == "trained"]
    assert samples


def test_a_judge_that_never_gives_a_verdict_fails_every_sample_and_says_so(tmp_path: Path, liking: Path) -> None:
    mute = {**JUDGE, "options": {**JUDGE["options"], "words": {"never": 1.0}, "tries": 1}}
    config = both(tmp_path / "run", liking, reward={"parts": {"liked": "reward_model", "sound": mute}})
    with pytest.raises(Exception, match=r"part 'sound': ValueError: the judge's reply has no verdict"):
        trained(config)


@pytest.mark.thorough
def test_roles_in_turns_give_the_same_run(tmp_path: Path, liking: Path) -> None:
    """On a CPU nothing moves, but who is away is not asked."""
    exact = {"deterministic": True, "train": {"steps": 2, "lr": 2e-3}}
    stays = trained(both(tmp_path / "stays", liking, offload="never", **exact))[1]
    turns = trained(both(tmp_path / "turns", liking, offload="always", **exact))[1]
    assert [row["reward/mean"] for row in turns] == [row["reward/mean"] for row in stays]
    assert [row["train/loss"] for row in turns] == [row["train/loss"] for row in stays]


@pytest.mark.slow
def test_on_ray_the_same_run_gives_the_same_rewards(tmp_path: Path, liking: Path) -> None:
    exact = {"deterministic": True, "train": {"steps": 1, "lr": 2e-3}}
    here = trained(both(tmp_path / "here", liking, **exact))[1]
    ray = trained(both(tmp_path / "ray", liking, executor="ray", **exact))[1]
    same = ("reward/mean", "reward/liked", "reward/sound", "train/loss")
    assert [here[0][name] for name in same] == [ray[0][name] for name in same]


@pytest.mark.slow
def test_a_run_on_ray_survives_the_death_of_its_judge_and_its_reward_model(tmp_path: Path, liking: Path) -> None:
    from roll.config import dump_config

    more = {"fault_tolerance": {"ping_s": 0.5, "backoff_s": 0.1}, "train": {"steps": 1000, "lr": 2e-3}}
    config = load_config(both(tmp_path / "run", liking, executor="ray", **more))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    child = start_roll(["train", str(tmp_path / "config.yaml")], tmp_path / "output.txt")
    folder = RunFolder(tmp_path / "run")

    def steps() -> int:
        rows = Metrics.read(folder.metrics_path) if folder.metrics_path.is_file() else []
        return max((row["step"] for row in rows if "time/step_s" in row), default=0)

    def pid(worker: str) -> int:
        log = (folder.path / "logs" / f"{worker}-0.log").read_text()
        return int(re.findall(r" is process (\d+) on .*?is ready", log, re.DOTALL)[-1])

    try:
        child.wait_for(lambda: steps() >= 1, every_s=0.05)
        for worker in ("judge", "reward_model"):
            killed = pid(worker)
            os.kill(killed, signal.SIGKILL)
            child.wait_for(lambda worker=worker, killed=killed: pid(worker) != killed, every_s=0.05)
            done = steps()
            child.wait_for(lambda done=done: steps() >= done + 2, every_s=0.05)
        os.kill(child.pid, signal.SIGINT)
        child.process.join(WAIT_S)
        assert child.process.exitcode == 128 + signal.SIGINT, child.said
    finally:
        child.kill()
    assert "judge[0]" in child.said
    assert "reward_model[0]" in child.said
    failed = [t.reason for t in Ledger.read(folder.ledger_path) if t.state == "failed"]
    assert not [reason for reason in failed if "unanswered" in reason]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"reward": "reward_model"}, r"reward.name is reward_model, but roles.reward_model has no model: write roles.rew"),
    (
        {"reward": {"parts": {"sound": "judge"}}},
        r"reward.parts.sound.name is judge, but .*: write roles.judge.model=PATH, or reward.parts.sound.options.url",
    ),
    (
        {"domains": {"talk": {"tasks": "echo", "reward": "judge"}}},
        r"domains.talk.reward.name is judge, but roles.judge has no model",
    ),
    ({"roles": {"judge": {"model": "tiny"}}}, r"roles.judge.model.path is set, but no reward asks it: write reward.name"),
    ({"roles": {"actor_train": {"model": "tiny"}}}, r"roles.actor_train.model is not a setting"),
]


@pytest.mark.parametrize(("written", "says"), REFUSED)
def test_a_reward_without_its_role_or_a_role_without_its_reward_is_refused(written: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config({"model": "tiny", **written})


def test_a_model_that_cannot_give_the_reward_is_refused_before_the_run(tmp_path: Path) -> None:
    def refused(role: str, model: str) -> str:
        with pytest.raises(UserError) as caught:
            prepare(load_config({"model": "tiny", "tasks": "echo", "reward": role, "roles": {role: {"model": model}}}))
        return str(caught.value)

    assert refused("reward_model", "tiny").startswith("roles.reward_model.model: 'tiny' has no head that scores")
    assert refused("judge", str(tmp_path)).startswith(f"roles.judge.model: {str(tmp_path)!r} is neither a model folder")


def test_a_resumed_run_keeps_the_models_that_reward_it() -> None:
    assert why_immutable("roles.judge.devices", Config()) is None
    assert why_immutable("roles.judge.model.path", Config()) is not None
    assert why_immutable("roles.reward_model.model.dtype", Config()) is not None


def gpus(roles: dict[str, Any], liking: Path) -> Config:
    scored = {"reward_model": {"model": str(liking), **roles.pop("reward_model", {})}, "judge": {"model": "tiny"}}
    return load_config(both(Path("run"), liking, executor="ray", roles={**scored, **roles}))


def test_models_that_reward_are_there_while_samples_are_made_and_leave_for_the_trainer(liking: Path) -> None:
    config = gpus({"actor_train": 0, "actor_infer": 0, "reward_model": {"devices": "0"}}, liking)
    inventory = Inventory((Node("node0", "", 8, 2, 1 << 40, 1 << 40),))
    roles = {"actor_train", "actor_infer", "rollout", "reward", "reward_model", "judge"}
    table = make_residency_table(make_map(config, inventory, roles_in_use=roles), offload=True)
    assert table.phases == ("generate", "train", "publish")
    assert [table.level(phase, "reward_model", 0) for phase in table.phases] == ["all", "none", "none"]
    assert [table.level(phase, "actor_infer", 0) for phase in table.phases] == ["all", "none", "weights"]
    assert [table.level(phase, "judge", 0) for phase in table.phases] == ["all", "all", "all"]  # on the other GPU


def test_a_plan_shows_and_counts_both(liking: Path) -> None:
    config = load_config(both(Path("run"), liking), ["roles.judge.model.dtype=fp32"])
    plan = make_plan(config, prepare(config).requirements, Inventory((Node("node0", "", 2, 0, 1 << 36, 0),)))
    assert dict(plan.roles)["judge"] == "native, tiny, 32 at once"
    assert dict(plan.roles)["reward_model"] == f"single, {liking}"
    (pool,) = plan.memory.pools
    parts = {(part.worker, part.what): part.bytes for part in plan.memory.parts[pool, "generate"]}
    assert parts["judge[0]", "weights"] == 4 * 997_248
    assert 0 < parts["reward_model[0]", "weights"] < parts["judge[0]", "weights"]
    assert parts["judge[0]", "key-value cache"] > 0
    assert parts["reward_model[0]", "a forward pass"] > 0
