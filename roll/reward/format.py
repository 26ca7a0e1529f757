"""`format`: rewards a text of the right form, whatever its content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.data.task import Response, Task
from roll.reward.extract import compile_pattern, strip_thinking
from roll.reward.json_schema import check_shape, fits
from roll.reward.time_limit import with_time_limit

_FENCE = re.compile(r"\s*```[\w-]*\n(.*?)\n?```\s*", re.DOTALL)


@dataclass(frozen=True)
class FormatReward:
    """1 if the text satisfies all conditions in the options, else 0; or the share of conditions that it satisfies."""

    pattern: str | None = None
    """Regular expression that the text must match; a dot also matches newlines."""
    search: bool = False
    """Whether a match anywhere is enough; otherwise the pattern must match the whole text, without surrounding white
    space."""
    tags: list[str] = field(default_factory=list)
    """Tags that the text must contain in this order, each opened and closed once: `[think, answer]`."""
    only_tags: bool = False
    """Whether only white space is allowed outside the tags."""
    json: bool = False
    """Whether the text, without its thinking, must be JSON, in a code fence or not."""
    schema: dict[str, Any] = field(default_factory=dict)
    """JSON schema of the text: type, enum, const, properties, required, additionalProperties, items, minItems, maxItems,
    minLength, maxLength, pattern, minimum, maximum."""
    share: bool = False
    """Whether the value is the share of satisfied conditions."""
    deterministic = True

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compile_pattern(self.pattern)
        if self.only_tags and not self.tags:
            raise ValueError("only_tags is true, but there are no tags: write tags: [think, answer]")
        if self.search and self.pattern is None:
            raise ValueError("search is true, but there is no pattern")
        if not (self.pattern is not None or self.tags or self.json or self.schema):
            raise ValueError("format takes at least one of pattern, tags, json and schema")
        check_shape(self.schema)

    def __call__(self, task: Task, response: Response) -> float:
        satisfied = list(self._conditions(response.text).values())
        return sum(satisfied) / len(satisfied) if self.share else float(all(satisfied))

    def _conditions(self, text: str) -> Mapping[str, bool]:
        satisfied: dict[str, bool] = {}
        if self.pattern is not None:
            regex = compile_pattern(self.pattern)
            find = regex.search if self.search else regex.fullmatch
            satisfied["pattern"] = with_time_limit(lambda: find(text if self.search else text.strip()) is not None, False)
        if self.tags:
            satisfied["tags"] = has_tags(text, self.tags, self.only_tags)
        if self.json or self.schema:
            is_json, value = read_json(strip_thinking(text) or "")
            satisfied["json"] = is_json
            if self.schema:
                satisfied["schema"] = is_json and with_time_limit(lambda: fits(value, self.schema), False)
        return satisfied


def has_tags(text: str, tags: list[str], only: bool = False) -> bool:
    """Whether the text has these tags in this order, each opened and closed once; with `only`, nothing else."""
    at = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start, end = text.index(opening), text.index(closing)
        if not at <= start < end or (only and text[at:start].strip()):
            return False
        at = end + len(closing)
    return not (only and text[at:].strip())


def read_json(text: str) -> tuple[bool, Any]:
    """Whether the text, or the content of its only code fence, is JSON, and its value. `NaN` is not JSON."""
    fenced = _FENCE.fullmatch(text)
    try:
        return True, json.loads(fenced[1] if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
