"""What a shop sells, and what its customers want."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from roll.env.webshop.index import Index


@dataclass(frozen=True, eq=False)
class Product:
    """One thing on sale.

    `options` are the values that a buyer chooses among, by axis (`color`, `size` …), and `extra` is what a value adds to
    the price. `query` and `category` say what kind of thing it is: the words one would search it by, and the shelves it
    stands on, the widest first (`Home › Bedding › Blankets`).
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
        """All that it says of itself, in lower case: where an attribute may be found that is not listed as one."""
        return "\n".join((self.title, *self.features, self.description)).lower()

    def price_with(self, chosen: Mapping[str, str]) -> float:
        """What it costs with these options."""
        return round(self.price + sum(self.extra.get(option, 0.0) for option in chosen.items()), 2)


@dataclass(frozen=True, eq=False)
class Goal:
    """What a customer wants: a thing like `product` with these attributes and options, at no more than `limit`."""

    instruction: str
    product: Product
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    limit: float = math.inf


class Catalogue:
    """Products, by id and in order, the goals of a shop, and its search. Never changes."""

    def __init__(self, products: tuple[Product, ...], goals: tuple[Goal, ...]) -> None:
        self.products = products
        self.goals = goals
        self._by_id = {product.id: product for product in products}
        self._index = Index(_indexed(product) for product in products)

    def __getitem__(self, id: str) -> Product:
        return self._by_id[id]

    def search(self, keywords: str) -> tuple[Product, ...]:
        """The products found, best first, 50 at most."""
        return tuple(self.products[number] for number in self._index.search(keywords))


def _indexed(product: Product) -> str:
    """What a product is found by. Its title counts twice."""
    options = (value for values in product.options.values() for value in values)
    parts = (product.title, product.title, product.query, *product.attributes, *product.features, product.description)
    return " ".join((*parts, *options))
