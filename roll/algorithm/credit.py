"""From advantages of samples to advantages of tokens: pure functions over a batch with token columns, run in the trainer.

Invariants: tokens that were not sampled get 0; the sampled tokens of a sample follow each other, whatever observations
are in between; sums over the step (whitening) are over all of its sampled tokens, before the batch is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll.algorithm.advantages import returns_of, whitened
from roll.algorithm.kl import kl_estimate
from roll.algorithm.loss_inputs import CreditSpec, Estimator
from roll.algorithm.reward_shaping import Floats
from roll.data.batch import Batch
from roll.data.remote_columns import Indices


@dataclass(frozen=True)
class TokenCredit:
    """One value per token of the batch; `returns` are the critic's targets, if there is a critic."""

    advantages: Floats
    returns: Floats | None = None


def token_credit(batch: Batch, spec: CreditSpec) -> TokenCredit:
    sampled = np.flatnonzero(batch.loss_mask)
    counts = batch.sum_tokens(batch.loss_mask).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)])  # of sampled tokens alone
    returns = None
    if spec.kind == "sample":
        values = _of_samples(batch, sampled, counts)
    else:
        rewards = _token_rewards(batch, sampled, offsets, spec)
        if spec.kind == "returns":
            values = returns_of(rewards, offsets, spec.discount)
        else:
            values, returns = gae(rewards, _sampled(batch, "values", sampled), offsets, spec.discount, spec.gae_lambda)
    if spec.whiten:
        values = whitened(values)
    if spec.clip is not None:
        values = np.clip(values, -spec.clip, spec.clip)
    return TokenCredit(_scatter(values, sampled, batch), None if returns is None else _scatter(returns, sampled, batch))


def gae(rewards: Floats, values: Floats, offsets: Indices, discount: float, lam: float) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (Schulman et al., 2015, arXiv 1506.02438) within each row of tokens.

    The value after the last token of a row is 0. Returns are advantages plus values.
    """
    following = np.append(values[1:], 0.0)
    following[offsets[1:][np.diff(offsets) > 0] - 1] = 0.0
    advantages = returns_of(rewards + discount * following - values, offsets, discount * lam)
    return advantages, advantages + values


def sample_kl(batch: Batch, estimator: Estimator) -> Floats:
    """The KL against the reference, summed over each sample's sampled tokens."""
    sampled = np.flatnonzero(batch.loss_mask)
    return np.asarray(batch.sum_tokens(_scatter(_token_kl(batch, sampled, estimator), sampled, batch)))


def _of_samples(batch: Batch, sampled: Indices, counts: Indices) -> Floats:
    """The advantage of each sampled token: its turn's if there are turn advantages, else its sample's."""
    if "turn_advantage" not in batch:
        return np.repeat(np.asarray(batch["advantage"], np.float64), counts)
    return np.asarray(batch["turn_advantage"], np.float64)[_turns(batch, sampled)]


def _token_rewards(batch: Batch, sampled: Indices, offsets: Indices, spec: CreditSpec) -> Floats:
    """Per-token rewards: the KL penalty at each token, a turn's reward at its last token, and the rest of the sample's
    score at its last token."""
    rewards = np.zeros(len(sampled))
    if spec.kl_coef > 0:
        rewards -= spec.kl_coef * _token_kl(batch, sampled, spec.kl_estimator)
    scores = np.asarray(batch["advantage"], np.float64)
    if spec.kind == "gae" and "turn_reward" in batch:
        turn_rewards = np.asarray(batch["turn_reward"], np.float64)
        turns = _turns(batch, sampled)
        last_of_turn = np.append(turns[1:] != turns[:-1], True) if len(turns) else np.zeros(0, np.bool_)
        rewards[last_of_turn] += turn_rewards[turns[last_of_turn]]
        paid_rewards = np.zeros(len(batch))
        owner = np.repeat(np.arange(len(batch)), np.diff(batch.turn_offsets))
        np.add.at(paid_rewards, owner[turns[last_of_turn]], turn_rewards[turns[last_of_turn]])
        scores = scores - paid_rewards
    has_tokens = np.diff(offsets) > 0
    rewards[offsets[1:][has_tokens] - 1] += scores[has_tokens]
    return rewards


def _token_kl(batch: Batch, sampled: Indices, estimator: Estimator) -> Floats:
    """From the proximal log-probs if the batch has them (a step with several updates), else from the sampler's."""
    if "ref" not in batch:
        raise ValueError("a KL penalty needs the reference's log-probs: the batch has no column 'ref'")
    column = "proximal" if "proximal" in batch else "behaviour"
    return kl_estimate(_sampled(batch, column, sampled), _sampled(batch, "ref", sampled), estimator)


def _turns(batch: Batch, sampled: Indices) -> Indices:
    """The index of each sampled token's turn in the turn columns."""
    first = np.repeat(batch.turn_offsets[:-1], batch.lengths)
    return np.asarray((first + batch["turn"])[sampled], np.int64)


def _sampled(batch: Batch, name: str, sampled: Indices) -> Floats:
    return np.asarray(batch[name][sampled], np.float64)


def _scatter(values: Floats, sampled: Indices, batch: Batch) -> Floats:
    whole = np.zeros(batch.tokens)
    whole[sampled] = values
    return whole
