"""The sizes of a run that its memory depends on, besides those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from roll.config.schema import Config
from roll.config.workers import RoleConfig
from roll.strategy.train.activation_memory import Footprint, PackedSize, Spans
from roll.strategy.train.layer_wrapping import Compiling
from roll.strategy.train.microbatch_budget import Budget, Checkpointing, choose

RUBRIC_TOKENS = 256
"""Tokens of ROLL's own rubric."""
REPLY_TOKENS = 512
"""Tokens of a judge's longest reply if its options do not set one."""


def micro_batch_of(limit: int, prompt: int, response: int, group_size: int, groups: int) -> PackedSize:
    """The fullest micro-batch of at most `limit` packed tokens if every prompt and response has these lengths: whole
    groups first, then a part of one. The first sample of a group brings its prompt, the others only their responses."""
    full = min(limit // (prompt + group_size * response), groups)
    remaining = limit - full * (prompt + group_size * response)
    openers, siblings = full, full * (group_size - 1)
    if full < groups and (remaining >= prompt + response or not full):  # one sample is planned for even if it is too long
        openers += 1
        siblings += min(max(remaining - prompt - response, 0) // response, group_size - 1)
    path = prompt + response
    spans = [Spans(openers, path, path), Spans(siblings, response, path)]
    rows = openers * path + siblings * response
    return PackedSize(rows, (openers + siblings) * response, tuple(span for span in spans if span.count))


@dataclass(frozen=True)
class JudgeWork:
    """The sizes of a judge's work: sequences at once, tokens of the rubric shown beside an attempt, and its longest
    reply."""

    running: int
    rubric: int
    reply: int

    @classmethod
    def of(cls, config: Config) -> JudgeWork | None:
        """The largest sizes over all rewards that use the role; None if none does. A rubric's characters count as
        tokens."""
        parts = [part for rule in config.reward_rules.values() for part in (rule.parts.values() or [rule])]
        options = [part.options for part in parts if part.name == "judge" and not part.options.get("url")]
        if not options:
            return None
        return cls(
            config.roles.judge.max_running,
            max(len(str(each.get("rubric", ""))) or RUBRIC_TOKENS for each in options),
            max(int(each.get("max_tokens", REPLY_TOKENS)) for each in options),
        )


@dataclass(frozen=True)
class MemoryInputs:
    """The sizes of a run that memory depends on, besides those of the model."""

    shortest_prompt: int
    longest_prompt: int
    response: int
    group_size: int
    groups: int
    """Groups per update."""
    limit_rows: int
    """Limit on packed tokens per micro-batch; 0 for as many as fit."""
    running: int
    """Sequences that an engine runs at once; 0 without engines."""
    exact: bool
    bucket_bytes: int
    """Size of the buckets in which weights are sent; each side has two. 0 if trainer and engines share a process."""
    checkpointing: Checkpointing = "auto"
    optimizer: str = "adamw"
    compile: Compiling = "auto"
    judging: JudgeWork | None = None
    kv_tokens: int = 0
    """Limit on the tokens of an engine's KV cache; 0 for what its sequences need."""
    router_replay: bool = False
    """Whether engines record MoE routes."""
    evaluation_response: int = 0
    """Longest response in an evaluation; it matters if it is longer than in training."""
    engines: Mapping[str, RoleConfig] = field(default_factory=dict)
    """The configuration of the roles that have engines."""

    @classmethod
    def of(cls, config: Config, shortest_prompt: int, longest_prompt: int) -> MemoryInputs:
        return cls(
            shortest_prompt=shortest_prompt,
            longest_prompt=longest_prompt,
            response=config.longest_response,
            group_size=config.rollout.group_size,
            groups=ceil(config.rollout.groups_per_step / config.train.updates_per_step),
            limit_rows=config.train.micro_batch_tokens,
            running=config.rollout.max_running,
            exact=config.deterministic,
            bucket_bytes=config.weight_sync.bucket_mb << 20 if config.executor == "ray" else 0,
            checkpointing=config.train.activation_checkpointing,
            optimizer=config.train.optimizer,
            compile=config.train.compile,
            judging=JudgeWork.of(config),
            kv_tokens=config.rollout.kv_cache_tokens,
            router_replay=config.rollout.router_replay,
            evaluation_response=config.longest_evaluated,
            engines={"actor_infer": config.roles.actor_infer, "judge": config.roles.judge},
        )

    @classmethod
    def of_chats(cls, config: Config, longest_tokens: int) -> MemoryInputs:
        """For conversations of at most this many tokens: each is a group of its own, and any token may be trained on."""
        return cls(
            shortest_prompt=1,
            longest_prompt=1,
            response=max(longest_tokens - 1, 1),
            group_size=1,
            groups=config.data.samples_per_step,
            limit_rows=config.train.micro_batch_tokens,
            running=0,
            exact=config.deterministic,
            bucket_bytes=0,
            checkpointing=config.train.activation_checkpointing,
            optimizer=config.train.optimizer,
            compile=config.train.compile,
        )

    def of_role(self, role: str) -> MemoryInputs:
        """The sizes of one role's work: engines also generate evaluation responses; a judge reads whole attempts and
        replies to them."""
        if role == "actor_infer" and self.evaluation_response > self.response:
            return replace(self, response=self.evaluation_response)
        if role == "reward_model":  # conversations share no prefixes
            return replace(self, group_size=1, groups=self.groups * self.group_size, limit_rows=0)
        if role != "judge" or self.judging is None:
            return self
        judging = self.judging
        longest = self.longest_prompt + max(self.response, self.evaluation_response) + judging.rubric
        shortest = self.shortest_prompt + judging.rubric
        sizes = replace(self, shortest_prompt=shortest, longest_prompt=longest, response=judging.reply)
        return replace(sizes, running=judging.running, kv_tokens=0, router_replay=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.longest_prompt + self.response

    def budget(self, footprint: Footprint, spare_bytes: int | None = None) -> Budget:
        """The micro-batch limit of a trainer whose GPU has this much free memory; None on a CPU."""
        return choose(footprint, self.limit_rows, self.checkpointing, self.longest, spare_bytes)

    def micro_batches(self, limit_rows: int) -> list[PackedSize]:
        """Candidates for the largest micro-batch: for the longest responses, for repeated halves of that length, and for
        the longest length that leaves no packed token unused. Long responses need more memory for attention, many short
        ones more for keys. If an update has several micro-batches, they are about equally large."""
        lengths = {max(self.response >> halvings, 1) for halvings in range(self.response.bit_length())}
        budget = limit_rows - self.longest_prompt
        if budget > 0:
            lengths.add(max(budget // ceil(budget / self.response), 1))
        return [self._micro_batch(limit_rows, length) for length in sorted(lengths, reverse=True)]

    def _micro_batch(self, limit_rows: int, response: int) -> PackedSize:
        rows = self.groups * (self.longest_prompt + self.group_size * response)
        even = ceil(rows / ceil(rows / limit_rows)) + self.longest_prompt + response
        return micro_batch_of(min(limit_rows, even), self.longest_prompt, response, self.group_size, self.groups)

    def has_several_micro_batches(self, limit_rows: int) -> bool:
        """Whether an update takes more than one micro-batch."""
        return self.groups * (self.longest_prompt + self.group_size * self.response) > limit_rows
