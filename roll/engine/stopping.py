"""When a response has ended by a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.data.tokenlog import IntArray


def hits_stop_string(tokenizer: Tokenizer, ids: Sequence[int] | IntArray, stop: Sequence[str]) -> bool:
    """Whether the last token completed a stop string. A token is at least a byte, which bounds how far to look; one more
    is decoded because some tokenizers drop the space before the first."""
    if not stop:
        return False
    longest = max(len(text.encode()) for text in stop)
    tail = tokenizer.decode([int(token) for token in ids[-longest - 1 :]])
    return any(text in tail for text in stop)
