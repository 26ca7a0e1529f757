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

CHECKED_PER_DOMAIN = 256
"""Tasks per domain whose prompts are checked, unless the config has settings about prompts: then all are."""


@dataclass(frozen=True)
class PromptTooLong:
    """A task whose prompt is too long."""

    task: Task
    excess_tokens: int
    """Excess tokens."""
    reason: str
    remedy: str
    """The setting that would help; empty if only another task would."""


def filter_prompts(tasks: TaskSet, renderer: ChatRenderer, config: Config, context: int) -> TaskSet:
    """The tasks whose prompts leave enough tokens for a response. Raises `UserError` if one does not and must not be left
    out, or if a domain has no tasks left. An environment's first observation is not known yet, so its tasks stay."""
    settings = config.tasks
    count = (
        CHECKED_PER_DOMAIN
        if (settings.too_long, settings.max_prompt_tokens) == ("refuse", 0)
        else len(tasks.train + tasks.held_out)
    )
    candidates = (*first_of_each(tasks.train, count), *first_of_each(tasks.held_out, count))
    too_long = [long for task in candidates if (long := _too_long(task, renderer, config, context)) is not None]
    if not too_long:
        return tasks
    if settings.too_long == "refuse":
        longest = max(too_long, key=lambda long: long.excess_tokens)
        remedies = (longest.remedy, "tasks.too_long=drop to leave out such tasks")
        raise UserError(f"{longest.reason}: write {', or '.join(filter(None, remedies))}")
    left_out = {id(long.task) for long in too_long}
    train, held_out = ([t for t in part if id(t) not in left_out] for part in (tasks.train, tasks.held_out))
    _check_domains(too_long, domains_of(tasks.train), domains_of(train))
    _check_sets(too_long, domains_of(tasks.held_out), domains_of(held_out))
    left_out_ids = tuple(long.task.id for long in too_long)
    return replace(tasks, train=tuple(train), held_out=tuple(held_out), left_out=left_out_ids)


def _check_domains(too_long: Iterable[PromptTooLong], before: Sequence[str], after: Sequence[str]) -> None:
    for domain in before:
        if domain not in after:
            nearest = min((long for long in too_long if long.task.domain == domain), key=lambda long: long.excess_tokens)
            remedy = f"write {nearest.remedy}" if nearest.remedy else "choose shorter ones"
            raise UserError(
                f"tasks.too_long is drop, which leaves no task of the domain {domain!r} to train on. Of the shortest, "
                f"{nearest.reason}: {remedy}"
            )


def _check_sets(too_long: Iterable[PromptTooLong], before: Sequence[str], after: Sequence[str]) -> None:
    for domain in before:
        if domain not in after and set_of(domain) != HELD_OUT:
            reason = next(long.reason for long in too_long if long.task.domain == domain)
            raise UserError(f"tasks.too_long is drop, which leaves no task of eval.sets.{set_of(domain)}: {reason}")


def _too_long(task: Task, renderer: ChatRenderer, config: Config, context: int) -> PromptTooLong | None:
    if task.environment is not None:
        return None
    prompt, response = _tokens(task, renderer, config), config.rollout_of(task.domain).max_new_tokens
    of_domain = task.domain in config.domains and config.domains[task.domain].max_new_tokens is not None
    setting = f"domains.{task.domain}.max_new_tokens" if of_domain else "rollout.max_new_tokens"
    longest, packed, sample = config.tasks.max_prompt_tokens, config.train.micro_batch_tokens, prompt + response
    if (name := set_of(task.domain)) in config.eval.sets:
        packed = 0  # its samples are never trained on
        if config.eval.sets[name].max_new_tokens is not None:
            setting = f"eval.sets.{name}.max_new_tokens"
    subject = f"the prompt of task {task.id!r}"
    if 0 < longest < prompt:
        reason = f"tasks.max_prompt_tokens is {longest}, but {subject} has {prompt} tokens"
        return PromptTooLong(task, prompt - longest, reason, f"tasks.max_prompt_tokens={prompt} or more")
    context_limit = config.roles.actor_infer.context_within(context)
    if sample > context_limit:
        budget = context_limit - prompt
        limit = (
            f"the context of {config.model.path!r}" if context_limit == context else "max_model_len of roles.actor_infer"
        )
        reason = f"{setting} is {response} and {subject} has {prompt} tokens, but {limit} is {context_limit}"
        remedies = [f"{setting}={budget} or less"] if budget > 0 else []
        if context_limit < sample <= context:
            remedies.append(f"roles.actor_infer.engine_args.max_model_len={sample} or more")
        return PromptTooLong(task, sample - context_limit, reason, ", or ".join(remedies))
    if 0 < packed < sample:
        reason = f"train.micro_batch_tokens is {packed}, but {subject} and {setting} may make a sample of {sample} tokens"
        remedy = f"train.micro_batch_tokens={sample} or more, or fewer new tokens"
        return PromptTooLong(task, sample - packed, reason, remedy)
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
