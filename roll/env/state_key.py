"""The state an agent acts in, as a number: what turns of different episodes of a task are compared by."""

from __future__ import annotations

import hashlib
import json

from roll.env.base import STATE, ResetResult, Step


def state_of(seen: ResetResult | Step) -> int:
    """A 64-bit number for the state after what was seen: the same in any process, for the same state.

    An environment may name its states itself, in `info["state"]`; else what the agent was shown last is the state.
    """
    named = seen.info.get(STATE)
    if named is None:
        key: object = [[message["role"], message["content"]] for message in seen.messages]
    else:
        key = named if isinstance(named, str) else float(named) + 0.0  # there is one zero
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
