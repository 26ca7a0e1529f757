"""Every setting of a run, its default and a line on what it does.

`docs/reference/config.md` is generated from these models. A section with a `short` field may be written as that field
alone: `model: smollm2-135m` means `model: {path: smollm2-135m}`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from roll.config.algorithm import AlgorithmConfig
from roll.config.domains import DomainConfig, SourceConfig
from roll.config.evaluation import EvalConfig, domain_of
from roll.config.reward import RewardConfig, RewardRule
from roll.config.rollout import RolloutConfig
from roll.config.section import (
    BelowOne,
    Count,
    Devices,
    Limit,
    Mode,
    Names,
    NonNegative,
    Positive,
    Processes,
    Seconds,
    Section,
    Seed,
    Threads,
    Whole,
)
from roll.config.workers import FaultToleranceConfig, RayConfig, RolesConfig, WeightSyncConfig


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the model's own weights."""

    short: ClassVar[str | None] = "rank"

    rank: Whole = 0
    """Rank of their matrices: what they can learn, and what they cost. 0: no adapters, all weights are trained."""
    alpha: NonNegative = 0.0
    """What adapters add is multiplied by alpha / rank; 0 is twice the rank."""
    dropout: BelowOne = 0.0
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


class TasksConfig(SourceConfig):
    """What to solve."""

    source: str = "addition"
    """`addition`, `last_character`, `echo`, `environment`, `reasoning_gym:family`, a `.jsonl`, `.json`, `.csv`, `.tsv` or
    `.parquet` file, `hf:dataset`, or a function: `module:name` or `file.py:name` (`docs/guides/tasks.md`)."""
    domain_weights: dict[str, Positive] = Field(default_factory=dict)
    """Share of each domain among the groups, by name; empty: every task equally often."""
    sampler: Literal["epochs", "solve_rate"] = "epochs"
    """`epochs`: every task once an epoch. `solve_rate`: as `epochs`, but tasks that were recently always or never solved
    are often skipped."""
    max_prompt_tokens: Whole = 0
    """Longest prompt, in tokens; 0: as long as `max_new_tokens` still fit into the model's context."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """How a task with a longer prompt is handled: `refuse` the run, or `drop` the task."""


class DataConfig(Section):
    """Conversations to imitate, for `pipeline: sft`."""

    short: ClassVar[str | None] = "source"

    source: str = "addition"
    """A `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` file, `hf:dataset`, a source of tasks with answers (`addition`,
    `last_character`, `echo`, `reasoning_gym:family`), `demonstrations` or `dagger` (an environment's expert), or a
    function: `module:name` or `file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source; of a file: the names of its columns, and the share `held_out`."""
    samples_per_step: Count = 32
    """Conversations that train one step."""
    epochs: NonNegative = 0.0
    """Times every conversation is trained on, which makes the number of steps; 0: `train.steps` does."""
    max_tokens: Whole = 0
    """Longest conversation, in tokens; 0 for the model's context."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """How a longer conversation is handled: `refuse` the run, `drop` it, or `cut` off its end."""


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
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    """AdamW's moment decays."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    clip_grad_norm: Limit = 1.0
    """Largest norm of the gradient; `.inf`: any."""
    max_skipped_in_a_row: Count = 5
    """Steps in a row with an update skipped, because its loss or gradient was not finite, after which the run stops."""
    router_balance_loss: NonNegative = 0.0
    """For mixtures of experts: weight of the loss that makes routers use their experts evenly within each sample
    (DeepSeek-V3's; about 0.001)."""
    router_bias_rate: NonNegative = 0.0
    """For mixtures whose routers have a bias (DeepSeek-V3, GLM-4.5): how far an update moves it towards experts with few
    tokens (about 0.001); 0 leaves it as it is."""
    updates_per_step: Count = 1
    """Parts a step's batch is cut into, an optimizer step each, the critic's too. Several updates in a step, of parts or
    epochs, are held to the policy that the step began with: its log-probs are computed first."""
    epochs_per_step: Count = 1
    """Times the parts of a step's batch are gone through."""
    micro_batch_tokens: Whole = 0
    """Distinct tokens in a micro-batch; a shared prefix counts once. Changes memory and speed, never the gradient. 0 is
    4096 on a CPU, and on a GPU what fits in its memory, at most 131072."""
    share_prefixes: bool = True
    """Compute what samples of a micro-batch begin with in common once. Changes speed, never the gradient."""
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Compute a layer's activations again in the backward pass instead of keeping them: slower, much less memory. `auto`:
    where a GPU has too little memory otherwise."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the decoder's layers with `torch.compile`; `auto`: on a GPU in 16 bits, without adapters
    and `parallel.tensor`."""

    @property
    def several_updates(self) -> bool:
        """Whether a step makes more than one optimizer step, so that its later ones are off-policy."""
        return self.updates_per_step * self.epochs_per_step > 1


class KeepConfig(Section):
    """What a run keeps of what it writes; the rest is deleted as it goes (`docs/guides/runs.md`)."""

    checkpoints: Count = 2
    """Newest checkpoints kept."""
    checkpoints_every: Whole = 0
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    best: bool = False
    """Keep the checkpoint with the best held-out result besides, of those saved right after an evaluation."""
    samples: Whole = 0
    """Newest steps whose samples are kept; 0: all."""
    trace_mb: Whole = 128
    """Trace files kept, in MiB, the oldest deleted first; 0: all. A file ends at a quarter of it."""
    log_mb: Count = 64
    """Limit of each process log, in MiB: a third of it keeps the beginning, the rest the newest lines."""


class RunConfig(Section):
    """Where the run lives and what it keeps."""

    short: ClassVar[str | None] = "dir"

    dir: str = "runs/run"
    """The run's folder."""
    mode: Mode = "0700"
    """Who may read it, as for `chmod`: `0700` is you alone, `0750` your group too, `0755` everybody. Its files, and what
    `roll export` makes of it, are as readable as it is."""
    checkpoint_every: Whole = 20
    """Steps between checkpoints, 0 for only at the end."""
    keep: KeepConfig = KeepConfig()
    tensorboard: bool = True
    """Write TensorBoard events."""
    trackers: tuple[str, ...] = ()
    """More trackers, which get the metrics of every step: classes of yours, `module:Class` or `file.py:Class`, or names
    that installed packages offer (docs/guides/extending.md)."""
    save_samples: bool = True
    """Write every sample's text, tokens and rewards."""
    trace: bool = True
    """Write `trace.json`: every state of every sample, for Perfetto."""
    curve: bool = True
    """Draw `curve.png`, what was learned over the steps, at the end."""


class EnvConfig(Section):
    """How environments run, for tasks that have one."""

    processes: Processes = 1
    """Processes of each environment worker."""
    per_process: Count = 64
    """Episodes a process holds at once."""
    reset_deadline_s: Seconds = 60.0
    """Seconds an environment may take to begin an episode; then its process is killed and replaced."""
    step_deadline_s: Seconds = 30.0
    """Seconds an environment may take for one step; then its process is killed and replaced."""
    limits: dict[str, Count] = Field(default_factory=dict)
    """Most episodes of an environment at once in a worker, by the environment's name; others are not held up."""
    memory_mb: Whole = 0
    """Memory of an environment process, 0 for no limit."""
    max_turns: Count = 16
    """Most actions of an episode."""
    max_tokens: Whole = 0
    """Longest conversation of an episode, in tokens, 0 for the model's context: one that reaches it is over."""
    window: Whole = 0
    """Turns before the present one that the model sees beside the opening, 0 for all. Where some are left out, each turn
    is trained in a context of its own."""


class Settings(Section):
    """All settings of a run, which may still contradict each other: `Config` refuses those that do."""

    pipeline: str = "rlvr"
    """`rlvr`: reinforcement learning from verifiable rewards. `sft`: supervised fine-tuning on conversations. Or a class
    of yours, `module:Class` or `file.py:Class`, or the name of one that an installed package offers
    (docs/guides/extending.md)."""
    model: ModelConfig = ModelConfig()
    seed: Seed = 0
    """Fixes the order of tasks, the noise of sampling and fresh weights."""
    executor: Literal["local", "ray"] = "local"
    """`local`: one process, in which roles alternate. `ray`: every worker a process, on this machine or a cluster."""
    devices: Devices = "auto"
    """Devices of roles without devices of their own: `auto` is the GPUs if there are any, else the CPU."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Whether a role is offloaded from shared devices while another role needs them; `auto`: only if not everything
    fits."""
    deterministic: bool = False
    """On the CPU, the same bits every time, whatever else the machine does; slower. Not with `strategy: vllm`."""
    threads: Threads = 0
    """CPU threads of the numeric work, 0 for one per core."""
    run: RunConfig = RunConfig()
    tasks: TasksConfig = TasksConfig()
    domains: dict[str, DomainConfig] = Field(default_factory=dict)
    """Kinds of tasks by name, in place of `tasks` and `reward`: each with its own tasks, weight, reward, limits and
    filter (`docs/guides/tasks.md`)."""
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    eval: EvalConfig = EvalConfig()
    roles: RolesConfig = RolesConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    ray: RayConfig = RayConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    root: str = ""
    """Folder that relative names of files and code are found from. Empty: the folder of the YAML file; in Python, of a
    config without a file, the working directory."""

    def rollout_of(self, domain: str) -> RolloutConfig:
        """How samples of a domain's tasks are made."""
        return self.rollouts_by_domain.get(domain, self.rollout)

    @property
    def rollouts_by_domain(self) -> dict[str, RolloutConfig]:
        """How samples of domains and of sets to evaluate on are made, by the domain of their tasks."""
        rollouts = {name: domain.rollout(self.rollout) for name, domain in self.domains.items()}
        for name, each in self.eval.sets.items():
            chosen = {"max_new_tokens": each.max_new_tokens, "stop": each.stop}
            changes = {field: value for field, value in chosen.items() if value is not None}
            rollouts[domain_of(name)] = self.rollout.model_copy(update=changes)
        return rollouts

    @property
    def longest_evaluated(self) -> int:
        """The most new tokens of a response, in training or in an evaluation."""
        return max(
            self.longest_response, *(self.rollout_of(domain_of(name)).max_new_tokens for name in self.eval.sets), 0
        )

    @property
    def reward_rules(self) -> dict[str, RewardRule]:
        """The rewards of the run and of its evaluations, each by the setting that it is under."""
        rules: dict[str, RewardRule] = {f"domains.{name}.reward": domain.reward for name, domain in self.domains.items()}
        set_rules = {f"eval.sets.{name}.reward": each.reward for name, each in self.eval.sets.items()}
        return (rules or {"reward": self.reward}) | {where: rule for where, rule in set_rules.items() if rule is not None}

    @property
    def longest_response(self) -> int:
        """The most new tokens of a response in any domain."""
        return max(
            (self.rollout_of(domain).max_new_tokens for domain in self.domains), default=self.rollout.max_new_tokens
        )

    @property
    def domain_mix(self) -> dict[str, float]:
        """Weights of the domains that are trained on; empty where they have none."""
        weights = {name: domain.weight for name, domain in self.domains.items() if domain.weight > 0}
        return weights or self.tasks.domain_weights

    @property
    def scoring_roles(self) -> dict[str, str]:
        """The roles whose models give parts of rewards, each with a setting that asks for it."""
        roles: dict[str, str] = {}
        for where, rule in self.reward_rules.items():
            for part, role in rule.model_roles.items():
                roles.setdefault(role, f"{where}.parts.{part}" if part else where)
        return roles

    @property
    def reward_label(self) -> str:
        """What the rewards are called where one line must do."""
        labels = ", ".join(f"{domain.reward.label} ({name})" for name, domain in self.domains.items())
        return labels or self.reward.label
