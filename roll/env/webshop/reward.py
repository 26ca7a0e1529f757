"""The reward of a purchase, as in the paper.

    reward = r_type · (attributes matched + options matched + [price ≤ limit]) / (attributes + options + 1)

`r_type` says whether the bought product is of the wanted kind, judged by nouns: the share of the wanted title's nouns
that are in the bought one's title.

| share of nouns | r_type |
| --- | --- |
| 0 | 0 |
| below 0.1 | 0.1 |
| up to 0.2, searched by other words, and not two categories in common | 0.5 |
| otherwise | 1 |

A wanted attribute is matched by a similar one of the product, or by its own text in the title, features or description; a
wanted option by a similar chosen one. On the axis `size` only equal values match; elsewhere shades of a color match that
color.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roll.env.webshop.catalogue import Goal, Product
from roll.env.webshop.text import nouns, similarity, words

SAME_SIMILARITY = 0.85
"""Texts with a higher similarity mean the same."""

_COLORS = frozenset(words("black white red blue green yellow purple pink brown grey orange beige gold silver"))


@dataclass(frozen=True)
class PurchaseScore:
    """A judged purchase: `kind` is r_type; the numbers of matched attributes and options, and whether the price is within
    the limit."""

    kind: float
    attributes: int
    options: int
    price: bool
    goal_attributes: int
    goal_options: int

    @property
    def reward(self) -> float:
        """From 0 to 1."""
        matched = self.attributes + self.options + self.price
        return self.kind * matched / (self.goal_attributes + self.goal_options + 1)


def score(goal: Goal, product: Product, chosen: Mapping[str, str]) -> PurchaseScore:
    """The score of buying the product with these options for a goal."""
    return PurchaseScore(
        kind=kind_reward(goal.product, product),
        attributes=sum(has_attribute(product, attribute) for attribute in goal.attributes),
        options=sum(any(option_fits(*option, wanted) for option in chosen.items()) for wanted in goal.options),
        price=product.price_with(chosen) <= goal.limit,
        goal_attributes=len(goal.attributes),
        goal_options=len(goal.options),
    )


def kind_reward(wanted: Product, bought: Product) -> float:
    """r_type: whether the bought product is of the wanted kind."""
    named = nouns(wanted.title)
    share = len(named & nouns(bought.title)) / len(named) if named else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    if share > 0.2 or wanted.query == bought.query or len(_categories(wanted) & _categories(bought)) >= 2:
        return 1.0
    return 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether a product has an attribute."""
    listed = any(similarity(attribute, listed_attribute) > SAME_SIMILARITY for listed_attribute in product.attributes)
    return listed or attribute.lower() in product.text


def option_fits(axis: str, value: str, wanted: str) -> bool:
    """Whether a chosen option is the wanted one."""
    if axis.lower() == "size":
        return words(value) == words(wanted)
    if "color" in axis.lower():
        value, wanted = _plain_color(value), _plain_color(wanted)
    return similarity(value, wanted) > SAME_SIMILARITY


def _categories(product: Product) -> set[str]:
    return {category.strip() for category in product.category.split("›")} - {""}


def _plain_color(value: str) -> str:
    """The color of a shade, if it names exactly one: `light blue` is `blue`, `blue and white` stays."""
    named = {word for word in words(value.lower().replace("gray", "grey")) if word in _COLORS}
    return named.pop() if len(named) == 1 else value
