"""A cache of verdicts, so that the same response to the same task is judged once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace

from roll.reward.base import Verdict


class VerdictCache:
    """The verdicts of the `size` most recently used jobs, by the bytes of the job: the whole task and response.

    Two jobs with the same bytes are the same job. A cache belongs to one pool, and so to one reward.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def get(self, job: bytes) -> Verdict | None:
        """The cached verdict on a job, or None."""
        if not self._size:
            return None
        key = _key(job)
        if key not in self._verdicts:
            return None
        self._verdicts.move_to_end(key)
        verdict = self._verdicts[key]
        return replace(verdict, parts=dict(verdict.parts))

    def put(self, job: bytes, verdict: Verdict) -> None:
        """Adds a verdict; evicts the least recently used one if the cache is full."""
        if not self._size:
            return
        self._verdicts[_key(job)] = replace(verdict, parts=dict(verdict.parts))
        if len(self._verdicts) > self._size:
            self._verdicts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._verdicts)


def _key(job: bytes) -> bytes:
    return hashlib.blake2b(job, digest_size=16).digest()
