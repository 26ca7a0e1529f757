"""Clusters (the workers of a role as one object), the executors that run workers, and the supervisor that restarts them.
This package is independent of any particular role."""

from roll.cluster.cluster import Cluster
from roll.cluster.executor import Executor, LocalExecutor
from roll.cluster.pending_calls import PendingCall
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
