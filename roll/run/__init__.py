"""What a run leaves on disk, and how it survives being killed.

A run is a folder (`RunFolder`) with the resolved configuration, the record of every sample (`Ledger`), the numbers of
every step (`Metrics`), the samples themselves, checkpoints (`Checkpoints`), a summary and a picture. Whatever dies, and
whenever, each of these files is whole when the run is resumed: appended ones up to their last flush, all others because
they are written aside and renamed.
"""

from roll.run.checkpoint import Checkpoint, Checkpoints
from roll.run.curve import Panel, draw_curve
from roll.run.files import atomic_open, atomic_write, to_json
from roll.run.folder import RunFolder
from roll.run.ledger import ROLLED_BACK, Ledger, Transition
from roll.run.ledger_index import LedgerIndex
from roll.run.metrics import Metrics
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
    "draw_curve",
    "drop_samples_after",
    "drop_samples_before",
    "read_samples",
    "to_json",
    "write_samples",
]
