"""What every part of a configuration is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from roll.config.secrets import KNOWN, redacted

LARGEST = 10**12
"""No count, size or number of steps is larger: a number that is was mistyped."""
LONGEST_S = 1e9
"""No wait is longer: 30 years. Timers of operating systems take no infinity."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Processes = Annotated[int, Field(ge=1, le=4096)]
"""How many processes one worker starts."""
Threads = Annotated[int, Field(ge=0, le=4096)]
Workers = Annotated[int, Field(ge=0, le=65536)]
LARGEST_SEED = 2**64
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Limit = Annotated[float, Field(gt=0, allow_inf_nan=True)]
"""A limit of something; `.inf` is none."""
Bound = Annotated[float, Field(ge=-math.inf, allow_inf_nan=True)]
"""An end of a range, which may be open: `.inf` or `-.inf`. NaN is below no number, so it is refused."""
Share = Annotated[float, Field(gt=0, le=1)]
Devices = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""Device numbers as text; a single number may be written as one."""
Mode = Annotated[
    str, BeforeValidator(lambda value: f"{value:04d}" if type(value) is int else value), Field(pattern="^0?7[0-7][0-7]$")
]
"""Rights to a folder in octal digits; `0750`, which YAML reads as a number, is one."""
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Names; a single one may be written alone."""
Stops = tuple[Annotated[str, Field(min_length=1)], ...]
"""Strings that end a response."""


class Section(BaseModel):
    """A part of the configuration: strict, immutable, and with an optional one-field short form. Its numbers are finite,
    but for a `Limit` and a `Bound`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    short: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        if cls.short is not None and (isinstance(value, str) or type(value) is int):
            return {cls.short: value}
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redacted(value, name or "")

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """What arrives in another process is known there too."""
        super().__setstate__(state)
        KNOWN.learn_environment()
        KNOWN.learn(self.model_dump())
