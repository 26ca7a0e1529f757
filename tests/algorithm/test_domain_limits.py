"""What an algorithm makes of domains whose responses may be of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roll.algorithm import make_algorithm
from roll.config import load_config
from roll.data import Batch, Sample, Task

DOMAINS = {"short": {"tasks": "echo", "max_new_tokens": 10}, "long": {"tasks": "echo"}}


def scores(config: dict[str, Any], lengths: dict[str, int], turns: int = 1) -> list[float]:
    """Of one sample a domain, each worth 0, of so many tokens in so many turns."""
    samples = [
        Sample(f"{i}.0", Task.ask("t", "?", domain=domain), i, 1.0, response_tokens=tokens, turns=turns)
        for i, (domain, tokens) in enumerate(lengths.items())
    ]
    algorithm = make_algorithm(load_config({"rollout": {"max_new_tokens": 100}, **config}))
    found: list[float] = algorithm.scores(Batch.from_samples(samples)).tolist()
    return found


@pytest.mark.parametrize(("tokens", "wanted"), [((8, 80), (0, 0)), ((9, 90), (-0.5, -0.5)), ((10, 10), (-1, 0))])
def test_a_response_is_too_long_by_its_own_domains_limit(tokens: tuple[int, int], wanted: tuple[float, float]) -> None:
    config = {"algorithm": "dapo", "domains": DOMAINS}
    np.testing.assert_allclose(scores(config, dict(zip(DOMAINS, tokens, strict=True))), wanted, atol=1e-12)


def test_without_domains_there_is_one_limit() -> None:
    np.testing.assert_allclose(scores({"algorithm": "dapo"}, {"a": 10, "b": 90}), [0, -0.5], atol=1e-12)


def test_the_limit_is_a_turns() -> None:
    lengths = {"a": 40, "b": 320, "c": 360}
    np.testing.assert_allclose(scores({"algorithm": "dapo"}, lengths, turns=4), [0, 0, -0.5], atol=1e-12)
