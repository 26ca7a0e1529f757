"""What every part of a configuration is made of."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Devices = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""Device numbers as text; a single number may be written as one."""
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Names; a single one may be written alone."""


class Section(BaseModel):
    """A part of the configuration: strict, immutable, and with an optional one-field short form."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    short: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        if cls.short is not None and (isinstance(value, str) or type(value) is int):
            return {cls.short: value}
        return value
