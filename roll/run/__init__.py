"""The files that a run leaves on disk, and how they survive a kill.

A run is a folder (`RunFolder`) with the resolved configuration, the record of every sample (`Ledger`), the metrics of
every step (`Metrics`), the samples themselves, checkpoints (`Checkpoints`), a summary and a plot. Whatever dies, and
whenever, each of these files is complete when the run resumes: appended files up to their last flush, all others because
they are written to a temporary file and renamed.
"""

from roll.atomic_files import atomic_open, atomic_write, to_json
from roll.ledger.index import LedgerIndex
from roll.ledger.log import ROLLED_BACK, Ledger, Transition
from roll.run.checkpoint import Checkpoint, Checkpoints
from roll.run.folder import RunFolder
from roll.run.metrics import Metrics
from roll.run.plot import Panel, plot_curve
from roll.run.samples import drop_samples_after, drop_samples_before, read_samples, write_samples

__all__ = [
    "ROLLED_BACK",
    "Checkpoint",
    "Checkpoints",
    "Ledger",
    "LedgerIndex",
    "Metrics",
    "Panel",
    "RunFolder",
    "Transition",
    "atomic_open",
    "atomic_write",
    "drop_samples_after",
    "drop_samples_before",
    "plot_curve",
    "read_samples",
    "to_json",
    "write_samples",
]
