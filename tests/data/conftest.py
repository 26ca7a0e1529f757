"""Extensions that tests read files with are imported here: some tests put `sys.modules` back as it was, and an extension
cannot be imported a second time."""

from __future__ import annotations

from contextlib import suppress

with suppress(ModuleNotFoundError):
    import pyarrow.parquet  # noqa: F401
