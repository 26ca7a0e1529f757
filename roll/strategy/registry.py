"""The Parallel Strategies (arXiv 2506.06122): how a role computes. One registry of those that train or score, one of
engines; both take names of installed packages and classes of the user's.

A backend is the class that a name stands for. The device map asks it how it uses devices, and a worker has it make the
worker's part. Nothing outside a strategy's folder knows a backend by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from roll.config.errors import UserError
from roll.config.registry import Registry
from roll.config.schema import Config
from roll.config.workers import INFER_STRATEGIES, TRAIN_STRATEGIES, RoleConfig

if TYPE_CHECKING:  # the device map imports neither torch nor transformers for its first checks
    from transformers import PretrainedConfig
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from roll.cluster.worker import WorkerPlacement
    from roll.strategy.infer.base import InferStrategy
    from roll.strategy.infer.engine_role import EngineRole
    from roll.strategy.train.base import RewardStrategy, TrainStrategy, ValueStrategy
    from roll.strategy.train.sharded.process_group import RankGroup

TRAIN_ROLES = ("actor_train", "critic", "reference", "reward_model")
"""Roles computed by a training strategy, with or without gradients."""
INFER_ROLES = ("actor_infer", "judge")
"""Roles computed by an engine."""

AUTO_TRAIN, AUTO_INFER = TRAIN_STRATEGIES, INFER_STRATEGIES[0]
"""What `auto` stands for: of trainers the first on one device, the second over the ranks of several."""


class TrainBackend:
    """How a role trains, or scores without gradients. `config.roles` has the settings of the role, which is
    `placement.role`. A backend makes what it can: a role that needs another part is refused."""

    over_ranks: ClassVar[bool] = False
    """Whether the workers of a role are the ranks of one model, on a device each. Otherwise a role is one worker on one
    device."""

    @classmethod
    def warm_up(cls) -> None:
        """Imports what a trainer needs, in a process that may become one."""

    @classmethod
    def policy(
        cls, config: Config, placement: WorkerPlacement, group: RankGroup | None, *, trainable: bool
    ) -> TrainStrategy:
        """The actor, or without `trainable` the reference. `group`: the process group of the ranks, if there are any."""
        raise cls._cannot(placement)

    @classmethod
    def critic(cls, config: Config, placement: WorkerPlacement, group: RankGroup | None) -> ValueStrategy:
        raise cls._cannot(placement)

    @classmethod
    def scorer(
        cls, config: Config, placement: WorkerPlacement, group: RankGroup | None
    ) -> tuple[RewardStrategy, Tokenizer, int]:
        """The reward model, its tokenizer, and the longest conversation it takes in tokens."""
        raise cls._cannot(placement)

    @classmethod
    def _cannot(cls, placement: WorkerPlacement) -> UserError:
        role = placement.role
        return UserError(f"roles.{role}.strategy: {cls.__name__} cannot compute the role {role}: write another strategy")


class InferBackend:
    """How a role generates: the engine of a worker."""

    parallel: ClassVar[frozenset[str]] = frozenset()
    """The dimensions of `parallel` that an engine divides its model over: `tensor` is how many GPUs an engine has."""
    takes_arguments: ClassVar[bool] = False
    """Whether `engine_args` are its own."""
    in_place: ClassVar[bool] = False
    """Whether it serves the very tensors that `load_weights` is given, those of a trainer in the same process. Otherwise
    it copies them into memory of its own."""
    starting: ClassVar[str] = ""
    """What starts with it, for the display: `vLLM`."""
    host_bytes: ClassVar[int] = 0
    """Host memory of an engine's own processes."""
    loads_through_host: ClassVar[bool] = False
    """Whether a copy of the weights passes through host memory."""

    @classmethod
    def check(cls, config: Config, role: str) -> None:
        """Raises `UserError` if the engine cannot serve the role as it is configured."""

    @classmethod
    def cache_bytes(
        cls, shape: PretrainedConfig, itemsize: int, settings: RoleConfig, running: int, response: int
    ) -> int | None:
        """The KV cache that an engine allocates on each of its devices, for `running` sequences at once. None if it grows
        as that of the embedded engine does."""
        return None

    @classmethod
    def engine(cls, config: Config, placement: WorkerPlacement, role: EngineRole, *, own_weights: bool) -> InferStrategy:
        """Without `own_weights` the trainer's tensors are in the same process, and `load_weights` gives them."""
        raise NotImplementedError


TRAIN = Registry(
    "strategy",
    "roll.train_strategies",
    {name: f"roll.strategy.train.backends:{name.title()}Backend" for name in TRAIN_STRATEGIES},
)
INFER = Registry(
    "strategy",
    "roll.infer_strategies",
    {name: f"roll.strategy.infer.backends:{name.title()}Backend" for name in INFER_STRATEGIES},
)


def train_backend(name: str, role: str, root: str = "") -> type[TrainBackend]:
    found: type[TrainBackend] = _backend(TRAIN, TrainBackend, name, role, root)
    return found


def infer_backend(name: str, role: str, root: str = "") -> type[InferBackend]:
    found: type[InferBackend] = _backend(INFER, InferBackend, name, role, root)
    return found


def check_names(config: Config) -> None:
    """Refuses names of strategies that are not known. Imports none of them."""
    for roles, registry in ((TRAIN_ROLES, TRAIN), (INFER_ROLES, INFER)):
        for role in roles:
            written = getattr(config.roles, role).strategy
            if written not in ("auto", *TRAIN.own, *INFER.own):
                registry.check(written, f"roles.{role}.strategy")


def _backend(registry: Registry, base: type[Any], name: str, role: str, root: str) -> Any:
    setting = f"roles.{role}.strategy"
    found = registry.find(name, setting, root)
    if not isinstance(found, type) or not issubclass(found, base):
        does = "generates" if base is InferBackend else "trains or scores"
        raise UserError(
            f"{setting} is {name!r}, which is no {base.__name__}, but {role} {does}: write a subclass of "
            f"roll.strategy.registry.{base.__name__}"
        )
    return found


def trainer_of(config: Config, placement: WorkerPlacement) -> type[TrainBackend]:
    """The backend of a worker that trains or scores."""
    return _trainer_of(config, placement.role, over_ranks=placement.mesh is not None)


def engine_backend_of(config: Config, role: str = "actor_infer") -> type[InferBackend]:
    """The backend of a role that generates."""
    written = getattr(config.roles, role).strategy
    return infer_backend(AUTO_INFER if written == "auto" else written, role, config.root)


def warm_up(config: Config, role: str, over_ranks: bool) -> None:
    """Imports everything that a trainer of the role needs, without loading weights."""
    from roll.model import loading

    loading.warm_up(config.model.path)
    _trainer_of(config, role, over_ranks).warm_up()


def _trainer_of(config: Config, role: str, over_ranks: bool) -> type[TrainBackend]:
    written = getattr(config.roles, role).strategy
    return train_backend(AUTO_TRAIN[over_ranks] if written == "auto" else written, role, config.root)
