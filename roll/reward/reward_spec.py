"""A picklable description of a reward, for grader processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from roll.config.errors import UserError
from roll.reward.base import RewardFn, is_quick, reads_answers
from roll.reward.builtin import BUILTINS
from roll.reward.compose import ComposedRule, check_rule, compose, model_backed_rewards, warm_up
from roll.reward.domains import ByDomain
from roll.reward.factory import callable_reward, make
from roll.reward.model_reward import ModelBackedReward

if TYPE_CHECKING:
    from roll.config.reward import RewardRule


@dataclass(frozen=True)
class RewardSpec:
    """A picklable reward: its rule, or the function itself, pickled by value if necessary.

    A function of `__main__` or of a notebook can only be sent pickled; the variables that it uses are included.
    """

    label: str
    root: str
    rule: ComposedRule | None = None
    pickled: bytes | None = None
    domains: Mapping[str, ComposedRule] | None = None
    """The rule of each domain."""
    sets: Mapping[str, ComposedRule] = field(default_factory=dict)
    """The rules of evaluation sets that have their own, by the domain of their tasks."""

    @classmethod
    def of(cls, reward: str | RewardFn, root: str = "") -> RewardSpec:
        """The spec of a name or a function. `check`, not this, resolves names, from `root`."""
        root = root or os.getcwd()
        if isinstance(reward, str):
            return cls(reward, root, ComposedRule(reward))
        import cloudpickle

        label = getattr(reward, "__qualname__", type(reward).__qualname__)
        callable_reward(label, reward)
        try:
            return cls(label, root, pickled=cast(bytes, cloudpickle.dumps(reward)))
        except Exception as error:
            raise UserError(
                f"reward function {label!r} cannot be sent to a grader process ({type(error).__name__}: {error}): "
                "let it create files, locks and connections when it is called"
            ) from error

    @classmethod
    def of_config(cls, config: RewardRule, root: str = "") -> RewardSpec:
        """The spec of a configuration. `check`, not this, resolves names and options."""
        return cls(config.label, root or os.getcwd(), ComposedRule.of(config))

    @classmethod
    def of_domains(cls, configs: Mapping[str, RewardRule], root: str = "") -> RewardSpec:
        """The spec of one reward that judges each task by the rule of its domain."""
        label = ", ".join(f"{config.label} ({domain})" for domain, config in configs.items())
        rules = {domain: ComposedRule.of(config) for domain, config in configs.items()}
        return cls(label, root or os.getcwd(), domains=rules)

    def with_sets(self, configs: Mapping[str, RewardRule]) -> RewardSpec:
        """The same, with the rewards of evaluation sets, by the domain of their tasks."""
        return replace(self, sets={domain: ComposedRule.of(config) for domain, config in configs.items()})

    def reads_answers(self, domain: str) -> bool:
        """Whether the reward of a domain's tasks can extract the answer of a response."""
        function = self._function()
        domain_reward = function.of(domain) if isinstance(function, ByDomain) else function
        return domain_reward is not None and reads_answers(domain_reward)

    def check(self) -> None:
        """Loads the reward in this process: a wrong name or option is then reported before the run starts."""
        if self.rule is not None:
            check_rule(self.rule)
        for domain, rule in {**(self.domains or {}), **self.sets}.items():
            check_rule(rule, _setting(domain))
        self._function()

    def load(self) -> RewardFn:
        """The reward, ready for its first job; a grader process calls this once."""
        function = self._function()
        warm_up(function)
        return function

    def quick(self) -> dict[str | None, RewardFn]:
        """The rewards that need no process, by `key_of` the domain. Only built-in ones: no user code is imported here."""
        return {domain: reward for domain, rule in self._rules().items() if (reward := self._quick(rule)) is not None}

    def key_of(self, domain: str) -> str | None:
        """The domain, if it has a reward of its own; None for the reward of all others."""
        return domain if domain in self.sets or domain in (self.domains or {}) else None

    def parts(self) -> list[SourcePart]:
        """The rewards that judge separately: each part of a rule, or a function."""
        found: list[SourcePart] = []
        if self.pickled is not None:
            found.append(SourcePart(None, "reward", self._training_reward(), replace(self, sets={})))
        for domain, rule in self._rules().items():
            setting = _setting(domain) if domain is not None else "reward"
            named = {f"{setting}.parts.{name}": (part.name, part.options) for name, part in rule.parts.items()}
            for where, (name, options) in (named or {setting: (rule.name, rule.options)}).items():
                reward = make(name, options, root=self.root, where=where)
                found.append(SourcePart(domain, where, reward, RewardSpec(name, self.root, ComposedRule(name, options))))
        return found

    def model_backed_rewards(self) -> dict[str | None, dict[str, ModelBackedReward]]:
        """The parts that model roles score before the grader gets the job, by domain; None stands for all other
        domains."""
        rewards = {domain: model_backed_rewards(rule) for domain, rule in self._rules().items()}
        return {domain: parts for domain, parts in rewards.items() if parts or domain in self.sets}

    def _quick(self, rule: ComposedRule) -> RewardFn | None:
        if not rule.names <= BUILTINS.keys():
            return None
        reward = compose(rule, root=self.root)
        return reward if is_quick(reward) else None

    def _rules(self) -> dict[str | None, ComposedRule]:
        rules: dict[str | None, ComposedRule] = dict((self.domains or {}).items())
        if self.rule is not None:
            rules[None] = self.rule
        return rules | dict(self.sets.items())

    def _function(self) -> RewardFn:
        if not self.sets:
            return self._training_reward()
        set_rewards = {
            domain: compose(rule, root=self.root, where=_setting(domain)) for domain, rule in self.sets.items()
        }
        return ByDomain(set_rewards, self._training_reward())

    def _training_reward(self) -> RewardFn:
        """The reward of tasks outside evaluation sets with their own reward."""
        if self.rule is not None:
            return compose(self.rule, root=self.root)
        if self.domains is not None:
            rules = self.domains.items()
            return ByDomain({domain: compose(rule, root=self.root, where=_setting(domain)) for domain, rule in rules})
        assert self.pickled is not None
        return cast(RewardFn, pickle.loads(self.pickled))


@dataclass(frozen=True)
class SourcePart:
    """One reward of a spec, `key_of` the domain whose tasks it judges, and the setting that names it."""

    domain: str | None
    setting: str
    reward: RewardFn
    source: RewardSpec
    """The spec of this reward alone."""


def _setting(domain: str) -> str:
    return f"{'eval.sets' if domain.startswith('eval/') else 'domains'}.{domain.removeprefix('eval/')}.reward"
