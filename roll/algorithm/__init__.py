"""Advantages, losses and the algorithms made of them: pure functions, and one class that puts them together."""

from roll.algorithm.base import Algorithm, make_algorithm
from roll.algorithm.streams import CorrectionSpec, CreditSpec, LossSpec, Streams, TokenLoss

__all__ = ["Algorithm", "CorrectionSpec", "CreditSpec", "LossSpec", "Streams", "TokenLoss", "make_algorithm"]
