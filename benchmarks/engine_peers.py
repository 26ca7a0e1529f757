"""Other engines of the engine's benchmark: `transformers.generate`, and vLLM in a process of its own.

Run as a program, this is vLLM's process: it imports nothing of ROLL, so that any interpreter that has vLLM can run it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_work import Outcome, Workload, read_clock

BATCHES = 4
"""Into so many batches, sorted by length, the requests go in `generate`'s best case."""
START_S = 1800


class Generate:
    """Static batches. Only tokens that were asked for count; no log-probs are returned."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ways: dict[str, dict[int, float]] = {}

    def run(self, work: Workload) -> Outcome:
        """The better of one batch of all requests as they come and a few batches sorted by length; once it is known which
        that is, only this one."""
        best = self._ways.setdefault(work.name, {})
        ways = [min(best, key=lambda way: best[way])] if best else [1, BATCHES]
        outcomes = {way: self._run(work, way) for way in ways}
        best.update({way: outcome.seconds for way, outcome in outcomes.items()})
        return min(outcomes.values(), key=lambda outcome: outcome.seconds)

    def _run(self, work: Workload, batches: int) -> Outcome:
        order = sorted(range(len(work.prompts)), key=lambda i: work.new_tokens[i] if batches > 1 else 0)
        size = -(-len(order) // batches)
        started, clock = time.perf_counter(), _Clock()
        began = read_clock(work.clock)
        first: list[float] = []
        peak = 0
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            before = len(clock.times)
            longest = max(work.new_tokens[i] for i in batch)
            self._generate([work.prompts[i] for i in batch], longest, clock)
            first += [clock.times[before] - started] * len(batch)
            peak = max(peak, len(batch) * (len(work.prompts[0]) + longest))
        return Outcome(read_clock(work.clock) - began, clock.steps_s(started), first, peak)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], new_tokens: int, clock: _Clock) -> None:
        ids = torch.tensor(prompts, device=self._model.device)
        count = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "pad_token_id": 0, "eos_token_id": None}
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, streamer=clock, **count
        )
        assert out.shape[1] == ids.shape[1] + new_tokens


class _Clock:
    """Takes the time of every step of `generate`, which hands it each step's tokens, and before them the prompts."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: object) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        self._prompt = True

    def steps_s(self, started: float) -> list[float]:
        return [b - a for a, b in pairwise([started, *self.times])]


def vllm_python(asked: str | None) -> str | None:
    """An interpreter that has vLLM: the one that was asked for, or this one; None, and why, if it has not."""
    if asked or importlib.util.find_spec("vllm"):
        return asked or sys.executable
    print("vLLM is not here: --vllm-python names an interpreter that has it", file=sys.stderr)
    return None


class Vllm:
    """vLLM behind a socket: it keeps its weights and stays warm between runs, which take turns with other engines."""

    def __init__(self, python: str, options: dict[str, Any], threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "door")
        environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        if options.pop("device") == "cpu":
            cores = f"0-{threads - 1}" if threads > 1 else "0"
            environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, **environment}
        with Listener(address) as listener:
            self._process = subprocess.Popen([python, __file__, address], env=environment, stdout=sys.stderr)
            self._door = listener.accept()
        self._door.send(options)
        self._answer(START_S)

    def run(self, work: Workload) -> Outcome:
        self._door.send(work)
        answer = self._answer(START_S)
        assert isinstance(answer, Outcome)
        return answer

    def close(self) -> None:
        self._door.close()
        self._process.wait(60)
        self._folder.cleanup()

    def _answer(self, limit_s: float) -> object:
        if not self._door.poll(limit_s):
            self._process.kill()
            raise TimeoutError(f"vLLM did not answer in {limit_s} s")
        return self._door.recv()


def serve_vllm(door: Connection) -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = {"skip_tokenizer_init": True, "disable_log_stats": False, "max_logprobs": 1, **door.recv()}
    llm = LLM(**options)
    door.send("ready")
    while True:
        try:
            work: Workload = door.recv()
        except EOFError:
            return
        engine = llm.llm_engine
        started, began = time.perf_counter(), read_clock(work.clock, descendants=True)
        for number, (prompt, new) in enumerate(zip(work.prompts, work.new_tokens, strict=True)):
            sampling = SamplingParams(
                temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        times, first, tokens = [started], [], 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
                    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
                    first.append(float(getattr(output.metrics, "first_token_latency", float("nan"))))
            times.append(time.perf_counter())
        assert tokens == work.tokens, f"vLLM made {tokens} of {work.tokens} tokens"
        steps = [b - a for a, b in pairwise(times)]
        spent = read_clock(work.clock, descendants=True) - began
        door.send(Outcome(spent, steps, first, None))


if __name__ == "__main__":
    # Under its own name, so that what it sends is of classes the other end knows.
    from engine_peers import serve_vllm as serve

    serve(Client(sys.argv[1]))
