"""Advantages, losses and the recipes made of them: pure functions, and small classes that name them."""

from roll.algorithm.base import Algorithm, make_algorithm
from roll.algorithm.streams import LossSpec, Streams, TokenLoss

__all__ = ["Algorithm", "LossSpec", "Streams", "TokenLoss", "make_algorithm"]
