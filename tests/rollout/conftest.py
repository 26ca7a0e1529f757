from __future__ import annotations

from collections.abc import Iterator

import pytest

import roll.rollout.worker
import roll.workers.infer


@pytest.fixture(scope="module", autouse=True)
def _short_waits() -> Iterator[None]:
    """News is asked for often, so that nobody is still asking when a test ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roll.workers.infer, "POLL_S", 0.02)
        patch.setattr(roll.rollout.worker, "POLL_S", 0.02)
        patch.setattr(roll.rollout.worker, "GATHER_S", 0.002)
        yield
