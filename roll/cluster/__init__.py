"""A role's workers as one object, the executors that run them, and who brings them back. Knows no role."""

from roll.cluster.cluster import Cluster, PendingCall
from roll.cluster.executor import Executor, LocalExecutor
from roll.cluster.supervisor import RestartPolicy, Supervisor, WorkerStatus
from roll.cluster.worker import Dispatch, Worker, WorkerPlacement, dispatch

__all__ = [
    "Cluster",
    "Dispatch",
    "Executor",
    "LocalExecutor",
    "PendingCall",
    "RestartPolicy",
    "Supervisor",
    "Worker",
    "WorkerPlacement",
    "WorkerStatus",
    "dispatch",
]
