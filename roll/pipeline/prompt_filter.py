"""Prompt length filter: which tasks leave enough tokens for a response, and what happens to those that do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jinja2 import TemplateError

from roll.config.errors import UserError
from roll.config.evaluation import HELD_OUT, set_of
from roll.config.schema import Config
from roll.data.domains import domains_of, first_of_each
from roll.data.sources import TaskSet
from roll.data.task import Task
from roll.model.chat import ChatRenderer

LOOKED_AT = 256
"""Tasks per domain whose prompts are checked, unless the config has settings about prompts: then all are."""


@dataclass(frozen=True)
class PromptTooLong:
    """A task whose prompt is too long."""

    task: Task
    beyond: int
    """Excess tokens."""
    why: str
    remedy: str
    """The setting that would help; empty if only another task would."""


def fitting(tasks: TaskSet, renderer: ChatRenderer, config: Config, context: int) -> TaskSet:
    """The tasks whose prompts leave enough tokens for a response. Raises `UserError` if one does not and must not be left
    out, or if a domain has no tasks left. An environment's first observation is not known yet, so its tasks stay."""
    asked = config.tasks
    count = LOOKED_AT if (asked.too_long, asked.max_prompt_tokens) == ("refuse", 0) else len(tasks.train + tasks.held_out)
    some = (*first_of_each(tasks.train, count), *first_of_each(tasks.held_out, count))
    found = [long for task in some if (long := _too_long(task, renderer, config, context)) is not None]
    if not found:
        return tasks
    if asked.too_long == "refuse":
        longest = max(found, key=lambda long: long.beyond)
        remedies = (longest.remedy, "tasks.too_long=drop to leave out such tasks")
        raise UserError(f"{longest.why}: write {', or '.join(filter(None, remedies))}")
    left_out = {id(long.task) for long in found}
    train, held_out = ([t for t in part if id(t) not in left_out] for part in (tasks.train, tasks.held_out))
    _check_left(found, domains_of(tasks.train), domains_of(train))
    _check_sets(found, domains_of(tasks.held_out), domains_of(held_out))
    left = tuple(long.task.id for long in found)
    return replace(tasks, train=tuple(train), held_out=tuple(held_out), left_out=left)


def _check_left(found: Iterable[PromptTooLong], before: Sequence[str], after: Sequence[str]) -> None:
    for domain in before:
        if domain not in after:
            nearest = min((long for long in found if long.task.domain == domain), key=lambda long: long.beyond)
            remedy = f"write {nearest.remedy}" if nearest.remedy else "choose shorter ones"
            raise UserError(
                f"tasks.too_long is drop, which leaves no task of the domain {domain!r} to train on. Of the shortest, "
                f"{nearest.why}: {remedy}"
            )


def _check_sets(found: Iterable[PromptTooLong], before: Sequence[str], after: Sequence[str]) -> None:
    for domain in before:
        if domain not in after and set_of(domain) != HELD_OUT:
            why = next(long.why for long in found if long.task.domain == domain)
            raise UserError(f"tasks.too_long is drop, which leaves no task of eval.sets.{set_of(domain)}: {why}")


def _too_long(task: Task, renderer: ChatRenderer, config: Config, context: int) -> PromptTooLong | None:
    if task.environment is not None:
        return None
    prompt, response = _tokens(task, renderer, config), config.rollout_of(task.domain).max_new_tokens
    own = task.domain in config.domains and config.domains[task.domain].max_new_tokens is not None
    setting = f"domains.{task.domain}.max_new_tokens" if own else "rollout.max_new_tokens"
    longest, packed, sample = config.tasks.max_prompt_tokens, config.train.micro_batch_tokens, prompt + response
    if (name := set_of(task.domain)) in config.eval.sets:
        packed = 0  # its samples are never trained on
        if config.eval.sets[name].max_new_tokens is not None:
            setting = f"eval.sets.{name}.max_new_tokens"
    what = f"the prompt of task {task.id!r}"
    if 0 < longest < prompt:
        why = f"tasks.max_prompt_tokens is {longest}, but {what} has {prompt} tokens"
        return PromptTooLong(task, prompt - longest, why, f"tasks.max_prompt_tokens={prompt} or more")
    taken = config.roles.actor_infer.context_within(context)
    if sample > taken:
        room = taken - prompt
        limit = f"the context of {config.model.path!r}" if taken == context else "max_model_len of roles.actor_infer"
        why = f"{setting} is {response} and {what} has {prompt} tokens, but {limit} is {taken}"
        remedies = [f"{setting}={room} or less"] if room > 0 else []
        if taken < sample <= context:
            remedies.append(f"roles.actor_infer.engine_args.max_model_len={sample} or more")
        return PromptTooLong(task, sample - taken, why, ", or ".join(remedies))
    if 0 < packed < sample:
        why = f"train.micro_batch_tokens is {packed}, but {what} and {setting} may make a sample of {sample} tokens"
        remedy = f"train.micro_batch_tokens={sample} or more, or fewer new tokens"
        return PromptTooLong(task, sample - packed, why, remedy)
    return None


def _tokens(task: Task, renderer: ChatRenderer, config: Config) -> int:
    try:
        return len(renderer.opening(task.messages).tokens)
    except (TemplateError, TypeError, ValueError) as error:
        template = config.model.chat_template or f"the chat template of {config.model.path!r}"
        raise UserError(
            f"{template} cannot render task {task.id!r} ({type(error).__name__}: {error}): "
            "change the task's messages, or write model.chat_template=FILE with a Jinja template that takes them"
        ) from error
