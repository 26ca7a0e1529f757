"""When a response has ended by a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.data.tokenlog import IntArray

_CUT = 3
"""Bytes of a character that may stand before the tokens looked at, which begin in its middle."""


def hits_stop_string(
    tokenizer: Tokenizer, ids: Sequence[int] | IntArray, stop: Sequence[str], said: Sequence[int] | IntArray = ()
) -> bool:
    """Whether the last token completed a stop string; `said` are tokens of the response from before `ids`.

    A token is at least a byte, which bounds how far to look; one more is decoded because some tokenizers drop the space
    before the first. Where the first bytes are the rest of a character, some tokenizers decode none of those after them,
    so the whole of it is decoded then.
    """
    if not stop:
        return False
    longest = max(len(text.encode()) for text in stop) + 1
    last = [int(token) for token in ids[-longest - _CUT :]]
    if missing := longest + _CUT - len(last):
        last = [*map(int, said[-missing:]), *last]
    for count in range(longest, longest + _CUT + 1):
        tail = tokenizer.decode(last[-count:], clean_up_tokenization_spaces=False)
        if any(text in tail for text in stop):
            return True
        if count >= len(last) or not tail.startswith("\ufffd"):
            break
    return False
