"""Domains in the scheduler: the mix of a config holds exactly over time, and what is dropped is counted by domain."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from rollout_toys import Moves, ToyRunner, go

from roll.config import load_config
from roll.data import Sample
from roll.data.domains import load_domains
from roll.rollout.lifecycle import Lifecycle
from roll.scheduler.filters import make_filter
from roll.scheduler.rollout_result import RolloutBatch
from roll.scheduler.scheduler import RolloutScheduler
from roll.scheduler.task_sampler import EpochSampler

SYMBOLS = "abcdefg"


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    weights=st.lists(st.sampled_from([0.1, 0.5, 1, 2, 3.5, 7, 10]), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 7), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
def test_the_mix_holds_exactly_over_time(weights: list[float], sizes: list[int], seed: int) -> None:
    """After any number of draws a domain of share w has had its share of them, rounded down or up, however many tasks it
    has; and every task of a domain comes as often as any other, give or take one."""
    domains = {
        f"d{i}": {"tasks": {"source": "echo", "options": {"symbols": SYMBOLS[:size]}}, "weight": weight}
        for i, (weight, size) in enumerate(zip(weights, sizes, strict=False))
    }
    config = load_config({"domains": domains})
    order = EpochSampler(load_domains(config.domains).train, seed, config.domain_mix)
    whole = sum(Fraction(str(weight)) for weight in weights)
    drawn: Counter[str] = Counter()
    visits: Counter[str] = Counter()
    for number in range(1, 121):
        task = order.next().task
        drawn[task.domain] += 1
        visits[task.id] += 1
        for i, weight in enumerate(weights):
            share = number * Fraction(str(weight)) / whole
            assert abs(drawn[f"d{i}"] - share) < 1
    for i, size in enumerate(sizes[: len(weights)]):
        counts = [visits[f"d{i}/{symbol}"] for symbol in SYMBOLS[:size]]
        assert max(counts) - min(counts) <= 1


def run_steps(steps: int, outcome: Any) -> tuple[list[RolloutBatch], list[Sample]]:
    domains = {
        "warm": {"tasks": "echo", "temperature": 2.0, "weight": 3},
        "plain": {"tasks": {"source": "echo", "options": {"symbols": "ab"}}},
    }
    config = load_config({"domains": domains, "rollout": {"groups_per_step": 4, "group_size": 2, "temperature": 0.5}})
    seen: list[Sample] = []

    def note(sample: Sample) -> Any:
        seen.append(sample)
        return outcome(sample)

    async def main() -> list[RolloutBatch]:
        moves: Any = Moves()
        pool = await ToyRunner(note).pool(1)
        order = EpochSampler(load_domains(config.domains).train, 0, config.domain_mix)
        scheduler = RolloutScheduler(
            order,
            pool,
            Lifecycle(moves),
            config.rollout,
            make_filter("no_signal"),
            temperatures={domain: config.rollout_of(domain).temperature for domain in config.domains},
        )
        rollouts = []
        for step in range(steps):
            rollouts.append(await scheduler.next_rollout())
            scheduler.mark_trained(rollouts[-1], step + 1)
        await scheduler.close()
        return rollouts

    return go(main()), seen


def test_samples_are_drawn_at_their_domains_temperature() -> None:
    rollouts, seen = run_steps(2, lambda sample: float(sample.id.endswith(".0")))
    assert {sample.task.domain: sample.temperature for sample in seen} == {"warm": 2.0, "plain": 0.5}
    batch = rollouts[0].batch
    assert batch is not None
    assert {*zip(batch["domain"].tolist(), batch["temperature"].tolist(), strict=True)} == {("warm", 2.0), ("plain", 0.5)}


def test_what_is_dropped_is_counted_by_domain() -> None:
    rollouts, _ = run_steps(2, lambda sample: float(sample.id.endswith(".0") and sample.task.domain == "warm"))
    for rollout in rollouts:
        assert set(rollout.dropped_by_domain) == {"plain"}
        flat = rollout.dropped_by_domain["plain"]
        assert dict(flat) == rollout.dropped
        assert sum(flat.values()) == sum(group.task.domain == "plain" for group in rollout.groups)
