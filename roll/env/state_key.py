"""State keys: a number per environment state, by which turns of a task's episodes are compared."""

from __future__ import annotations

import hashlib
import json

from roll.env.base import STATE, ResetResult, Step


def state_of(result: ResetResult | Step) -> int:
    """A 64-bit key of the state after a reset or step: the same in every process for the same state.

    An environment may name its states itself, in `info["state"]`; otherwise the last observation is the state.
    """
    named = result.info.get(STATE)
    if named is None:
        key: object = [[message["role"], message["content"]] for message in result.messages]
    else:
        key = named if isinstance(named, str) else float(named) + 0.0  # turns -0.0 into 0.0
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
