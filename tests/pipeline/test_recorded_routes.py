"""Runs of a mixture of experts: every batch says which experts the tokens before each sampled one were sent to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll.algorithm.credit import CreditSpec, TokenCredit, token_credit
from roll.config import UserError, load_config
from roll.data import Batch
from roll.data.tokenlog import branches
from roll.engine.request import Request
from roll.engine.slot_engine import SlotEngine
from roll.model.tiny import character_tokenizer, tiny_config
from roll.pipeline.entrypoints import train
from roll.pipeline.prepare import check
from roll.pipeline.report import SilentReporter
from roll.strategy.train import policy

pytestmark = pytest.mark.usefixtures("elsewhere")

LAYERS, EXPERTS, CHOSEN = 2, 6, 2
PLAY: dict[str, Any] = {
    "pipeline": "rlvr",
    "tasks": {
        "source": "environment",
        "options": {"name": "echo_turns", "turns": 3, "symbols": "0123", "count": 20, "held_out": 4},
    },
    "rollout": {"groups_per_step": 2, "group_size": 3, "max_new_tokens": 4, "max_running": 4, "filter": "none"},
    "threads": 1,
    "train": {"lr": 1e-3, "steps": 2},
    "eval": {"every": 0, "samples": 2},
    "run": {"checkpoint_every": 0, "tensorboard": False},
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    like = tiny_config()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 8}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16}
    kept = ("vocab_size", "num_attention_heads", "num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id")
    shape = {name: getattr(like, name) for name in kept}
    folder = tmp_path_factory.mktemp("mixture")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = Qwen3MoeConfig(
            **shape, **sizes, **experts, decoder_sparse_step=1, initializer_range=0.2, max_position_embeddings=256
        )
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def batches_of(model: Path, path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[Batch]:
    """Those that a run was trained on."""
    seen: list[Batch] = []

    def spy(batch: Batch, spec: CreditSpec) -> TokenCredit:
        seen.append(batch)
        return token_credit(batch, spec)

    monkeypatch.setattr(policy, "token_credit", spy)
    config = load_config({**PLAY, "model": str(model)}, [f"run.dir={path}", "model.dtype=fp32", *settings])
    train(config, reporter=SilentReporter())
    return seen


def plain_routes(model: Any, ids: np.ndarray) -> np.ndarray:
    found: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _, __, output: found.append(output[2])) for gate in gates]
    with torch.inference_mode():
        model(torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, 1).numpy(), axis=2)


@pytest.mark.parametrize(
    "settings",
    [(), pytest.param(("env.window=1",), marks=pytest.mark.thorough), ("deterministic=true",)],
    ids=["turns", "branches", "deterministic"],
)
def test_the_rows_before_sampled_tokens_are_recorded(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    asked: dict[str, int | None] = {}
    add = SlotEngine.add

    def noted(engine: SlotEngine, request: Request) -> None:
        asked[request.id] = request.routes_from
        add(engine, request)

    monkeypatch.setattr(SlotEngine, "add", noted)
    found = batches_of(mixture, tmp_path / "run", monkeypatch, *settings)
    assert {id.startswith("eval.") for id, start in asked.items() if start is None} == {True}
    assert {id.startswith("eval.") for id, start in asked.items() if start is not None} == {False}
    assert len(found) == PLAY["train"]["steps"]
    for batch in found:
        routes = batch["routes"]
        assert routes.shape == (batch.tokens, LAYERS * CHOSEN)
        assert routes.dtype == np.uint8
        assert batch.loss_mask.any()
        before = routes[np.flatnonzero(batch.loss_mask) - 1]
        assert (before < EXPERTS).all()
    model = Qwen3MoeForCausalLM.from_pretrained(mixture)
    first = found[0]
    for ids, turn, routes in zip(first.rows("ids"), first.rows("turn"), first.rows("routes"), strict=True):
        for span in branches(turn):
            own = np.sort(routes[span].reshape(-1, LAYERS, CHOSEN)[:-1], axis=2)
            assert (own == plain_routes(model, ids[span])[:-1]).all()
            assert (routes[span][-1] == 255).all(), "nothing was drawn after it"


def test_without_replay_nothing_is_recorded(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("rollout.router_replay=false", "train.steps=1")
    (batch,) = batches_of(mixture, tmp_path / "run", monkeypatch, *settings)
    assert batch["routes"].shape == (batch.tokens, 0)


def test_a_mixture_that_cannot_be_replayed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Unless the run does without."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = GraniteMoeConfig(vocab_size=len(character_tokenizer()), **sizes, num_key_value_heads=2)
    GraniteMoeForCausalLM(shape).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    settings = {**PLAY, "model": str(tmp_path)}
    with pytest.raises(UserError, match=r"GraniteMoeForCausalLM .* write rollout\.router_replay=false"):
        check(load_config(settings, []))
    check(load_config(settings, ["rollout.router_replay=false"]))
