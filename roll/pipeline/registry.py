"""The registry of pipelines: ROLL's own, those of installed packages, and classes of the user's."""

from __future__ import annotations

from typing import Any

from roll.config.errors import UserError
from roll.config.registry import Registry
from roll.config.schema import Config
from roll.pipeline.base import Pipeline

PIPELINES = Registry(
    "pipeline",
    "roll.pipelines",
    {"rlvr": "roll.pipeline.rlvr_pipeline:RLVRPipeline", "sft": "roll.pipeline.sft_pipeline:SFTPipeline"},
)


def pipeline_of(config: Config) -> type[Pipeline[Any, Any]]:
    """The pipeline that the config names."""
    found = PIPELINES.find(config.pipeline, "pipeline", config.root)
    if not isinstance(found, type) or not issubclass(found, Pipeline):
        raise UserError(
            f"pipeline is {config.pipeline!r}, which is no pipeline: write a subclass of roll.pipeline.base.Pipeline"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise UserError(f"pipeline {config.pipeline!r}: the class {found.__name__} has no {missing[0]}: write the method")
    return found
