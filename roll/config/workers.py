"""The settings of workers: where roles run, how weights reach engines, the cluster, and what happens when workers die."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from roll.config.section import Count, Devices, NonNegative, Seconds, Section, Threads, Whole, Workers


class ParallelConfig(Section):
    """How devices divide the model and the work; dimensions not written are 1. Of a sharded trainer, the devices that
    they leave shard the parameters."""

    replicate: Count = 1
    """Copies of a trainer's parameters, each cut over its part of the ranks: less traffic between them, more memory per
    rank."""
    context: Count = 1
    """Ranks of a trainer that divide the rows of each micro-batch: for sequences too long for one. Divides the number of
    attention heads."""
    tensor: Count = 1
    """Devices that divide each layer: of a trainer for layers too wide for one, of a vLLM engine for models too large for
    one. Divides the numbers of attention heads, of key-value heads and of words."""
    expert: Count = 1
    """Ranks of a trainer that divide the experts of each layer; divides the ranks of a copy."""
    cpu_offload: bool = False
    """Whether parameters, gradients and moments stay in host memory throughout. Each layer is copied to the GPU when it
    computes, and the optimizer steps on the CPU: slow, for models whose shards do not fit. On CPUs it changes nothing."""


TRAIN_STRATEGIES = ("single", "sharded")
INFER_STRATEGIES = ("native", "vllm")
"""ROLL's own strategies of roles that train or score, and of roles that generate."""


class RoleConfig(Section):
    """Where a role runs and how it computes."""

    short: ClassVar[str | None] = "devices"

    devices: Devices = "auto"
    """`auto`, `cpu`, or device numbers: `0-7`, `0,2,4`, on other nodes `node1:0-3`. A machine without GPUs numbers its
    cores."""
    cpus: Threads = 0
    """CPU cores of each worker, 0 for as many as suit the role."""
    replicas: Workers = 0
    """Workers, 0 for as many as the devices give; of a sharded trainer its ranks, which on cores is 1 if not written."""
    strategy: str = "auto"
    """How the role computes: `single` trains on one device, `sharded` on several together; `native` is the embedded
    engine, `vllm` is vLLM; or a class, `module:Class` or `file.py:Class`, or the name of one that an installed package
    offers (docs/guides/extending.md). `auto` shards a trainer for which several GPUs are written."""
    parallel: ParallelConfig = ParallelConfig()
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of a vLLM engine, by vLLM's names, such as `{quantization: fp8}`."""

    def context_within(self, tokens: int) -> int:
        """Of the longest sequence that its model takes, as much as its engines do."""
        own = self.engine_args.get("max_model_len")
        return min(tokens, own) if isinstance(own, int) and own > 0 else tokens


class RoleModel(Section):
    """The model of a role that has one of its own."""

    short: ClassVar[str | None] = "path"

    path: str = ""
    """A model folder, a model hub id, or, for a judge, whatever `model.path` takes. Empty: there is no such role."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of its parameters; `auto` is bf16 where the hardware multiplies it, else fp32."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the model's own."""


class RewardModelRole(RoleConfig):
    """A model that scores responses, and where it runs."""

    model: RoleModel = RoleModel()
    micro_batch_tokens: Whole = 0
    """Tokens it computes at once; 0 is 4096 on a CPU, and on a GPU what fits in its memory."""


class JudgeRole(RoleConfig):
    """A model that judges responses in words, and where its engine runs."""

    model: RoleModel = RoleModel()
    max_running: Count = 16
    """Replies an engine generates at once."""


class RolesConfig(Section):
    """Where each role runs. Roles that share devices take turns; roles on other devices overlap."""

    actor_train: RoleConfig = RoleConfig()
    """Trains the model."""
    actor_infer: RoleConfig = RoleConfig()
    """Generates with the model; several workers are several engines."""
    reference: RoleConfig = RoleConfig()
    """The initial model, for a KL penalty."""
    critic: RoleConfig = RoleConfig()
    """Predicts returns, for algorithms with a value function."""
    reward_model: RewardModelRole = RewardModelRole()
    """Scores responses, for the reward `reward_model`."""
    judge: JudgeRole = JudgeRole()
    """Judges responses in words, for the reward `judge`; several workers are several engines."""
    rollout: RoleConfig = RoleConfig()
    """Drives samples through engines and graders."""
    reward: RoleConfig = RoleConfig()
    """Judges responses, each worker in `reward.workers` processes."""
    env: RoleConfig = RoleConfig()
    """Runs environments, each worker in `env.processes` processes; only where tasks have environments."""


class WeightSyncConfig(Section):
    """How weights get from the trainer to engines in other processes."""

    short: ClassVar[str | None] = "transport"

    transport: Literal["auto", "shared_memory", "broadcast", "cuda_ipc"] = "auto"
    """`auto` is `cuda_ipc` on one GPU, `shared_memory` on one machine, else `broadcast` (NCCL or gloo)."""
    bucket_mb: Count = 64
    """Size of the pieces they travel in; two of them are the extra memory a side needs."""


class RayConfig(Section):
    """The cluster, for `executor: ray`."""

    short: ClassVar[str | None] = "address"

    address: str | None = None
    """`null` starts Ray on this machine for the run; `auto` or `host:port` joins a running cluster."""
    object_store_gb: NonNegative = 0.0
    """Memory for data between workers on this machine, 0 for Ray's own choice."""
    start_deadline_s: Seconds = 300.0
    """Seconds in which all workers of a role must have started."""
    call_deadline_s: Seconds = 1800.0
    """Seconds one call on a worker may take."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's description of the workers' environment, added to the one ROLL makes."""


class FaultToleranceConfig(Section):
    """What happens when workers die or hang."""

    ping_s: Seconds = 1.0
    """Seconds between two looks at a worker."""
    hang_s: Seconds = 60.0
    """Seconds without an answer after which a worker is killed and restarted."""
    restarts: Whole = 5
    """Restarts allowed within `window_s`, per worker and per role; a role with more workers may have one each."""
    window_s: Seconds = 600.0
    """Seconds over which `restarts` counts."""
    spare_trainer: bool = True
    """Keep a process ready for each worker of actor and critic, with its libraries loaded (some hundred megabytes of
    memory), so that a trainer that dies is back soon."""
    backoff_s: Seconds = 0.5
    """Seconds before a worker is restarted; doubled each time."""
    watchdog_s: Seconds = 300.0
    """Seconds without a sample's transition or a finished step after which the run reports who waits for whom."""
