"""Marks parameters whose tests run where all tests run (`hypothesis_examples.ALL`), and not in `make test`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def but(quick: Container[Any], parameters: Iterable[Any]) -> list[Any]:
    """All parameters; those that are not among `quick` are marked `thorough`. A tuple has the values of several names."""
    marks = {True: (), False: (pytest.mark.thorough,)}
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=marks[each in quick]) for each in parameters
    ]
