"""vLLM as an inference strategy: its engine in processes of its own, its client in this process's event loop.

Invariants: tokens sampled by weights that are not verified are never returned; every submitted request ends in exactly
one completion, or in the error of the engine's death; a token carries the version of the weights that sampled it. The
last holds because weights change only while the engine is paused and all tokens sampled before have arrived.

    pause ─► requests keep their state, no sampling ─► load weights into the workers ─► resume ─► probe ─► verified

The probe is a normal request, so others run beside it: their new tokens are withheld until the probe check has passed.
Stop strings are matched here, so that they mean the same as for the embedded engine.

`vllm_engine` starts an engine and builds its sampling parameters; `vllm_worker` is loaded by its workers.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.cluster.errors import WorkerDied
from roll.config.errors import RunError
from roll.data.routes import Routes
from roll.engine.request import Completion, Finish, Progress, Request
from roll.engine.routes import ExpertLayers
from roll.engine.slot_engine import EngineStats
from roll.engine.stop_strings import hits_stop_string
from roll.model.hf_state_dict import with_tied
from roll.strategy.infer.orphan_reaper import OrphanReaper, shield_sigint
from roll.strategy.infer.vllm_args import LEAST_TEMPERATURE
from roll.strategy.infer.vllm_engine import (
    VllmSettings,
    environment_of,
    probe_params,
    route_params,
    start,
    vllm_sampling_params,
)
from roll.strategy.offload import Residency
from roll.weight_sync.digest import digests
from roll.weight_sync.host_copy import HostCopy
from roll.weight_sync.layout import TensorSpec
from roll.weight_sync.merged_state_dict import published_tensors
from roll.weight_sync.stream import WeightManifest
from roll.weight_sync.weights import Weights, check_probe

T = TypeVar("T")

_CALL_TIMEOUT_S = 600.0
"""How long the engine may take to answer, for example to load weights."""
_POLL_S = 0.5
"""How often a waiting call checks that the engine is alive."""
_CLOSE_S = 1.0
_QUIET_ITERATIONS = 50
"""Iterations of the event loop without a new token after which all sampled tokens have arrived."""


@dataclass(eq=False)
class _Running:
    """A request and its tokens. The first `verified` tokens were sampled by verified weights."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    verified: int = 0
    salt: str = ""
    """Cache salt: only requests with the same salt share prefixes."""
    experts: NDArray[Any] | None = None
    """[tokens, layers, chosen] as reported by vLLM when the request ends, from `reported_from` on."""
    finish: Finish | None = None
    task: asyncio.Task[None] | None = None

    def completion(self, finish: Finish, layers: ExpertLayers | None) -> Completion:
        tokens = self.since(0)
        return Completion(tokens.id, tokens.ids, tokens.logprobs, tokens.versions, finish, self.routes(layers))

    @property
    def reported_from(self) -> int | None:
        """The first token whose experts are requested from vLLM: at least one prompt token must be included (0.24)."""
        start = self.request.routes_from
        return None if start is None else min(start, len(self.request.ids) - 1)

    def routes(self, layers: ExpertLayers | None) -> Routes | None:
        """Routes from `routes_from` on, without the last token's; None if vLLM has not reported any."""
        start, first = self.request.routes_from, self.reported_from
        if layers is None or self.experts is None or start is None or first is None:
            return None
        last = len(self.request.ids) + self.verified - 1
        return layers.routes(self.experts[start - first : last - first])

    def since(self, start: int) -> Progress:
        part = slice(start, self.verified)
        return Progress(
            self.request.id,
            start,
            np.array(self.ids[part], np.int32),
            np.array(self.logprobs[part], np.float32),
            np.array(self.versions[part], np.int32),
        )


class VllmStrategy:
    def __init__(self, tokenizer: Tokenizer, settings: VllmSettings, name: str = "the engine") -> None:
        """Starts the engine, within a running event loop. Returns once it can load weights. `name` is used in the error
        if it dies."""
        self._tokenizer = tokenizer
        self._name = name
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="roll-vllm-")
        self._reaper = OrphanReaper()
        try:
            with environment_of(settings, self._reaper.environment), shield_sigint():
                self._llm = start(settings, self._folder.name)
        except BaseException:
            self._reaper.close()
            raise
        self.context = int(self._llm.model_config.max_model_len)
        """Longest sequence it takes, in tokens."""
        self._vocab = int(self._llm.model_config.get_vocab_size())
        self._copy: HostCopy | None = None
        self._address: dict[str, Any] = {}
        """Where the engine's workers find the tensors in shared host memory."""
        self._served: int | None = None
        """The last verified version."""
        self._version = -1
        """The version that tokens are sampled with."""
        self._verified = False
        self._probing = False
        self._unverified: Weights | WeightManifest | None = None
        """Weights loaded while the engine was asleep: they are probed once it is awake."""
        self._paused = False
        self._level: Residency = "all"
        self._residency_gate = asyncio.Lock()
        """Held while the engine is being paused or its weights change."""
        self._salt = 0
        """Changes with the weights, so that requests share prefixes only under the same weights."""
        self._running: dict[str, _Running] = {}
        self._withheld: list[_Running] = []
        """Requests that ended while the current weights were being probed."""
        self._finished: list[Completion] = []
        self._changed = asyncio.Event()
        self._death: WorkerDied | None = None
        self._count = self._generated = self._computed = self._shared = 0

    # requests

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_serving(allow_paused=True)
        for request in requests:
            self._check(request)
            running = self._running[request.id] = _Running(request)
            running.task = asyncio.create_task(self._run_request(running))

    def _check(self, request: Request) -> None:
        request.check(self._running, self.context, self._vocab)
        if 0 < (temperature := request.sampling.temperature) < LEAST_TEMPERATURE:
            raise ValueError(
                f"request {request.id!r} asks for temperature {temperature:g}: vLLM samples at 0 or at "
                f"{LEAST_TEMPERATURE:g} and above"
            )

    async def results(self) -> list[Completion]:
        while True:
            if self._finished:
                finished, self._finished = self._finished, []
                return finished
            if not self._paused and not self._residency_gate.locked():
                self._check_serving()
                if not self._running:
                    return []
            self._check_alive()
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)

    def progress(self, reported: Mapping[str, int]) -> list[Progress]:
        found = [(running, reported.get(id, 0)) for id, running in self._running.items()]
        return [running.since(start) for running, start in found if running.verified > start]

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            if (running := self._running.get(id)) is not None:
                self._end(running, "abort")

    def _end(self, running: _Running, finish: Finish) -> None:
        """Ends the request with the tokens it has from verified weights."""
        self._running.pop(running.request.id)
        if running.task is not None:
            running.task.cancel()
        self._finished.append(running.completion(finish, self._settings.layers))
        self._changed.set()

    async def _run_request(self, running: _Running) -> None:
        """Runs a request in the engine until it ends or is cancelled."""
        self._count += 1
        running.salt = str(self._salt)
        prompt = {"prompt_token_ids": running.request.ids.tolist(), "cache_salt": running.salt}
        start = running.reported_from if self._settings.layers is not None else None
        params = vllm_sampling_params(running.request.sampling, len(running.request.ids), start)
        try:
            async with aclosing(self._llm.generate(prompt, params, f"{self._count}")) as outputs:
                async for output in outputs:
                    if self._append_output(running, output):
                        break
            if start is not None and running.experts is None and running.finish is not None:
                running.experts = await self._fetch_routes(running, start)
        except Exception as error:
            self._died(error)
            return
        if running.finish is None:
            self._died(RunError(f"it ended request {running.request.id!r} without a reason"))
        elif self._probing:
            self._withheld.append(running)
        else:
            running.task = None
            self._end(running, running.finish)

    async def _fetch_routes(self, running: _Running, start: int) -> Any:
        """The experts of a request that was ended here, at a stop string. vLLM reports experts only for requests it ends
        itself, so the tokens are submitted again as a prompt, most of which is in its prefix cache. None if the context
        leaves no token to sample after it."""
        self._count += 1
        ids = np.concatenate([running.request.ids, np.array(running.ids, np.int32)]).tolist()
        if len(ids) >= self.context:
            return None
        prompt = {"prompt_token_ids": ids, "cache_salt": running.salt}
        async with aclosing(self._llm.generate(prompt, route_params(start), f"{self._count}")) as outputs:
            return (await _last(outputs)).outputs[0].routed_experts

    def _append_output(self, running: _Running, output: Any) -> bool:
        """Adds newly sampled tokens. Returns whether the request has ended."""
        (sample,) = output.outputs
        if not running.ids:
            shared = output.num_cached_tokens or 0
            self._shared += shared
            self._computed += len(running.request.ids) - shared
        sampling = running.request.sampling
        for token, found in zip(sample.token_ids, sample.logprobs or (), strict=True):
            running.ids.append(token)
            running.logprobs.append(found[token].logprob)
            running.versions.append(self._version)
            self._generated += 1
            response_ids = running.request.response_ids
            if token not in sampling.stop_ids and hits_stop_string(
                self._tokenizer, running.ids, sampling.stop, response_ids
            ):
                running.finish = "stop"
                break
        if self._settings.layers is not None and sample.routed_experts is not None:
            running.experts = sample.routed_experts
        if not self._probing:
            running.verified = len(running.ids)
        if running.finish is None and sample.finish_reason in ("stop", "length"):
            running.finish = sample.finish_reason
        return running.finish is not None

    # pausing

    async def pause(self) -> None:
        self._paused = True
        async with self._residency_gate:
            await self._wait_until_idle()

    async def resume(self) -> None:
        self._paused = False
        async with self._residency_gate:
            await self._resume_generation()
        self._changed.set()

    async def _wait_until_idle(self) -> None:
        """Returns when the engine has stopped sampling and all sampled tokens have arrived.

        The engine acknowledges the pause after all tokens sampled before it, on the same channel; after that, only the
        event loop has to deliver them.
        """
        self._salt += 1  # requests submitted from now on may run with other weights
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
        seen, quiet = self._generated, 0
        while quiet < _QUIET_ITERATIONS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._generated == seen else 0
            seen = self._generated

    async def _resume_generation(self) -> None:
        if not self._paused and self._level == "all":
            await self._call(self._llm.resume_generation())

    # weights

    async def load_weights(self, weights: Weights) -> None:
        self._check_alive()
        self._verified = False
        tensors = published_tensors(weights.model)
        copy = self._copy or self._copy_of([TensorSpec.of(name, tensor) for name, tensor in tensors.items()])
        copy.fill(tensors)
        sent, arrived = digests(tensors), digests(copy.tensors)
        wrong = [name for name in sent if sent[name] != arrived[name]]
        if wrong:
            raise RunError(f"the engine's tensor {wrong[0]!r} is not the trainer's: version {weights.version} not loaded")
        await self._serve(weights)

    def begin_loading(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        self._check_alive()
        self._verified = False
        return self._copy_of(manifest.layout.tensors).tensors

    async def end_loading(self, manifest: WeightManifest) -> None:
        await self._serve(manifest)

    def _copy_of(self, specs: Sequence[TensorSpec]) -> HostCopy:
        """Host memory for the tensors, from which the engine's workers read them."""
        if self._copy is None or self._copy.specs != tuple(specs):
            self._copy = HostCopy(specs)
            tensors = self._copy.tensors
            untied = with_tied(self._settings.shape, tensors) if self._settings.untied else tensors
            self._address = self._copy.address(untied)
        return self._copy

    async def _serve(self, weights: Weights | WeightManifest) -> None:
        async with self._residency_gate:
            if self._level == "all":
                await self._wait_until_idle()
            await self._call(self._llm.collective_rpc("roll_load", kwargs=self._address))
            self._salt += 1
            self._version = weights.version
            self._unverified = weights
            if self._level == "all":
                await self._verify()

    async def _verify(self) -> None:
        """Verifies the loaded weights and serves them. If they are refused, aborts all requests without the tokens
        sampled with them."""
        weights, self._unverified = self._unverified, None
        if weights is None:
            return
        self._probing = True
        try:
            self._restart_unstarted()
            await self._call(self._llm.resume_generation())
            log_probs = await self._log_probs_of(weights.probe.tolist())
            check_probe(weights, log_probs, quantized=bool(self._settings.args.get("quantization")))
            self._verified, self._served = True, weights.version
        finally:
            self._probing = False
            withheld, self._withheld = self._withheld, []
            if self._verified:
                self._release_withheld(withheld)
            else:
                self.abort(list(self._running))
        if self._paused:
            await self._wait_until_idle()

    def _release_withheld(self, withheld: Sequence[_Running]) -> None:
        """Releases the tokens and finished requests of the probing period: their weights are now verified."""
        for running in self._running.values():
            running.verified = len(running.ids)
        for running in withheld:
            if self._running.get(running.request.id) is running:  # otherwise it was aborted in the meantime
                self._end(running, running.finish or "abort")

    def _restart_unstarted(self) -> None:
        """Restarts requests without tokens, so that they share no prefix computed with older weights."""
        for running in self._running.values():
            if not running.ids and running.task is not None:
                running.task.cancel()
                running.task = asyncio.create_task(self._run_request(running))

    async def _log_probs_of(self, ids: list[int]) -> Tensor:
        self._count += 1
        outputs = self._llm.generate({"prompt_token_ids": ids}, probe_params(), f"probe {self._count}")
        found = await self._call(_last(outputs))
        pairs = zip(ids[1:], found.prompt_logprobs[1:], strict=True)
        return torch.tensor([given[token].logprob for token, given in pairs])

    # lifecycle

    async def set_residency(self, level: Residency) -> None:
        if level != "all" and self._running:
            raise RunError(f"the engine cannot leave its device: {len(self._running)} requests are running")
        if not self._settings.sleeps or level == self._level:
            return
        async with self._residency_gate:
            before, self._level = self._level, level
            if level == "none":
                if before == "weights":  # vLLM can only put everything to sleep
                    await self._call(self._llm.wake_up())
                await self._call(self._llm.sleep(level=1))
            elif level == "weights":
                if before == "all":
                    await self._call(self._llm.sleep(level=1))
                await self._call(self._llm.wake_up(tags=["weights"]))
            else:
                await self._call(self._llm.wake_up(tags=["kv_cache"] if before == "weights" else None))
                if self._unverified is not None:
                    await self._verify()
                elif self._paused:
                    await self._wait_until_idle()

    def stats(self) -> EngineStats:
        self._check_serving(allow_paused=True)
        generating = [running for running in self._running.values() if running.ids]
        return EngineStats(
            waiting=len(self._running) - len(generating),
            running=len(generating),
            cached_tokens=sum(len(running.request.ids) + len(running.ids) for running in generating),
            generated_tokens=self._generated,
            decoded_rows=self._generated,
            computed_prompt_tokens=self._computed,
            shared_prompt_tokens=self._shared,
            steps=0,
        )

    async def close(self) -> None:
        for running in self._running.values():
            if running.task is not None:
                running.task.cancel()
        self._running.clear()
        self._llm.shutdown(timeout=_CLOSE_S)
        self._llm = None
        self._reaper.close()
        if self._copy is not None:
            self._copy.close()
        self._folder.cleanup()

    def _check_serving(self, allow_paused: bool = False) -> None:
        """Raises if nothing may be served. With `allow_paused`, a paused engine may still be waiting for its weights."""
        self._check_alive()
        if self._served is None:
            raise RunError("the engine has no weights yet: publish a version before generating")
        if not self._verified and not (allow_paused and self._paused):
            raise RunError(f"the engine's weights after version {self._served} were refused: publish again")

    def _check_alive(self) -> None:
        if self._death is None and self._llm.errored:
            self._died(RunError("its process ended"))
        if self._death is not None:
            raise self._death

    def _died(self, error: Exception) -> None:
        if self._death is None:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._death = WorkerDied(self._name, f"its vLLM engine failed: {reason}")
        self._changed.set()

    async def _call(self, call: Awaitable[T]) -> T:
        """Waits for the engine's answer; raises if the engine dies or does not answer in time."""
        task = asyncio.ensure_future(call)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                while not task.done():
                    await asyncio.wait({task}, timeout=_POLL_S)
                    if not task.done():
                        self._check_alive()
            return task.result()
        except TimeoutError:
            raise RunError(f"{self._name} has not answered for {_CALL_TIMEOUT_S:g} s") from None
        finally:
            task.cancel()


async def _last(outputs: Any) -> Any:
    """The last item of a stream."""
    last = None
    async for output in outputs:
        last = output
    return last
