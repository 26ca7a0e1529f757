"""Detects stop strings at the end of a response."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from roll.data.tokenlog import IntArray

_CUT = 3
"""Bytes of a character that may be missing before the tokens decoded, if they start in its middle."""


def hits_stop_string(
    tokenizer: Tokenizer, ids: Sequence[int] | IntArray, stop: Sequence[str], earlier: Sequence[int] | IntArray = ()
) -> bool:
    """Whether the last token completed a stop string; `earlier` are the response's tokens before `ids`.

    A token has at least one byte, which bounds how many tokens to decode. One more is decoded because some tokenizers
    drop the space before the first. If the first bytes are the rest of a character, some tokenizers do not decode the
    bytes after them, so up to 3 more tokens are decoded then.
    """
    if not stop:
        return False
    longest = max(len(text.encode()) for text in stop) + 1
    last = [int(token) for token in ids[-longest - _CUT :]]
    if missing := longest + _CUT - len(last):
        last = [*map(int, earlier[-missing:]), *last]
    for count in range(longest, longest + _CUT + 1):
        tail = tokenizer.decode(last[-count:], clean_up_tokenization_spaces=False)
        if any(text in tail for text in stop):
            return True
        if count >= len(last) or not tail.startswith("\ufffd"):
            break
    return False
