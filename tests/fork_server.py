"""Processes of tests are forked off one that has imported what they need: each of them starts at once.

Python has one such server per process, and it starts with the first process that is made: the modules are listed here, in
one place, because a second list would replace the first.
"""

from __future__ import annotations

import multiprocessing

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "roll.cli.commands",
        "roll.cli.display",
        "roll.pipeline.entrypoints",
        "roll.pipeline.rlvr_pipeline",
        "roll.run.plot",
        "roll.strategy.infer.native",
        "roll.strategy.train.sharded.module",
        "roll.strategy.train.single",
        "roll.weight_sync.broadcast",
        "roll.weight_sync.channel",
        "transformers.models.llama.modeling_llama",
    ]
)
