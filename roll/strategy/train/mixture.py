"""Training of a mixture-of-experts policy: router replay, and balancing of the experts.

If a batch has the column `routes`, log-probs and updates route packed tokens to the experts that the engine chose while
sampling (`roll.model.routing`).

The balance loss is DeepSeek-V3's, per sequence. For a sample with T tokens, f_e is the number of its tokens that expert e
got, times experts / (chosen · T), and p_e the mean share of scores that its tokens give to e. Its loss, Σ_e f_e · p_e, is
1 if all experts are used equally; the loss of an update is the mean over its samples and over layers. The gradient flows
through p only, so each packed token adds a product of its own shares and a constant: the sum is the same for any
micro-batches and ranks.

The bias is DeepSeek-V3's too: after an update, the bias of each expert that got more tokens than the mean is lowered by
`router_bias_rate`, and that of the others is raised. It affects only the choice of experts, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from roll.config.errors import UserError
from roll.config.schema import TrainConfig
from roll.data.batch import Batch
from roll.model.routing import RouterPass, Routers
from roll.strategy.train.layer_wrapping import Within
from roll.strategy.train.microbatch import MicroBatch, SampleRows
from roll.strategy.train.work_split import SplitRows, WorkSplit

BIAS = "e_score_correction_bias"
"""The name of a router's bias buffer in `transformers`."""


@dataclass(frozen=True)
class SampleBalance:
    """The balance loss of the samples of a micro-batch."""

    samples: SampleRows
    scale: float
    """The loss's coefficient divided by the number of samples and layers."""
    sum: Callable[[Tensor], Tensor]
    """Sums over the ranks that have other packed tokens of the same samples, in place."""

    @torch.no_grad()
    def slopes(self, choices: Tensor, experts: int) -> Tensor:
        samples, chosen = self.samples, choices.shape[1]
        used = torch.zeros(len(choices), experts, device=choices.device).scatter_(1, choices.long(), 1.0)
        own = samples.own.float()[:, None]
        counts = used.new_zeros(len(samples.lengths), experts)
        counts.index_add_(0, samples.sample, used[samples.row] * own)
        counts = self.sum(counts) * (self.scale * experts / chosen) / samples.lengths.square()[:, None]
        return torch.zeros_like(used).index_add_(0, samples.row, counts[samples.sample] * own)


class Mixture:
    """The routers of a policy in training."""

    def __init__(self, model: nn.Module, config: TrainConfig, *, adapted: bool = False) -> None:
        self._routers, self._config = Routers(model), config
        if config.router_balance_loss and not self._routers.layers:
            raise UserError("train.router_balance_loss: the model has no experts: write train.router_balance_loss=0")
        if config.router_bias_rate:
            check_biases(self._routers)
            if adapted:
                raise UserError(
                    "train.router_bias_rate: adapters leave the model's own weights as they are, and the bias is one of "
                    "them: write train.router_bias_rate=0"
                )

    def stats(self, batch: Batch, device: torch.device) -> RouterStats | None:
        """Router statistics for an update with the batch; None for a model without experts."""
        if not self._routers.layers:
            return None
        return RouterStats(self._routers, int((batch.sum_tokens(batch.loss_mask) > 0).sum()), device)

    def router_pass(self, rows: SplitRows, *, replays: bool, stats: RouterStats | None) -> RouterPass | None:
        """The replayed routes and the balance loss of a pass over these packed tokens. With `stats`, the routers' choices
        are counted."""
        micro, routers, coefficient = rows.micro, self._routers, self._config.router_balance_loss
        if not routers.layers:
            return None
        router_pass = RouterPass(routes=self._routes(micro) if replays else None)
        if stats is not None:
            router_pass.uses = micro.uses
            if micro.samples is not None and coefficient:
                scale = coefficient / (stats.samples * routers.layers)
                router_pass.balance = SampleBalance(micro.samples, scale, rows.sum)
        return router_pass

    def within(self, router_pass: RouterPass) -> Within:
        """The context that layers are computed in."""
        return partial(self._routers.within, router_pass)

    def end_update(self, stats: RouterStats) -> None:
        """Moves the routers' biases, after an applied update."""
        if self._config.router_bias_rate:
            move_biases(self._routers, stats.load, self._config.router_bias_rate)

    def _routes(self, micro: MicroBatch) -> Tensor | None:
        if micro.routes is None:
            return None
        shape = self._routers.layers, self._routers.chosen
        assert micro.routes.shape[1] == shape[0] * shape[1], "the sampler has the trainer's model"
        return micro.routes.view(-1, *shape)


class RouterStats:
    """Router statistics of an update, summed on the device over its passes."""

    def __init__(self, routers: Routers, samples: int, device: torch.device) -> None:
        self.samples = samples
        """Number of samples that the whole update trains on."""
        self.load = torch.zeros(routers.layers, routers.experts, dtype=torch.float64, device=device)
        """Tokens that each expert of each layer got; a packed token counts once per sample that shares it."""
        self._chosen = routers.chosen
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # entropies, balance loss, tokens

    def add(self, done: RouterPass) -> None:
        if not done.load:  # routers that do not report their choices
            return
        assert len(done.load) == len(self.load), "every layer's router is asked in a pass"
        self.load += torch.stack([done.load[layer] for layer in range(len(self.load))])
        self._sums[0] += torch.stack(list(done.entropy.values())).sum()
        if done.balance_loss:
            self._sums[1] += torch.stack(list(done.balance_loss.values())).sum()
        assert done.uses is not None
        self._sums[2] += done.uses.sum()

    def join(self, split: WorkSplit) -> None:
        """Adds the statistics of the ranks that have other packed tokens."""
        whole = split.sum_rows(torch.cat([self.load.flatten(), self._sums]))
        self.load, self._sums = whole[:-3].view_as(self.load), whole[-3:]

    def metrics(self) -> dict[str, float]:
        """`expert_load_max`: tokens of the busiest expert over the mean of its layer, in the worst layer; `experts_idle`:
        the share of experts that got no token; `router_entropy`: mean entropy of the routers' distributions, in nats;
        `dropped_tokens`: choices of an expert that no expert computed."""
        entropy, loss, tokens = self._sums.tolist()
        if not tokens:
            return {}
        mean = self.load.mean(1).clamp_min(1e-30)
        return {
            "expert_load_max": float((self.load.amax(1) / mean).max()),
            "experts_idle": float((self.load == 0).double().mean()),
            "router_entropy": entropy / (tokens * len(self.load)),
            "router_balance_loss": loss,
            "dropped_tokens": tokens * len(self.load) * self._chosen - float(self.load.sum()),
        }


@torch.no_grad()
def move_biases(routers: Routers, load: Tensor, rate: float) -> None:
    """Raises the bias of experts that got fewer tokens than the mean of their layer, and lowers that of the others."""
    for router, tokens in zip(routers.modules, load, strict=True):
        bias: Tensor = getattr(router, BIAS)
        bias += rate * torch.sign(tokens.mean() - tokens).to(bias)


def check_biases(routers: Routers) -> None:
    """Raises if the model's routers have no bias to move."""
    if not routers.layers or not all(hasattr(router, BIAS) for router in routers.modules):
        kind = (
            "has no experts"
            if not routers.layers
            else f"has routers without a bias ({type(routers.modules[0]).__name__})"
        )
        raise UserError(
            f"train.router_bias_rate: the model {kind}: write train.router_bias_rate=0"
            + ("" if not routers.layers else ", and train.router_balance_loss for a loss instead")
        )
