"""Options of what comes with ROLL, against the types that it declares for them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from roll.config.errors import UserError


def check_types(function: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
    """`UserError` where an option of a class or a function is of the wrong type; `where` is what the option's name comes
    after in the message. Loads pydantic: environment and grader processes do without."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from roll.config.error_messages import format_value
    from roll.config.schema_tree import choices, describe_type
    from roll.config.suggest import near

    def takes(kind: Any, value: Any) -> bool:
        try:
            TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError:
            return False
        return True

    def hint(kind: Any, value: Any) -> str:
        if meant := near(str(value), choices(kind)):
            return f"; did you mean `{meant[0]}`?"
        if isinstance(value, float) and not math.isfinite(value):
            return ", and a finite one"
        if takes(kind, [value]):
            return f": write [{value}]"
        braces = isinstance(value, Mapping) and takes(kind, "")
        return ': put a text that begins with a brace in quotes, as in "{question}"' if braces else ""

    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    for option in (option for option in options if option in hints):
        kind, value = hints[option], options[option]
        if not takes(kind, value):
            raise UserError(
                f"{where}{option} is {format_value(value)}, but takes {describe_type(kind)}{hint(kind, value)}"
            )
