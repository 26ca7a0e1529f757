"""Checks of a run's data together with its model: the tokenizer, the chat template and the context length."""

from __future__ import annotations

from dataclasses import replace

from roll.algorithm import make_algorithm
from roll.algorithm.losses import resolve_loss
from roll.config.errors import UserError
from roll.config.schema import Config
from roll.data.chat_sources import ChatSet
from roll.data.sources import TaskSet
from roll.engine.routes import ExpertLayers
from roll.model.chat import ChatRenderer
from roll.model.find import find_model
from roll.model.loading import load_model_config, load_tokenizer, stop_ids_of
from roll.model.rope import longest_sequence
from roll.model.sft_dataset import SFTDataset, make_dataset
from roll.pipeline.prompt_filter import filter_prompts
from roll.pipeline.reward_models import check_scorers
from roll.reward import RewardSpec
from roll.reward.answers import check_answers
from roll.strategy.registry import engine_backend_of
from roll.strategy.train.optimizer import check_optimizer


def check_tasks(config: Config, tasks: TaskSet, reward_spec: RewardSpec) -> TaskSet:
    """The tasks whose prompts fit; `UserError` if the run cannot start with them."""
    check_optimizer(config.train.optimizer)
    engine_backend_of(config).check(config, "actor_infer")
    check_scorers(config)
    resolve_loss(make_algorithm(config).loss_to_send)  # imports user code that the config names
    answers = check_answers(reward_spec, (*tasks.train, *tasks.held_out), config.reward.deadline_s)
    source = find_model(config.model.path)
    shape = load_model_config(source)
    if config.rollout.router_replay:
        ExpertLayers.of(shape)  # raises for models that router replay cannot work with
    tokenizer = load_tokenizer(source, config.model)
    renderer = ChatRenderer(tokenizer, ())
    tasks = filter_prompts(tasks, renderer, config, longest_sequence(shape))
    return replace(tasks, answers=str(answers or ""))


def check_chats(config: Config, chat_set: ChatSet) -> SFTDataset:
    """The conversations to train on, tokenized; `UserError` if the run cannot start with them."""
    check_optimizer(config.train.optimizer)
    source = find_model(config.model.path)
    tokenizer = load_tokenizer(source, config.model)
    renderer = ChatRenderer(tokenizer, stop_ids_of(tokenizer, source))
    context = longest_sequence(load_model_config(source))
    corpus = make_dataset(chat_set, renderer, config.data, context)
    if 0 < config.train.micro_batch_tokens < corpus.longest_tokens:
        raise UserError(
            f"data: the longest conversation has {corpus.longest_tokens} tokens, but train.micro_batch_tokens is "
            f"{config.train.micro_batch_tokens}: write train.micro_batch_tokens={corpus.longest_tokens} or more, or "
            "data.max_tokens and data.too_long=drop or cut"
        )
    return corpus
