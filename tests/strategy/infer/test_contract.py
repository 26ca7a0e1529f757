"""What every engine keeps to, whichever it is. One engine serves all tests of its kind, in the order they stand here."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import (
    CONTEXT,
    DEVICE,
    ENGINES,
    TOKENIZER,
    Served,
    flat_model,
    logits_after,
    model,
    plain,
    request,
    resumed,
    trainers_log_probs,
)
from transformers import DynamicCache, LlamaForCausalLM

from roll.cluster.errors import WorkerDied
from roll.config.errors import RunError
from roll.engine.request import Completion, Request
from roll.engine.sampling import truncate
from roll.weight_sync.stream import Receiver, Sender
from roll.weight_sync.weights import Weights, named_tensors

FIRST, SECOND, FLAT = model(1), model(2), flat_model()
NEAR = 1e-4
"""Most that fp32 log-probs of the same weights differ by."""
LONG = [4 + i * 7 % 90 for i in range(300)]
"""A prompt of more than one block of any engine's cache."""


@pytest.fixture(scope="module", params=ENGINES)
def fresh(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served.start(request.param)
    yield served
    served.close()


@pytest.fixture
def served(fresh: Served) -> Served:
    """With the weights of `FIRST`, and nothing running."""
    fresh.run(fresh.publish(FIRST))
    return fresh


def tokens(done: Completion) -> list[int]:
    ids: list[int] = done.ids.tolist()
    return ids


def longest_difference(one: object, other: object) -> float:
    return float((torch.as_tensor(one) - torch.as_tensor(other)).abs().max())


def near(served: Served, asked: Request, done: Completion) -> bool:
    """Whether the log-probs of what was drawn are those of the trainer as it is now."""
    return longest_difference(done.logprobs, trainers_log_probs(served.trainer, asked, done)) <= NEAR


# weights


def test_nothing_is_served_before_weights_were_published(fresh: Served) -> None:
    with pytest.raises(RunError, match="no weights yet"):
        fresh.engine.submit([request("a")])
    with pytest.raises(RunError, match="no weights yet"):
        fresh.run(fresh.engine.results())
    assert fresh.engine.progress({}) == []


def test_weights_that_fail_the_probe_are_not_served_until_others_are_verified(served: Served) -> None:
    async def main() -> None:
        served.engine.submit([request("early", 400)])
        await served.until_drawn("early", 3)
        good = served.trainer.weights(served.version + 1)
        tampered: Weights = replace(good, log_probs=good.log_probs - 0.1)
        with pytest.raises(RunError, match=f"at version {served.version + 1} the log-probs of the probe prompt differ"):
            await served.engine.load_weights(tampered)
        with pytest.raises(RunError, match=f"after version {served.version} were refused"):
            served.engine.submit([request("late")])
        served.engine.abort(["early"])
        (early,) = await served.engine.results()
        assert set(early.versions.tolist()) == {served.version}
        await served.publish(SECOND)
        done = await served.generate(request("late"))
        assert done["late"].versions.tolist() == [served.version] * 8

    served.run(main())


def test_weights_come_from_elsewhere_by_version_and_digest(served: Served) -> None:
    async def main() -> None:
        served.change(SECOND)
        engine = served.kind.receiving(served.engine)
        weights = served.trainer.weights(41)
        sender = Sender(named_tensors(served.trainer.model), 1 << 14)
        manifest = sender.manifest(41, weights.probe, weights.log_probs)
        tensors = engine.begin_loading(manifest)
        receiver = Receiver(tensors)
        receiver.begin(manifest, sender.open("shared_memory"))
        for bucket in range(len(manifest.layout.buckets)):
            sender.write(bucket)
            receiver.load(bucket)
        damaged = tensors["model.layers.1.mlp.up_proj.weight"]
        damaged.data[3, 4] += 1
        assert receiver.finish() == ["model.layers.1.mlp.up_proj.weight"]
        damaged.data[3, 4] -= 1
        damaged.data.copy_(named_tensors(served.trainer.model)["model.layers.1.mlp.up_proj.weight"])
        assert receiver.finish() == []
        await engine.end_loading(manifest)
        receiver.close()
        sender.close()
        asked = request("a", 12)
        engine.submit([asked])
        (done,) = await engine.results()
        assert done.versions.tolist() == [41] * 12
        assert near(served, asked, done)

    served.run(main())


@pytest.mark.parametrize("paused", [True, False])
def test_what_goes_on_under_new_weights_is_drawn_by_them_and_keeps_what_it_had(served: Served, paused: bool) -> None:
    async def main() -> None:
        asked = request("a", 60)
        served.engine.submit([asked])
        await served.until_drawn("a", 5)
        if paused:
            await served.engine.pause()
        (told,) = served.engine.progress({})
        await served.publish(SECOND)
        await served.engine.resume()
        done = (await served.drain())["a"]
        before = done.versions.tolist().count(served.version - 1)
        assert done.versions.tolist() == [served.version - 1] * before + [served.version] * (60 - before)
        assert before == len(told.ids) if paused else len(told.ids) <= before < 60
        assert tokens(done)[: len(told.ids)] == told.ids.tolist()
        expected = continued(FIRST, SECOND, asked.ids.tolist(), tokens(done), before)
        assert longest_difference(done.logprobs, expected) <= NEAR

    served.run(main())


@torch.no_grad()
def continued(
    old: LlamaForCausalLM, new: LlamaForCausalLM, prompt: list[int], drawn: list[int], before: int
) -> torch.Tensor:
    """Log-probs of what is drawn where the weights change after `before` tokens, over the keys and values of the old."""
    old, new = plain(old), plain(new)
    cache = DynamicCache(config=old.config)
    ids = torch.tensor([[*prompt, *drawn]], device=DEVICE)
    edge = len(prompt) + before - 1  # the last token before the change is computed after it
    first = old(ids[:, :edge], past_key_values=cache).logits[0]
    second = new(ids[:, edge:-1], past_key_values=cache).logits[0]
    logits = torch.cat([first, second])[len(prompt) - 1 :].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def test_an_aborted_request_goes_on_from_its_prefix_under_new_weights(served: Served) -> None:
    async def main() -> None:
        asked = request("a", 60)
        served.engine.submit([asked])
        await served.until_drawn("a", 5)
        await served.engine.pause()
        served.engine.abort(["a"])
        (first,) = await served.engine.results()
        assert first.finish == "abort"
        assert len(first.logprobs) == len(first.versions) == len(first.ids) >= 5
        assert near(served, asked, first)
        await served.publish(SECOND)
        rest = resumed(asked, first)
        served.engine.submit([rest])
        await served.engine.resume()
        second = (await served.drain())["a"]
        assert second.versions.tolist() == [served.version] * (60 - len(first.ids))
        assert near(served, rest, second)

    served.run(main())


def test_no_prefix_is_shared_between_versions(served: Served) -> None:
    """Nor by those that came in a pause before the weights, or that were waiting then."""

    async def main() -> None:
        assert near(served, request("old", 4, LONG), (await served.generate(request("old", 4, LONG)))["old"])
        crowd = [request(f"crowd {i}", 40, seed=i) for i in range(12)]
        served.engine.submit([*crowd, request("waiting", 4, LONG)])
        await served.until_drawn("crowd 0", 2)
        await served.engine.pause()
        served.engine.submit([request("paused", 4, LONG)])
        await served.publish(SECOND)
        served.engine.submit([request("new", 4, LONG)])
        await served.engine.resume()
        done = await served.drain()
        for id in ("waiting", "paused", "new"):
            assert done[id].versions.tolist() == [served.version] * 4
            assert near(served, request(id, 4, LONG), done[id])

    served.run(main())


# what is drawn


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6, 0.0])
def test_log_probs_are_the_trainers(served: Served, temperature: float) -> None:
    """Under softmax(logits / temperature) of all tokens; at temperature 0 under softmax(logits)."""
    asked = [request(str(n), 30, [5 + n] * (3 + 11 * n), temperature=temperature, seed=n) for n in range(6)]
    done = served.run(served.generate(*asked))
    worst = max(longest_difference(done[a.id].logprobs, trainers_log_probs(served.trainer, a, done[a.id])) for a in asked)
    print(f"temperature {temperature}: log-probs differ from the trainer's by at most {worst:.1e}")
    assert worst <= NEAR
    if temperature == 0:
        for a in asked:
            assert tokens(done[a.id]) == logits_after(FIRST, a.ids.tolist(), tokens(done[a.id])).argmax(-1).tolist()


def test_requests_of_all_temperatures_run_together(served: Served) -> None:
    asked = [request(f"{t}", 20, temperature=t, seed=3) for t in (0.0, 0.5, 1.0, 2.0)]
    done = served.run(served.generate(*asked))
    for each in asked:
        assert near(served, each, done[each.id])


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(3, 1.0, 1.0), (0, 0.4, 1.3), (5, 0.7, 0.8), (1, 1.0, 1.0)])
def test_truncated_sampling_draws_from_the_truncated_distribution_and_says_its_log_probs(
    served: Served, top_k: int, top_p: float, temperature: float
) -> None:
    settings = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    asked = [request(str(n), 25, seed=n, **settings) for n in range(4)]
    done = served.run(served.generate(*asked))
    for each in asked:
        drawn = tokens(done[each.id])
        logits = logits_after(FIRST, each.ids.tolist(), drawn) / temperature
        kept = torch.stack([truncate(row, top_k, top_p) for row in logits])
        expected = torch.log_softmax(kept, -1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
        assert longest_difference(done[each.id].logprobs, expected) <= NEAR


def test_the_same_seed_draws_the_same_and_another_another(served: Served) -> None:
    async def main() -> None:
        await served.publish(FLAT)
        one = await served.generate(request("a", 30, seed=1), request("b", 30, seed=2))
        two = await served.generate(request("c", 30, seed=1))
        assert tokens(one["a"]) == tokens(two["c"]) != tokens(one["b"])
        assert len(set(tokens(one["a"]))) > 10

    served.run(main())


def test_a_request_resumed_from_its_prefix_goes_on_and_repeats_no_noise(served: Served) -> None:
    async def main() -> None:
        await served.publish(FLAT)
        asked = request("a", 40, seed=5)
        whole = (await served.generate(asked))["a"]
        part = Completion("a", whole.ids[:17], whole.logprobs[:17], whole.versions[:17], "abort")
        rest = (await served.generate(resumed(asked, part)))["a"]
        again = (await served.generate(resumed(asked, part)))["a"]
        assert len(rest.ids) == 40 - 17
        assert tokens(rest) == tokens(again)
        assert tokens(rest)[:17] != tokens(whole)[:17]
        if served.kind.same_noise:
            assert tokens(rest) == tokens(whole)[17:]

    served.run(main())


def test_a_greedy_request_resumed_from_its_prefix_gives_the_same_tokens(served: Served) -> None:
    async def main() -> None:
        asked = request("a", 40, temperature=0.0)
        whole = (await served.generate(asked))["a"]
        for cut in (1, 13, 39):
            part = Completion("a", whole.ids[:cut], whole.logprobs[:cut], whole.versions[:cut], "abort")
            rest = (await served.generate(resumed(asked, part)))["a"]
            assert tokens(rest) == tokens(whole)[cut:]
            assert longest_difference(rest.logprobs, whole.logprobs[cut:]) <= NEAR

    served.run(main())


# how it ends


def test_a_response_ends_at_its_length(served: Served) -> None:
    done = served.run(served.generate(request("one", 1), request("ten", 10)))
    assert {id: (len(each.ids), each.finish) for id, each in done.items()} == {
        "one": (1, "length"),
        "ten": (10, "length"),
    }


def test_stop_ids_end_a_response_and_stay_in_it(served: Served) -> None:
    async def main() -> None:
        whole = tokens((await served.generate(request("a", 40, temperature=0.0)))["a"])
        ends = tuple({whole[6], whole[11]})
        first = min(whole.index(end) for end in ends)
        done = (await served.generate(request("a", 40, temperature=0.0, stop_ids=ends)))["a"]
        assert (tokens(done), done.finish) == (whole[: first + 1], "stop")
        assert len(done.logprobs) == len(done.versions) == first + 1

    served.run(main())


def test_the_models_own_end_is_no_end_unless_the_request_says_so(served: Served) -> None:
    async def main() -> None:
        await served.publish(FLAT)
        end = served.trainer.model.config.eos_token_id
        done = await served.generate(*(request(str(n), 200, seed=n) for n in range(4)))
        assert any(end in tokens(each) for each in done.values())
        assert {each.finish for each in done.values()} == {"length"}

    served.run(main())


def test_stop_strings_end_a_response_with_the_token_that_completes_them(served: Served) -> None:
    async def main() -> None:
        whole = tokens((await served.generate(request("a", 40, temperature=0.0)))["a"])
        text = TOKENIZER.decode(whole[9:12])
        expected = next(n for n in range(40) if text in TOKENIZER.decode(whole[: n + 1]))
        done = (await served.generate(request("a", 40, temperature=0.0, stop=("no such text", text))))["a"]
        assert (tokens(done), done.finish) == (whole[: expected + 1], "stop")
        assert len(done.logprobs) == len(done.versions) == expected + 1

    served.run(main())


def test_stop_strings_are_seen_across_a_cut_and_at_the_last_token(served: Served) -> None:
    async def main() -> None:
        whole = tokens((await served.generate(request("a", 40, temperature=0.0)))["a"])
        text = TOKENIZER.decode(whole[9:12])
        end = next(n for n in range(1, 41) if text in TOKENIZER.decode(whole[:n]))
        last = (await served.generate(request("a", end, temperature=0.0, stop=(text,))))["a"]
        assert (tokens(last), last.finish) == (whole[:end], "stop")
        asked = request("a", 40, temperature=0.0, stop=(text,))
        for cut in (end - 2, end - 1):
            part = Completion("a", last.ids[:cut], last.logprobs[:cut], last.versions[:cut], "abort")
            rest = (await served.generate(resumed(asked, part)))["a"]
            assert (tokens(rest), rest.finish) == (whole[cut:end], "stop")

    served.run(main())


# requests come and go


def test_a_request_that_can_never_run_is_refused_by_name(served: Served) -> None:
    async def main() -> None:
        for bad in (
            request("far too long", CONTEXT),
            request("far too long", 4, [7] * CONTEXT),
            request("far too long", 0),
            request("far too long", 4, []),
        ):
            with pytest.raises(ValueError, match="'far too long'"):
                served.engine.submit([bad])
        served.engine.submit([request("twice")])
        with pytest.raises(ValueError, match="'twice' is here already"):
            served.engine.submit([request("twice")])
        assert (await served.drain()).keys() == {"twice"}
        longest = await served.generate(request("a", 2, [7] * (CONTEXT - 2)))
        assert len(longest["a"].ids) == 2

    served.run(main())


def test_results_come_as_requests_finish(served: Served) -> None:
    async def main() -> None:
        served.engine.submit([request("long", 300), request("short", 2), request("middle", 60)])
        order: list[str] = []
        while results := await served.engine.results():
            order += [done.id for done in results]
        assert order == ["short", "middle", "long"]
        assert await served.engine.results() == []

    served.run(main())


def test_aborted_requests_arrive_with_what_they_have(served: Served) -> None:
    async def main() -> None:
        running = [request(f"running {i}", 300, seed=i) for i in range(8)]
        served.engine.submit([*running, request("waiting", 300)])
        await served.until_drawn("running 0", 4)
        served.engine.abort(["waiting", "running 0", "nobody"])
        done = {each.id: each for each in await served.engine.results()}
        while len(done) < 2:
            done |= {each.id: each for each in await served.engine.results()}
        assert {id: each.finish for id, each in done.items()} == {"running 0": "abort", "waiting": "abort"}
        assert 4 <= len(done["running 0"].ids) < 300
        assert (
            longest_difference(
                done["running 0"].logprobs, trainers_log_probs(served.trainer, running[0], done["running 0"])
            )
            <= NEAR
        )
        assert len(done["waiting"].ids) == 0
        served.engine.submit([request("running 0", 3)])  # the name is free at once
        rest = await served.drain()
        assert len(rest["running 0"].ids) == 3
        assert len(rest) == 8
        served.engine.abort(["running 0"])
        assert await served.engine.results() == []

    served.run(main())


def test_a_pause_stops_drawing_and_loses_nothing(served: Served) -> None:
    async def main() -> None:
        asked = request("a", 200, temperature=0.0)
        whole = (await served.generate(asked))["a"]
        served.engine.submit([asked])
        await served.until_drawn("a", 4)
        await served.engine.pause()
        drawn = len(served.engine.progress({})[0].ids)
        assert drawn < 200
        waiting = asyncio.ensure_future(served.engine.results())
        served.engine.submit([request("in the pause", 5)])
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert [(each.id, len(each.ids)) for each in served.engine.progress({})] == [("a", drawn)]
        await served.engine.resume()
        done = {each.id: each for each in await waiting} | await served.drain()
        assert tokens(done["a"]) == tokens(whole)
        assert len(done["in the pause"].ids) == 5

    served.run(main())


def test_what_was_aborted_in_a_pause_arrives_before_it_ends(served: Served) -> None:
    async def main() -> None:
        served.engine.submit([request("a", 300), request("b", 300, seed=1)])
        await served.until_drawn("a", 4)
        await served.engine.pause()
        served.engine.abort(["a"])
        (done,) = await served.engine.results()
        assert (done.id, done.finish) == ("a", "abort")
        await served.engine.resume()
        assert [(each.id, each.finish) for each in (await served.drain()).values()] == [("b", "length")]

    served.run(main())


def test_progress_is_told_beyond_what_was_heard(served: Served) -> None:
    async def main() -> None:
        served.engine.submit([request("a", 120, seed=4)])
        heard = await served.until_drawn("a", 3)
        (told,) = served.engine.progress({})
        assert (told.id, told.start) == ("a", 0)
        assert len(told.ids) == len(told.logprobs) == len(told.versions) >= heard
        await served.until_drawn("a", len(told.ids) + 3)
        await served.engine.pause()
        (more,) = served.engine.progress({"a": len(told.ids)})
        assert more.start == len(told.ids)
        assert served.engine.progress({"a": more.start + len(more.ids)}) == []
        await served.engine.resume()
        done = (await served.drain())["a"]
        assert tokens(done)[: more.start + len(more.ids)] == [*told.ids.tolist(), *more.ids.tolist()]
        assert served.engine.progress({}) == []

    served.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_requests_enter_and_leave_in_any_order_and_each_ends_once(served: Served, seed: int) -> None:
    async def main() -> None:
        dice = random.Random(seed)
        ended: list[str] = []
        submitted = 0
        closing = False

        async def collect() -> None:
            while not (closing and len(ended) >= submitted):
                ended.extend(done.id for done in await served.engine.results())
                await asyncio.sleep(0)

        collector = asyncio.ensure_future(collect())
        for _ in range(40):
            action = dice.choice(["submit", "submit", "abort", "wait", "pause", "resume", "publish"])
            if action == "submit":
                count = dice.randint(1, 4)
                served.engine.submit([request(str(submitted + i), dice.randint(1, 40), seed=i) for i in range(count)])
                submitted += count
            elif action == "abort":
                served.engine.abort([str(dice.randint(0, submitted + 1)), str(dice.randint(0, submitted + 1))])
            elif action == "wait":
                await asyncio.sleep(dice.random() * 0.02)
            elif action == "publish":
                await served.engine.pause()
                await served.publish(dice.choice([FIRST, SECOND]))
                await served.engine.resume()
            elif action == "pause":
                await served.engine.pause()
            else:
                await served.engine.resume()
        await served.engine.resume()
        closing = True
        await collector
        assert sorted(ended, key=int) == [str(i) for i in range(submitted)]

    served.run(main())


def test_many_requests_on_a_small_cache_all_finish(served: Served) -> None:
    asked = [request(str(n), 1 + n % 7, [5 + n % 40] * (1 + 7 * (n % 50)), seed=n) for n in range(served.kind.many)]
    done = served.run(served.generate(*asked))
    assert {id: len(each.ids) for id, each in done.items()} == {a.id: a.sampling.max_new_tokens for a in asked}


def test_it_says_how_full_it_is(served: Served) -> None:
    async def main() -> None:
        before = served.engine.stats()
        assert (before.running, before.waiting) == (0, 0)
        served.engine.submit([request(str(n), 200, seed=n) for n in range(20)])
        await served.until_drawn("0", 5)
        now = served.engine.stats()
        assert now.running + now.waiting == 20
        assert 1 <= now.running <= 8
        assert now.cached_tokens >= 3 + 4
        served.engine.abort([str(n) for n in range(20)])
        await served.drain()
        after = served.engine.stats()
        assert (after.running, after.waiting) == (0, 0)
        assert after.generated_tokens > before.generated_tokens

    served.run(main())


def test_one_that_runs_something_does_not_leave_its_device_and_an_idle_one_comes_back_as_it_was(served: Served) -> None:
    async def main() -> None:
        asked = request("a", 20, temperature=0.0)
        served.engine.submit([request("running", 200)])
        await served.until_drawn("running", 2)
        with pytest.raises(RunError, match="running"):
            await served.engine.set_residency("weights")
        served.engine.abort(["running"])
        await served.drain()
        before = await served.generate(asked)
        for levels in (["weights", "all"], ["none", "weights", "all"], ["none", "all"]):
            for level in levels:
                await served.engine.set_residency(level)  # type: ignore[arg-type]
            assert tokens((await served.generate(asked))["a"]) == tokens(before["a"])

    served.run(main())


def test_weights_are_loaded_while_only_they_are_on_the_device(served: Served) -> None:
    async def main() -> None:
        await served.engine.set_residency("none")
        await served.engine.set_residency("weights")
        await served.publish(SECOND)
        await served.engine.set_residency("all")
        asked = request("a", 20)
        done = (await served.generate(asked))["a"]
        assert done.versions.tolist() == [served.version] * 20
        assert near(served, asked, done)

    served.run(main())


@pytest.mark.gpu
def test_one_that_leaves_its_device_frees_memory_and_takes_it_again(served: Served) -> None:
    if not served.kind.dies:
        pytest.skip("it has no memory of its own: the weights are the trainer's")

    async def main() -> None:
        def free() -> int:
            return torch.cuda.mem_get_info()[0]

        awake = free()
        await served.engine.set_residency("none")
        asleep = free()
        await served.engine.set_residency("all")
        assert asleep > awake
        assert free() < asleep

    served.run(main())


# the end


def test_its_death_reaches_all_who_wait_within_seconds(served: Served) -> None:
    if not served.kind.dies:
        pytest.skip("it lives in this process")

    async def main() -> None:
        served.engine.submit([request(str(n), 400, seed=n) for n in range(20)])
        await served.until_drawn("0", 2)
        waiting = asyncio.ensure_future(served.engine.results())
        for child in children():
            os.kill(child, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="failed"):
            await asyncio.wait_for(waiting, 20)
        with pytest.raises(WorkerDied):
            served.engine.submit([request("late")])
        with pytest.raises(WorkerDied):
            await served.publish(FIRST)
        with pytest.raises(WorkerDied):
            await served.engine.results()

    served.run(main())


def children() -> list[int]:
    """The processes of vLLM's engine that this one has started."""
    mine = []
    for task in Path("/proc/self/task").iterdir():
        mine += [int(pid) for pid in (task / "children").read_text().split()]
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in mine}
    # an engine names itself, unless its environment was changed before it could
    return [pid for pid, command in commands.items() if b"EngineCore" in command or b"spawn_main" in command]
