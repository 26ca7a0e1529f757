"""A role's workers as one object, and the executors that run them. Knows no role."""

from roll.cluster.cluster import Cluster
from roll.cluster.executor import Executor, LocalExecutor
from roll.cluster.worker import Dispatch, Place, Worker, parallel

__all__ = ["Cluster", "Dispatch", "Executor", "LocalExecutor", "Place", "Worker", "parallel"]
