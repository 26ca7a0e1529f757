"""The sample runner: drives one sample from its task to its verdict, as a coroutine.

    queued → (acting: the environment begins) → generating ⇄ acting → scoring → scored

A task without an environment consists of one response and its score. If an engine dies or the controller requeues the
sample, the sample returns to `queued` with the tokens generated so far and resumes from them once it is assigned to an
engine again. Environment and grader calls have deadlines; a sample whose environment process crashes or hangs is
retried up to `rollout.max_attempts` times. The death of a reward or environment worker is no fault of the sample: it does
not count as a try, and the runner calls other workers for up to `rollout.deadline_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jinja2 import TemplateError

from roll.cluster import Cluster
from roll.cluster.errors import RemoteError
from roll.config.schema import Config, RolloutConfig
from roll.data.finite import check_reward
from roll.data.sample import Sample
from roll.data.task import Message, Response
from roll.data.tokenlog import NO_VERSION, TokenLog
from roll.engine.request import Request, RequestRejected, SamplingParams, seed_of
from roll.env import EnvFailure, ResetResult, Step
from roll.env.base import STATE
from roll.env.state_key import state_of
from roll.model.chat import ChatRenderer, Conversation, Tools
from roll.reward import ScoreFailure, Verdict
from roll.rollout.early_stop import EarlyStop, RunningResponse
from roll.rollout.engine_client import EngineClient, EngineDied, PartialResponse, Watch
from roll.rollout.lifecycle import Lifecycle
from roll.rollout.messages import EngineAssignment, SampleCommand
from roll.workers.env import EnvWorker
from roll.workers.reward import RewardWorker

R = TypeVar("R")

_WAIT_S = (0.1, 5.0)
"""First and longest wait before the runner calls a worker again after a reward or environment worker died."""


class _AttemptFailed(Exception):
    """This attempt at the sample failed. `retry`: the sample may be tried again, which counts as a try; `worker_died`:
    the sample's environment worker died, and trying again does not count; `kill`: the sample's share of the blame for a
    crashed or hung process, 1 if no other sample was in it."""

    def __init__(self, reason: str, *, retry: bool = False, worker_died: bool = False, kill: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry
        self.worker_died = worker_died
        self.kill = kill


class _Backoff:
    """Exponential back-off while dead workers are restarted, until `deadline_s` after the first wait."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._end_s: float | None = None
        self._wait_s = _WAIT_S[0]

    async def wait(self) -> bool:
        """Sleeps, then returns True if another attempt may start. Returns False at once after the deadline."""
        now_s = asyncio.get_running_loop().time()
        if self._end_s is None:
            self._end_s = now_s + self._deadline_s
        if now_s > self._end_s:
            return False
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, _WAIT_S[1])
        return True


@dataclass
class Backends:
    """The Reward Workers and Environment Workers that samples use. Replaced as a whole after a worker was restarted."""

    rewards: Cluster[RewardWorker]
    environments: Cluster[EnvWorker] | None = None


class EngineAssignments:
    """The engine of each sample of a rollout worker, as assigned by the controller: the worker stores the assignments,
    and the runner waits for them. Invariant: a sample generates only on its latest assignment; a sample without one waits
    for the next."""

    def __init__(self) -> None:
        self._assigned: dict[str, EngineAssignment] = {}
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._revoked: set[str] = set()

    def assign(self, assignment: EngineAssignment) -> None:
        self._revoked.discard(assignment.sample)
        self._assigned[assignment.sample] = assignment
        waiter = self._waiters.get(assignment.sample)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def engine(self, sample: str) -> int | None:
        """The engine that a sample is assigned to, or None."""
        assignment = self._assigned.get(sample)
        return None if assignment is None else assignment.engine

    def remove(self, sample: str) -> None:
        self._assigned.pop(sample, None)
        self._revoked.discard(sample)

    def revoke(self, sample: str) -> None:
        """Removes the assignment of a sample that is not generating; it must request a new one before its next turn."""
        if self._assigned.pop(sample, None) is not None:
            self._revoked.add(sample)

    def needs_assignment(self, sample: str) -> bool:
        """Whether `revoke` removed the sample's assignment. Resets the flag."""
        if sample not in self._revoked:
            return False
        self._revoked.discard(sample)
        return True

    async def wait_for(self, sample: str, deadline_s: float) -> EngineAssignment:
        """The sample's assignment. Waits for one for up to `deadline_s`, then raises `TimeoutError`."""
        if (assignment := self._assigned.get(sample)) is not None:  # the common case
            return assignment
        async with asyncio.timeout(deadline_s):
            while sample not in self._assigned:
                self._waiters[sample] = asyncio.get_running_loop().create_future()
                try:
                    await self._waiters[sample]
                finally:
                    del self._waiters[sample]
        return self._assigned[sample]


class SampleRunner:
    """Drives samples. Invariants: `run` ends with the sample scored or failed, or is cancelled; it never raises for a
    fault of the sample; and no wait in it is unbounded."""

    def __init__(
        self,
        engines: EngineClient,
        backends: Backends,
        renderer: ChatRenderer,
        lifecycle: Lifecycle,
        assignments: EngineAssignments,
        config: Config,
        *,
        stop_ids: tuple[int, ...],
        context: int,
        worker: int = 0,
        early_stop: EarlyStop | None = None,
    ) -> None:
        """`context`: the model's context length in tokens; `worker`: rank of the rollout worker, at which the round-robin
        over reward and environment workers starts."""
        self._engines = engines
        self._backends = backends
        self._renderer = renderer
        self._lifecycle = lifecycle
        self._assignments = assignments
        self._sampling = training_sampling(config.rollout, stop_ids)
        self._domains = {
            domain: training_sampling(rollout, stop_ids) for domain, rollout in config.rollouts_by_domain.items()
        }
        self._config = config
        self._max_episode_tokens = min(config.env.max_tokens or context, context)
        """Longest conversation of an episode in tokens."""
        self._deadline_s = config.rollout.deadline_s
        self._assignment_deadline_s = config.ray.call_deadline_s
        self._worker = worker
        self._early_stop = early_stop
        self._next_worker = worker
        self._commands: dict[str, SampleCommand] = {}

    def reconnect(self, backends: Backends) -> None:
        self._backends = backends

    def stop(self, command: SampleCommand) -> None:
        """Ends or requeues a response that is being generated; has no effect on other samples."""
        if self._engines.has(command.sample):
            self._commands[command.sample] = command
            self._engines.end([command.sample])

    def is_generating(self, sample: Sample) -> bool:
        """Whether a request of the sample is in flight."""
        return self._engines.has(sample.id)

    async def run(self, sample: Sample, siblings: Sequence[Sample] = ()) -> None:
        """Drives a queued sample until it is scored or has failed; `siblings` are the samples of its group on this
        worker."""
        backoff = _Backoff(self._deadline_s)
        while True:
            try:
                await self._attempt(sample, siblings)
                return
            except _AttemptFailed as failure:
                sample.kills += failure.kill
                self._lifecycle.move(sample, "failed", failure.reason)
                if failure.worker_died:
                    # waits: until its deadline
                    if not await backoff.wait():
                        return
                elif failure.retry and sample.tries < self._config.rollout.max_attempts:
                    sample.tries += 1
                else:
                    return
            sample.log, sample.response, sample.turns, sample.ended = TokenLog(), None, 0, ""
            sample.turn_rewards, sample.turn_states = [], []
            self._assignments.remove(sample.id)
            self._lifecycle.move(sample, "queued", sample.reason, **{"try": sample.tries})

    async def _attempt(self, sample: Sample, siblings: Sequence[Sample]) -> None:
        if sample.task.environment is not None:
            await self._episode(sample, siblings)
            return
        conversation = self._open(sample, sample.task.messages)
        response = await self._respond(sample, conversation, self.sampling_of(sample), siblings)
        self._begin_scoring(sample, response)
        verdict = await self._verdict(sample, response)
        sample.reward, sample.parts, sample.answer = verdict.reward, verdict.parts, verdict.answer
        self._finish_scoring(sample)

    def _open(self, sample: Sample, messages: Sequence[Message], tools: Tools = ()) -> Conversation:
        try:
            return Conversation(self._renderer, messages, sample.log, tools=tools, window=self._config.env.window)
        except TemplateError as error:
            raise _AttemptFailed(f"the chat template refused the task: {error}") from None

    async def _respond(
        self, sample: Sample, conversation: Conversation, sampling: SamplingParams, siblings: Sequence[Sample]
    ) -> Response:
        """Generates the next response and appends it to the conversation."""
        try:
            partial, finish = await self._generate(sample, sampling, siblings)
        except RequestRejected as rejection:
            raise _AttemptFailed(str(rejection)) from None
        finally:
            command = self._commands.pop(sample.id, None)
        if finish != "ended":
            sample.ended = ""  # the response finished by itself before the early stop reached the engine
        elif command is not None:
            sample.ended = command.reason
        text = conversation.respond(partial.ids, partial.logprobs, partial.versions, partial.routes)
        sample.turns += 1
        return Response(text, partial.tokens, finish)

    def sampling_of(self, sample: Sample) -> SamplingParams:
        """The sampling parameters of a sample: those of its domain, with the sample's temperature and seed."""
        sampling = self._domains.get(sample.task.domain, self._sampling)
        return replace(sampling, temperature=sample.temperature, seed=seed_of(self._config.seed, sample.id))

    async def _generate(
        self, sample: Sample, sampling: SamplingParams, siblings: Sequence[Sample]
    ) -> tuple[PartialResponse, str]:
        """Generates a whole response, on several engines if needed; returns it and its finish reason. Time spent waiting
        for an engine does not count against `deadline_s`, because the trainer may hold the GPU."""
        prompt, partial, remaining_s = sample.log.context, PartialResponse(), self._deadline_s
        if sample.task.environment is not None:  # without one, the engine rejects a prompt that leaves no tokens free
            free_tokens = max(1, self._max_episode_tokens - len(prompt))
            if free_tokens < sampling.max_new_tokens:
                sampling = replace(sampling, max_new_tokens=free_tokens)
        while True:
            if sample.state == "acting" and self._assignments.needs_assignment(sample.id):
                self._lifecycle.move(sample, "queued", "its engine was taken away meanwhile")
            try:
                assignment = await self._assignments.wait_for(sample.id, self._assignment_deadline_s)
            except TimeoutError:
                raise _AttemptFailed(f"no engine had a free slot for it for {self._assignment_deadline_s:g} s") from None
            self._lifecycle.move(
                sample, "generating", engine=assignment.engine, worker=self._worker, version=assignment.version
            )
            remaining = sampling
            if partial.tokens:
                remaining = replace(sampling, max_new_tokens=sampling.max_new_tokens - partial.tokens)
            recorded_routes = sample.log.routed_tokens + partial.routed if sample.records else None
            request = Request(sample.id, partial.after(prompt), remaining, partial.tokens, recorded_routes)
            began_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(remaining_s):
                    completion = await self._engines.generate(
                        request, assignment.engine, self._watch(sample, siblings, partial)
                    )
            except TimeoutError:
                raise _AttemptFailed(f"generation took more than {self._deadline_s:g} s") from None
            except EngineDied as error:
                partial.extend(error.partial)
                reason, info = f"engine died: {error.cause.worker}", {"lost_engine": assignment.engine}
            else:
                partial.add(completion)
                command = self._commands.get(sample.id)
                if completion.finish != "abort":
                    return partial, completion.finish
                if command is None or command.action != "requeue":
                    return partial, "ended"
                reason, info = self._commands.pop(sample.id).reason, {}
            if partial.tokens >= sampling.max_new_tokens:
                return partial, "length"
            remaining_s -= asyncio.get_running_loop().time() - began_s
            self._assignments.remove(sample.id)
            self._lifecycle.move(sample, "queued", reason, tokens=partial.tokens, **info)

    def _watch(self, sample: Sample, siblings: Sequence[Sample], before: PartialResponse) -> Watch | None:
        if self._early_stop is None:
            return None
        early_stop = self._early_stop

        def watch(partial: PartialResponse) -> bool:
            ids = partial.after(before.ids)
            finished = [s.response_tokens for s in siblings if s.finish is not None]
            reason = early_stop(RunningResponse(sample.task, ids, lambda: self._renderer.text(ids), finished))
            if reason:
                sample.ended = reason
            return bool(reason)

        return watch

    def _begin_scoring(self, sample: Sample, response: Response) -> None:
        sample.response = response
        sample.tokens, sample.response_tokens = len(sample.log), sample.log.response_tokens
        sample.finish = response.finish
        versions = sample.log.versions
        versions = versions[versions != NO_VERSION]
        if len(versions):
            sample.oldest, sample.newest = int(versions.min()), int(versions.max())
        info: dict[str, Any] = {"tokens": sample.response_tokens, "finish": response.finish}
        if sample.newest is not None:
            info["versions"] = [sample.oldest, sample.newest]
        self._lifecycle.move(sample, "scoring", sample.ended, **info)

    async def _verdict(self, sample: Sample, response: Response) -> Verdict:
        votes = (True,) if sample.votes else ()
        try:
            return await self._call_with_retry(
                lambda: self._backends.rewards.call_rank(
                    self._next_rank(self._backends.rewards), RewardWorker.score, sample.task, response, *votes
                ),
                "grader",
            )
        except ScoreFailure as failure:
            raise _AttemptFailed(f"reward {failure}", kill=float(failure.kind in ("deadline", "crashed"))) from None

    async def _episode(self, sample: Sample, siblings: Sequence[Sample]) -> None:
        """Runs a conversation with an environment until it is done or reaches `env.max_turns` or the token limit."""
        environments, spec = self._backends.environments, sample.task.environment
        assert environments is not None, "the roles of a run with environments have workers for them"
        assert spec is not None
        rank, episode, done = self._next_rank(environments), f"{sample.id}.{sample.tries}", False
        sampling = self.sampling_of(sample)
        # The last try runs in a process of its own, so that a crash is the sample's own fault.
        alone = (True,) if 1 < sample.tries == self._config.rollout.max_attempts else ()
        try:
            self._lifecycle.move(sample, "acting", turn=0)
            reset = await self._call_environment(environments.call_rank(rank, EnvWorker.reset, episode, spec, *alone))
            conversation = self._open(sample, [*sample.task.messages, *reset.messages], reset.tools)
            observed: ResetResult | Step = reset
            sample.reward = 0.0
            while True:
                response = await self._respond(sample, conversation, sampling, siblings)
                self._lifecycle.move(sample, "acting", turn=sample.turns)
                step = await self._call_environment(environments.call_rank(rank, EnvWorker.step, episode, response.text))
                done = step.done
                sample.reward = self._checked_reward(sample.reward + step.reward, spec.name)
                sample.turn_rewards.append(step.reward)
                sample.turn_states.append(state_of(observed))
                if done or sample.turns >= self._config.env.max_turns:
                    self._finish_episode(sample, response, step)
                    return
                if not self._observe(conversation, step):
                    sample.ended = f"the conversation has reached {self._max_episode_tokens} tokens"
                    self._finish_episode(sample, response, step)
                    return
                observed = step
        finally:
            if not done:  # the environment worker closes an episode that is done
                await self._close(environments, rank, episode)

    def _observe(self, conversation: Conversation, step: Step) -> bool:
        """Appends the observation. Returns False if it leaves no tokens for a response."""
        try:
            return conversation.observe(step.messages, self._max_episode_tokens)
        except TemplateError as error:
            raise _AttemptFailed(f"the chat template cannot follow the conversation: {error}") from None

    def _checked_reward(self, reward: float, environment: str) -> float:
        """Checks the sum of an episode's rewards; fails the sample if it is outside the allowed range."""
        try:
            return check_reward(reward, f"the rewards of environment {environment!r} sum to")
        except ValueError as error:
            raise _AttemptFailed(f"environment invalid: {error}") from None

    def _finish_episode(self, sample: Sample, response: Response, last: Step) -> None:
        self._begin_scoring(sample, response)
        metrics = {name: value for name, value in last.info.items() if name != STATE and not isinstance(value, str)}
        sample.parts = {**metrics, "turns": float(sample.turns)}
        self._finish_scoring(sample)

    def _finish_scoring(self, sample: Sample) -> None:
        """Moves the sample to `scored`. The ledger has a greedy sample's reward as `baseline`, so that sums over `reward`
        contain training samples only."""
        info: dict[str, Any] = {"baseline" if sample.greedy else "reward": sample.reward}
        self._lifecycle.move(sample, "scored", **info)

    async def _call_environment(self, call: Awaitable[R]) -> R:
        try:
            # waits: calls on a role have deadlines
            return await call
        except EnvFailure as failure:
            at_fault = failure.kind in ("deadline", "crashed")
            retry, kill = at_fault or failure.kind == "lost", at_fault / failure.candidates
            raise _AttemptFailed(f"environment {failure}", retry=retry, kill=kill) from None
        except RemoteError as error:  # the episode died with its worker
            raise _AttemptFailed(f"environment worker died: {error.worker}", worker_died=True) from None

    async def _close(self, environments: Cluster[EnvWorker], rank: int, episode: str) -> None:
        with suppress(RemoteError):  # a dead worker has no episodes to close
            await environments.call_rank(rank, EnvWorker.close_episodes, [episode])

    async def _call_with_retry(self, call: Callable[[], Awaitable[R]], who: str) -> R:
        """Repeats a call on the next worker while workers die, for up to `rollout.deadline_s`."""
        backoff = _Backoff(self._deadline_s)
        while True:
            try:
                return await call()
            except RemoteError as error:
                # waits: until its deadline
                if not await backoff.wait():
                    raise _AttemptFailed(f"{who} died: {error.worker}") from None

    def _next_rank(self, cluster: Cluster[Any]) -> int:
        self._next_worker += 1
        return (self._next_worker - 1) % len(cluster)


def training_sampling(config: RolloutConfig, stop_ids: tuple[int, ...]) -> SamplingParams:
    """The sampling parameters of training samples."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        stop_ids=stop_ids,
    )
