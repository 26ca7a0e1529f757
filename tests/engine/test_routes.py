"""Which experts tokens were sent to, as engines record it: what a plain pass over the same tokens chooses."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_models import MIXTURES, SHAPE, build, mixture, random_ids, run, tokenizer, under_plans
from transformers import AutoConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll.config.errors import UserError
from roll.data.routes import Routes
from roll.data.tokenlog import IntArray, TokenLog
from roll.engine.factory import make_engine
from roll.engine.paged.decoder import PlainDecoder
from roll.engine.paged.engine import PagedEngine
from roll.engine.paged.kv_cache import PagedPlan
from roll.engine.paged.step_inputs import StepInputs
from roll.engine.request import Completion, Request, SamplingParams
from roll.engine.routes import ExpertLayers, RouteShape
from roll.engine.slot_engine import SlotEngine

EXPERTS, CHOSEN = 8, 3
MANY = "more experts than a byte has numbers"


@cache
def known(name: str) -> PreTrainedModel:
    """Not to be changed: tests share it."""
    if name != MANY:
        return mixture(name)
    options = {"num_experts": 300, "moe_intermediate_size": 16, "head_dim": 8, "num_experts_per_tok": CHOSEN}
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, **options))


@cache
def served(name: str) -> PreTrainedModel:
    return under_plans(known(name))


def plain_routes(name: str, ids: NDArray[Any]) -> Routes:
    """By the model's own code, over all tokens at once: [tokens, layers · chosen]."""
    model, found = known(name), list[torch.Tensor]()
    layers: Any = model.get_decoder().layers
    gates = [layer.mlp.gate for layer in layers if hasattr(layer.mlp, "experts")]
    hooks = [gate.register_forward_hook(lambda _, __, output: found.append(output[2])) for gate in gates]
    with torch.inference_mode():
        model(torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.cat(found, dim=1).numpy()


def by_layer(routes: NDArray[Any]) -> list[list[list[int]]]:
    """In the order of experts: routers may name the same ones in any."""
    return np.sort(routes.reshape(len(routes), routes.shape[1] // CHOSEN, CHOSEN), axis=2).tolist()


def assert_recorded(name: str, request: Request, done: Completion) -> None:
    """From where it was asked for to the last token but one."""
    whole = np.concatenate([request.ids, done.ids])
    assert done.routes is not None
    assert request.routes_from is not None
    assert len(done.routes) == len(whole) - 1 - request.routes_from
    assert by_layer(done.routes) == by_layer(plain_routes(name, whole)[request.routes_from : -1])


def ask(id: str, prompt: IntArray, new: int = 6, *, routes_from: int | None = 0, **sampling: Any) -> Request:
    return Request(id, prompt, SamplingParams(new, **sampling), routes_from=routes_from)


def slots(name: str, max_running: int = 4, *, exact: bool = False, kv_tokens: int = 0) -> SlotEngine:
    return SlotEngine(
        served(name),
        tokenizer(),
        max_running=max_running,
        exact=exact,
        kv_tokens=kv_tokens,
        records_routes=True,
    )


def engine_of(kind: str, name: str, max_running: int = 4, kv_tokens: int = 0) -> SlotEngine | PagedEngine:
    if kind not in ("paged", "cuda"):
        return slots(name, max_running, exact=kind == "exact", kv_tokens=kv_tokens)
    model = served(name) if kind == "paged" else on_gpu(name)
    return PagedEngine(model, tokenizer(), max_running=max_running, kv_tokens=kv_tokens, records_routes=True)


@cache
def on_gpu(name: str) -> PreTrainedModel:
    return under_plans(known(name)).to("cuda")


kinds = pytest.mark.parametrize("kind", ["slots", "exact", "paged", pytest.param("cuda", marks=pytest.mark.gpu)])


@kinds
@pytest.mark.parametrize("name", [*MIXTURES, MANY])
def test_routes_are_those_of_a_plain_pass(kind: str, name: str) -> None:
    """Siblings, beginnings in common, more requests than run at once, and slots that change their number and length."""
    rng = np.random.default_rng(3)
    first = random_ids(rng, 37)
    prompts = [first, first, first[:25], np.concatenate([first[:20], random_ids(rng, 9)]), random_ids(rng, 4)]
    requests = [ask(f"{i}", prompt, 3 + 2 * i, seed=i) for i, prompt in enumerate(prompts)]
    requests.append(ask("long", random_ids(rng, 90), 20, seed=9))
    finished = run(engine_of(kind, name, 3), requests)
    for each in requests:
        assert_recorded(name, each, finished[each.id])
    shape = RouteShape.of(served(name))
    assert shape is not None
    types = {done.routes.dtype for done in finished.values() if done.routes is not None}
    assert types == {np.dtype(np.uint16 if name == MANY else np.uint8)}
    layers = {"qwen3_moe": 3, "mixtral": 3}.get(name, 2)
    assert shape.bytes_per_token == layers * CHOSEN * (2 if name == MANY else 1)


@kinds
def test_every_turn_of_a_conversation_adds_the_routes_of_what_is_new(kind: str) -> None:
    rng = np.random.default_rng(5)
    engine, log = engine_of(kind, "qwen3_moe"), TokenLog()
    log.prompt(random_ids(rng, 30))
    for turn in range(4):
        if turn == 2:  # the window has moved on
            log.fork(np.concatenate([log.context[:20], random_ids(rng, 12)]))
        elif turn:
            log.observe(random_ids(rng, 5))
        request = ask("talk", log.context, 5, routes_from=log.routed_tokens, seed=turn)
        done = run(engine, [request])["talk"]
        assert_recorded("qwen3_moe", request, done)
        log.respond(done.ids, done.logprobs, done.versions, done.routes)
    routes = log.routes
    ends = [*np.flatnonzero(log.turn == -2) - 1, len(log) - 1]
    assert sorted(np.flatnonzero((routes == 255).all(axis=1))) == sorted(ends)
    assert engine.stats().shared_prompt_tokens > 0
    branch = log.context
    assert by_layer(routes[-len(branch) : -1]) == by_layer(plain_routes("qwen3_moe", branch)[:-1])


@kinds
def test_what_is_taken_off_an_engine_says_as_much_as_it_has(kind: str) -> None:
    """And goes on elsewhere with the rest."""
    prompt = random_ids(np.random.default_rng(7), 20)
    one, other = engine_of(kind, "qwen3_moe"), engine_of(kind, "qwen3_moe")
    whole = run(one, [ask("a", prompt, 9, seed=4)])["a"]
    one.add(ask("a", prompt, 9, seed=4))
    one.add(ask("waits", prompt, 9))
    for _ in range(4):
        one.step()
    part = one.abort("a")
    assert part is not None
    assert part.routes is not None
    assert 0 < len(part.ids) < 9
    known = len(part.routes)
    assert known == len(prompt) + len(part.ids) - 1
    rest = Request(
        "a", np.concatenate([prompt, part.ids]), SamplingParams(9 - len(part.ids), seed=4), len(part.ids), known
    )
    done = run(other, [rest])["a"]
    assert [*part.ids, *done.ids] == whole.ids.tolist()
    assert_recorded("qwen3_moe", rest, done)
    assert whole.routes is not None
    assert done.routes is not None
    assert by_layer(np.concatenate([part.routes, done.routes])) == by_layer(whole.routes)


@kinds
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_comes_and_goes(kind: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    stem = random_ids(rng, 40)
    engine = engine_of(kind, "qwen3_moe", 3, kv_tokens=data.draw(st.sampled_from([0, 96])))
    asked: dict[str, Request] = {}
    finished: dict[str, Completion] = {}
    for number in range(data.draw(st.integers(1, 8))):
        shared = data.draw(st.sampled_from([0, 8, 17, 40]))
        prompt = np.concatenate([stem[:shared], random_ids(rng, data.draw(st.integers(1, 12)))])
        new, start = data.draw(st.integers(1, 9)), data.draw(st.integers(0, len(prompt)))
        asked[f"{number}"] = ask(f"{number}", prompt, new, routes_from=start, seed=number)
        engine.add(asked[f"{number}"])
        for _ in range(data.draw(st.integers(0, 4))):
            finished.update((done.id, done) for done in engine.step())
    finished.update(run(engine))
    for id, request in asked.items():
        assert_recorded("qwen3_moe", request, finished[id])


@kinds
def test_nothing_is_recorded_where_nobody_asks_for_it(kind: str) -> None:
    prompt = random_ids(np.random.default_rng(1), 12)
    assert run(engine_of(kind, "qwen3_moe"), [ask("a", prompt, routes_from=None)])["a"].routes is None
    silent = make_engine(served("qwen3_moe"), tokenizer(), max_running=2, exact=kind == "exact")
    assert run(silent, [ask("a", prompt)])["a"].routes is None
    with pytest.raises(ValueError, match="has 12 tokens: there are no routes from number 13 on"):
        silent.add(ask("b", prompt, routes_from=13))


def test_a_sequence_that_gave_its_blocks_up_keeps_the_routes_it_drew_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be chosen when it is computed again: here every row that is computed for the second time goes to the
    last experts."""
    rng = np.random.default_rng(2)
    prompts = [random_ids(rng, 20) for _ in range(3)]
    requests = [ask(f"{i}", prompt, 30, seed=i) for i, prompt in enumerate(prompts)]
    plain = run(engine_of("paged", "qwen3_moe"), requests)
    tight = engine_of("paged", "qwen3_moe", kv_tokens=96)
    assert isinstance(tight, PagedEngine)
    seen: set[tuple[str, int]] = set()
    turned_rows: list[tuple[str, int]] = []
    keep = PagedPlan.store_routes

    def turned(plan: PagedPlan, routes: torch.Tensor) -> None:
        owners = [tight._sequence(slot).request.id for slot in plan.rows.slots.tolist()]
        spots = list(zip(owners, plan.rows.positions.tolist(), strict=True))
        again = torch.tensor([spot in seen for spot in spots])
        seen.update(spots)
        turned_rows.extend(spot for spot, is_again in zip(spots, again.tolist(), strict=True) if is_again)
        keep(plan, torch.where(again[:, None], EXPERTS - 1, routes))

    monkeypatch.setattr(PagedPlan, "store_routes", turned)
    found = run(tight, requests)
    assert tight._preemptions > 0
    assert len(turned_rows) > 0
    for each in requests:
        ours, expected = found[each.id], plain[each.id]
        assert ours.ids.tolist() == expected.ids.tolist()
        assert ours.routes is not None
        assert expected.routes is not None
        assert by_layer(ours.routes) == by_layer(expected.routes)


def test_rows_beyond_what_a_decoder_records_are_told_as_unknown() -> None:
    """A static buffer has a length."""
    engine = engine_of("paged", "qwen3_moe")
    assert isinstance(engine, PagedEngine)
    prompt, short = random_ids(np.random.default_rng(4), 30), torch.zeros(20, 9, dtype=torch.int32)

    class Short(PlainDecoder):
        def hidden(self, rows: StepInputs, last: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
            hidden = super().hidden(rows, last, plan)
            self.routes = short
            return hidden

    engine._kv_manager._cached_decoder = Short(served("qwen3_moe"), record_routes=True)
    routes = run(engine, [ask("a", prompt, 4)])["a"].routes
    assert routes is not None
    assert {tuple(row) for row in routes[:29].tolist()} == {(255,) * 9}, "more rows in a pass than the buffer has"
    assert {tuple(row) for row in routes[30:].tolist()} == {(0,) * 9}


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("qwen3_moe", (0, 1)),
        ("gpt_oss", (0, 1)),
        ("deepseek_v3", (1,)),
        ("glm4_moe", (1,)),
        ("llama", None),
        ("doge", None),
    ],
)
def test_layers_with_experts_are_found_without_weights(kind: str, layers: tuple[int, ...] | None) -> None:
    options = {"first_k_dense_replace": 1} if kind in ("deepseek_v3", "glm4_moe") else {}
    found = ExpertLayers.of(AutoConfig.for_model(kind, num_hidden_layers=2, **options))
    assert (found.numbers if found is not None else None) == layers


@pytest.mark.parametrize("kind", ["granitemoe", "llama4_text", "jamba", "jetmoe", "phimoe"])
def test_a_mixture_whose_routers_are_not_known_is_refused_with_what_to_write(kind: str) -> None:
    """Choices in another place, none, routers that are not found at all, or weights by a formula that is not known."""
    with pytest.raises(UserError, match=r"how \w+ sends tokens .* is not known: write rollout\.router_replay=false"):
        ExpertLayers.of(AutoConfig.for_model(kind, num_hidden_layers=2))


@pytest.mark.parametrize("kind", ["slots", "exact", "paged"])
def test_routes_of_what_older_weights_computed_stay_what_they_were(kind: str) -> None:
    model = under_plans(known("qwen3_moe"))
    how: Any = {"max_running": 2, "records_routes": True}
    engine = (
        PagedEngine(model, tokenizer(), **how)
        if kind == "paged"
        else SlotEngine(model, tokenizer(), exact=kind == "exact", **how)
    )
    request = ask("a", random_ids(np.random.default_rng(8), 20), 12, seed=2)
    engine.add(request)
    for _ in range(6):
        assert not engine.step()
    engine.settle()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    engine.set_version(1)
    done = run(engine)["a"]
    drawn = int((done.versions == 0).sum())
    assert 0 < drawn < 12
    whole = np.concatenate([request.ids, done.ids])
    assert done.routes is not None
    old = len(request.ids) + drawn - 1  # the last token of the old weights was computed by the new ones
    assert by_layer(done.routes[:old]) == by_layer(plain_routes("qwen3_moe", whole)[:old])
    assert by_layer(done.routes[old:]) != by_layer(plain_routes("qwen3_moe", whole)[old:-1])
