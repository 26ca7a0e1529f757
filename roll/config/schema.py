"""The configuration of a run: every setting, its default and a line on what it does.

`docs/config.md` is generated from these models. A section with a `short` field may be written as that field alone:
`model: smollm2-135m` means `model: {path: smollm2-135m}`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from roll.config.algorithm import AlgorithmConfig
from roll.config.section import Count, Devices, Names, NonNegative, Positive, Section, Share, Whole

__all__ = ["AlgorithmConfig", "Section"]


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the model's own weights."""

    short: ClassVar[str | None] = "rank"

    rank: Whole = 0
    """Rank of their matrices: what they can learn, and what they cost. 0: no adapters, all weights are trained."""
    alpha: NonNegative = 0.0
    """What adapters add is multiplied by alpha / rank; 0 is twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of their inputs that adapters drop in updates. Above 0 the gradient depends on the micro-batches."""
    targets: Names = ("all-linear",)
    """Names of the layers that get adapters, such as `[q_proj, v_proj]`; `all-linear`: all linear ones of the decoder."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.alpha else 2.0

    @model_validator(mode="after")
    def _check_rank(self) -> LoraConfig:
        if self.model_fields_set and "rank" not in self.model_fields_set:
            written = ", ".join(f"model.lora.{name}" for name in sorted(self.model_fields_set))
            raise ValueError(f"{written} is set, but there are no adapters: write model.lora.rank=16, or remove it")
        return self


class ModelConfig(Section):
    """The model to train."""

    short: ClassVar[str | None] = "path"

    path: str = "smollm2-135m"
    """`smollm2-135m`, `tiny`, a model folder, a run folder, a `.gguf` file, or a model hub id."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of parameters and serving; `auto` is bf16 where the hardware multiplies it, else fp32."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the model's own."""
    lora: LoraConfig = LoraConfig()

    @property
    def adapters(self) -> LoraConfig | None:
        return self.lora if self.lora.rank else None


class TasksConfig(Section):
    """What to solve."""

    short: ClassVar[str | None] = "source"

    source: str = "addition"
    """`addition`, `echo`, `environment`, a `.jsonl` file, or a function: `module:name` or `file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source."""
    weights: dict[str, Positive] = Field(default_factory=dict)
    """Share of each domain among the groups, by name; empty: every task equally often."""
    sample_by: Literal["epochs", "solve_rate"] = "epochs"
    """`epochs`: every task once an epoch. `solve_rate`: of those, tasks always or never solved of late often wait."""


class DataConfig(Section):
    """Conversations to imitate, for `pipeline: sft`."""

    short: ClassVar[str | None] = "source"

    source: str = "addition"
    """A `.jsonl`, `.json` or `.parquet` file, a source of tasks with answers (`addition`, `echo`), or a function:
    `module:name` or `file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source; of a file: the names of its columns, and the share `held_out`."""
    samples_per_step: Count = 32
    """Conversations that train one step."""
    epochs: NonNegative = 0.0
    """Times every conversation is trained on, which makes the number of steps; 0: `train.steps` does."""
    max_tokens: Whole = 0
    """Longest conversation, in tokens; 0 for the model's context."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """What is done about a longer one: `refuse` the run, `drop` it, or `cut` off its end."""


class RewardConfig(Section):
    """How an attempt is judged."""

    short: ClassVar[str | None] = "name"

    name: str = "number"
    """`number` (the last number is right), `math` (math-verify), or a function: `module:name` or `file.py:name`."""
    workers: Count = 1
    """Grader processes."""
    deadline_s: Positive = 10.0
    """Seconds one verdict may take; then its process is killed and replaced."""
    tries: Count = 2
    """Attempts at a verdict when the grader's process hangs or dies."""
    queue: Count = 4096
    """Samples that may wait for verdicts; while there are more, no new ones begin."""


class RolloutConfig(Section):
    """How samples are made: `groups_per_step × group_size = samples_per_step`."""

    groups_per_step: Count = 8
    """Tasks whose groups train one step."""
    group_size: Count = 8
    """Samples of one task."""
    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probs of training are under the same one."""
    top_p: Share = 1.0
    """Nucleus sampling; below 1 needs `train_on_truncated`."""
    top_k: Whole = 0
    """Sample from the k likeliest tokens, 0 for all; above 0 needs `train_on_truncated`."""
    train_on_truncated: bool = False
    """Allow training on samples of a truncated distribution (top_p, top_k)."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response (their tokens stay in it)."""
    filter: str = "no_signal"
    """Which finished groups are dropped and replaced: `no_signal` (rewards all equal), `mean_range`, `none`, or a
    function: `module:name` or `file.py:name`."""
    filter_range: tuple[float, float] = (0.05, 0.95)
    """`mean_range` keeps groups whose mean reward is in it."""
    max_replacements: NonNegative = 1.0
    """At most this many times `groups_per_step` dropped groups are replaced in a step."""
    max_staleness: Whole = 0
    """Versions of the weights a sample may be behind when it is trained on. 0 is on-policy; above, generation goes on
    while training runs, which needs `executor: ray`."""
    stale: Literal["wait", "mask", "drop"] = "wait"
    """What is done about samples that would get too old: `wait` for them, `mask` their old tokens, or `drop` them."""
    stale_wait_s: Positive = 600.0
    """Seconds `wait` waits; then they are dropped."""
    on_update: Literal["pause", "abort"] = "pause"
    """Around new weights, running samples `pause` and go on, or `abort` and go on from their prefix, computed anew."""
    oversample: NonNegative = 0.0
    """Groups issued beyond a step's need, as a share of it."""
    cut: Literal["in_order", "first"] = "in_order"
    """Which groups make a step: the oldest issued, or the first to finish, which favours short answers."""
    order: str = "in_order"
    """Which task is next: `in_order`, `lookahead` (expected longest first), `tail_rounds` (long ones in rounds of their
    own), or a class: `module:name` or `file.py:name`."""
    lookahead: Count = 64
    """Tasks `lookahead` chooses from."""
    end_early: tuple[str, ...] = ()
    """What ends a response early: `repetition`, `length_budget=4` (times its siblings' mean), or a function."""
    policy: str = "none"
    """What interferes with running groups: `none`, `stragglers=60` (the last responses of a step are ended after so many
    seconds), or a class: `module:name` or `file.py:name`."""
    max_running: Count = 64
    """Samples an engine generates at once."""
    kv_tokens: Whole = 0
    """Tokens an engine's cache may hold before it gets no more samples; 0 for no such limit."""
    deadline_s: Positive = 600.0
    """Seconds a sample may spend on one response; then it fails."""
    tries: Count = 3
    """Attempts at a sample whose worker dies or hangs."""
    quarantine_after: Count = 3
    """Workers a task's samples may have killed or hung; after that the task is dropped wherever it comes up."""


class TrainConfig(Section):
    """How weights are updated."""

    steps: Count = 100
    """Training steps."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    warmup_steps: Whole = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `linear` and `cosine` end at 0."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments of large matrices in 8 bits: a quarter of the memory, and the package torchao."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (matrices only)."""
    betas: tuple[NonNegative, NonNegative] = (0.9, 0.99)
    """AdamW's moment decays."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    clip_grad_norm: Positive = 1.0
    """Largest norm of the gradient."""
    max_skipped_in_a_row: Count = 5
    """Steps in a row with an update skipped, because its loss or gradient was not finite, after which the run stops."""
    updates_per_step: Count = 1
    """Optimizer steps a batch is cut into; above 1 the proximal log-probs are computed first."""
    micro_batch_tokens: Whole = 0
    """Distinct tokens in a micro-batch; a shared prefix counts once. Changes memory and speed, never the gradient. 0 is
    4096 on a CPU, and on a GPU what fits in its memory, at most 131072."""
    share_prefixes: bool = True
    """Compute what samples of a micro-batch begin with in common once. Changes speed, never the gradient."""
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Compute a layer's activations again in the backward pass instead of keeping them: slower, much less memory. `auto`:
    where a GPU has too little memory otherwise."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the decoder's layers with `torch.compile`; `auto`: on a GPU, without adapters."""


class EvalConfig(Section):
    """How held-out accuracy is measured."""

    every: Whole = 10
    """Steps between evaluations, 0 for only before and after."""
    samples: Count = 128
    """Answers, spread evenly over the held-out tasks."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    show: Whole = 3
    """Held-out questions whose answers are shown before and after training."""


class RunConfig(Section):
    """Where the run lives and what it keeps."""

    short: ClassVar[str | None] = "dir"

    dir: str = "runs/run"
    """The run's folder."""
    checkpoint_every: Whole = 20
    """Steps between checkpoints, 0 for only at the end."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    save_samples: bool = True
    """Write every sample's text, tokens and rewards."""
    trace: bool = True
    """Write `trace.json`: every stage of every sample, for Perfetto."""


class EnvConfig(Section):
    """How environments run, for tasks that have one."""

    processes: Count = 1
    """Processes of each environment worker."""
    per_process: Count = 64
    """Episodes a process holds at once."""
    reset_deadline_s: Positive = 60.0
    """Seconds an environment may take to begin an episode; then its process is killed and replaced."""
    step_deadline_s: Positive = 30.0
    """Seconds an environment may take for one step; then its process is killed and replaced."""
    memory_mb: Whole = 0
    """Memory of an environment process, 0 for no limit."""
    max_turns: Count = 16
    """Most actions of an episode."""


class SuperviseConfig(Section):
    """What happens when workers die or hang."""

    ping_s: Positive = 1.0
    """Seconds between two looks at a worker."""
    hang_s: Positive = 60.0
    """A worker that has not answered for so many seconds is killed and started again."""
    restarts: Whole = 5
    """Deaths within `window_s` that are mended, of one worker and of a role; a role of more workers may have one each."""
    window_s: Positive = 600.0
    """Seconds over which `restarts` counts."""
    spare_trainer: bool = True
    """Keep a process ready for a trainer that dies, with its libraries loaded (some hundred megabytes of memory)."""
    backoff_s: Positive = 0.5
    """Seconds before a worker is started again; doubled each time."""
    watchdog_s: Positive = 300.0
    """When no sample has moved and no step has ended for so many seconds, the run says who waits on whom."""


class RoleConfig(Section):
    """Where a role runs and how it computes."""

    short: ClassVar[str | None] = "devices"

    devices: Devices = "auto"
    """`auto`, `cpu`, or device numbers: `0-7`, `0,2,4`, on other nodes `node1:0-3`. A machine without GPUs numbers its
    cores."""
    cpus: Whole = 0
    """CPU cores of each worker, 0 for as many as suit the role."""
    replicas: Whole = 0
    """Workers, 0 for as many as the devices give."""
    strategy: Literal["auto", "single", "native", "vllm"] = "auto"
    """How the role computes: `single` trains on one device; `native` is the embedded engine, `vllm` is vLLM."""
    tensor_parallel: Count = 1
    """Devices that hold one copy of the weights together; above 1 needs `strategy: vllm`."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of a vLLM engine, by vLLM's names, such as `{quantization: fp8}`."""


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
    reward_model: RoleConfig = RoleConfig()
    """A model that scores responses."""
    judge: RoleConfig = RoleConfig()
    """A model that judges responses in words."""
    rollout: RoleConfig = RoleConfig()
    """Drives samples through engines and graders."""
    reward: RoleConfig = RoleConfig()
    """Judges responses, each worker in `reward.workers` processes."""
    env: RoleConfig = RoleConfig()
    """Runs environments, each worker in `env.processes` processes; only where tasks have environments."""


class WeightsConfig(Section):
    """How weights get from the trainer to engines in other processes."""

    short: ClassVar[str | None] = "path"

    path: Literal["auto", "shared_memory", "broadcast", "cuda_ipc"] = "auto"
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
    start_deadline_s: Positive = 300.0
    """Seconds in which all workers of a role must have started."""
    call_deadline_s: Positive = 1800.0
    """Seconds one call on a worker may take."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's description of the workers' environment, added to the one ROLL makes."""


class Config(Section):
    """A whole run."""

    pipeline: Literal["rlvr", "sft"] = "rlvr"
    """`rlvr`: reinforcement learning from verifiable rewards. `sft`: supervised fine-tuning on conversations."""
    model: ModelConfig = ModelConfig()
    seed: Whole = 0
    """Fixes the order of tasks, the noise of sampling and fresh weights."""
    executor: Literal["local", "ray"] = "local"
    """`local`: one process, roles take turns. `ray`: every worker a process, on this machine or a cluster."""
    devices: Devices = "auto"
    """Devices of roles without devices of their own: `auto` is the GPUs if there are any, else the CPU."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Whether a role that shares its devices leaves them while another has its turn; `auto`: when not all of it fits."""
    deterministic: bool = False
    """The same bits every time, whatever else is running; slower."""
    threads: Whole = 0
    """CPU threads of the numeric work, 0 for one a core."""
    run: RunConfig = RunConfig()
    tasks: TasksConfig = TasksConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    eval: EvalConfig = EvalConfig()
    roles: RolesConfig = RolesConfig()
    weights: WeightsConfig = WeightsConfig()
    ray: RayConfig = RayConfig()
    supervise: SuperviseConfig = SuperviseConfig()

    @model_validator(mode="after")
    def _check_all_is_read(self) -> Config:
        """What the pipeline does not read must be left alone."""
        other = "sft" if self.pipeline == "rlvr" else "rlvr"
        unread = [(name, key) for name in UNREAD[self.pipeline] if (key := _changed(self, name)) is not None]
        if unread:
            rest = f"in pipeline {self.pipeline}: remove it, or write pipeline={other}"
            raise ValueError("\n".join(f"{key} is set, but nothing reads {name} {rest}" for name, key in unread))
        return self

    @model_validator(mode="after")
    def _check_sft(self) -> Config:
        train, data = self.train, self.data
        if self.pipeline != "sft":
            return self
        if train.updates_per_step > 1:
            raise ValueError(
                f"train.updates_per_step is {train.updates_per_step}, but an sft step is one update: write a smaller "
                "data.samples_per_step instead"
            )
        if data.epochs and train.steps != TrainConfig().steps:
            raise ValueError(
                f"train.steps is {train.steps} and data.epochs is {data.epochs:g}, and each is the length of the run: "
                "write one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_across_fields(self) -> Config:
        rollout, train, algorithm = self.rollout, self.train, self.algorithm
        if self.executor == "local" and self.ray.address is not None:
            raise ValueError(
                f"ray.address is {self.ray.address!r}, but executor is local, which uses no Ray: write executor=ray"
            )
        if algorithm.compares_siblings and rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is 1, but {algorithm.name} compares samples of one task: write "
                "rollout.group_size=2 or more"
            )
        if rollout.group_size == 1 and rollout.filter == "no_signal" and algorithm.baseline != "greedy":
            raise ValueError(
                "rollout.group_size is 1, and rollout.filter=no_signal drops groups whose rewards are all equal: write "
                "rollout.filter=none"
            )
        if (rollout.top_p < 1 or rollout.top_k > 0) and not rollout.train_on_truncated:
            raise ValueError(
                "rollout.top_p < 1 or rollout.top_k > 0 samples from a truncated distribution, which biases training: "
                "write rollout.top_p=1 rollout.top_k=0, or rollout.train_on_truncated=true to train on it all the same"
            )
        if rollout.max_staleness and self.executor == "local":
            raise ValueError(
                f"rollout.max_staleness is {rollout.max_staleness}, but executor is local, where generation cannot go on "
                "while training runs: write executor=ray, or rollout.max_staleness=0"
            )
        timed = (rollout.max_staleness, rollout.oversample, rollout.cut == "first", rollout.end_early)
        if self.deterministic and (any(timed) or rollout.policy != "none"):
            raise ValueError(
                "rollout.max_staleness, rollout.oversample, rollout.cut=first, rollout.end_early and rollout.policy make "
                "a batch depend on timing: write deterministic=false, or leave them out"
            )
        if rollout.max_staleness and rollout.order == "tail_rounds":
            raise ValueError(
                "rollout.order=tail_rounds closes a round before the next begins: write rollout.max_staleness=0"
            )
        if rollout.filter_range[0] > rollout.filter_range[1]:
            raise ValueError(f"rollout.filter_range is {rollout.filter_range}: write the lower bound first")
        if train.updates_per_step > rollout.groups_per_step:
            raise ValueError(
                f"train.updates_per_step is {train.updates_per_step}, but a step has only {rollout.groups_per_step} "
                f"groups: write train.updates_per_step={rollout.groups_per_step} or less"
            )
        if train.warmup_steps > train.steps and not self.data.epochs:
            raise ValueError(
                f"train.warmup_steps is {train.warmup_steps}, more than train.steps={train.steps}: "
                f"write train.warmup_steps={train.steps} or less"
            )
        return self


UNREAD = {
    "rlvr": ("data",),
    "sft": (
        *("tasks", "reward", "env", "rollout", "algorithm", "weights"),
        *("eval.temperature", "eval.show", "run.save_samples"),
    ),
}
"""The sections and settings that a pipeline has no use for."""


def _changed(config: Config, name: str) -> str | None:
    """The first setting of a section, or the one of that name, that is not as it is where nothing is written."""
    section, _, field = name.partition(".")
    value, usual = getattr(config, section), Config.model_fields[section].default
    fields = [field] if field else type(value).model_fields
    return next((f"{section}.{key}" for key in fields if getattr(value, key) != getattr(usual, key)), None)
