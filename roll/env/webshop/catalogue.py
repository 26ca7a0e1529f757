"""The products and the goals of a shop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from roll.env.webshop.index import Index


@dataclass(frozen=True, eq=False)
class Product:
    """One product.

    `options` are the values that a buyer chooses from, by axis (`color`, `size` …), and `extra` is the surcharge of a
    value. `query` and `category` describe its kind: the words to search for it, and its categories, the widest first
    (`Home › Bedding › Blankets`).
    """

    id: str
    title: str
    price: float
    query: str
    category: str
    attributes: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extra: Mapping[tuple[str, str], float] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    description: str = ""

    @cached_property
    def text(self) -> str:
        """All its text in lower case, where unlisted attributes may be found."""
        return "\n".join((self.title, *self.features, self.description)).lower()

    def price_with(self, chosen: Mapping[str, str]) -> float:
        """The price with these options."""
        return round(self.price + sum(self.extra.get(option, 0.0) for option in chosen.items()), 2)


@dataclass(frozen=True, eq=False)
class Goal:
    """A customer's goal: a product like `product` with these attributes and options, for at most `limit`."""

    instruction: str
    product: Product
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    limit: float = math.inf


class Catalogue:
    """Products by id and in order, the goals of a shop, and its search. Immutable."""

    def __init__(self, products: tuple[Product, ...], goals: tuple[Goal, ...]) -> None:
        self.products = products
        self.goals = goals
        self._by_id = {product.id: product for product in products}
        self._index = Index(_indexed(product) for product in products)

    def __getitem__(self, id: str) -> Product:
        return self._by_id[id]

    def search(self, keywords: str) -> tuple[Product, ...]:
        """The search results, best first, at most 50."""
        return tuple(self.products[number] for number in self._index.search(keywords))


def _indexed(product: Product) -> str:
    """The text by which a product is found. Its title counts twice."""
    options = (value for values in product.options.values() for value in values)
    parts = (product.title, product.title, product.query, *product.attributes, *product.features, product.description)
    return " ".join((*parts, *options))
