"""What a purchase is worth: the paper's reward.

    reward = r_type · (attributes matched + options matched + [price ≤ limit]) / (attributes + options + 1)

`r_type` says whether the thing bought is of the kind that was wanted, judged by nouns: the share of the wanted title's
that the bought one's has.

| share of nouns | r_type |
| --- | --- |
| 0 | 0 |
| below 0.1 | 0.1 |
| up to 0.2, searched by other words, and not two shelves in common | 0.5 |
| otherwise | 1 |

A wanted attribute is matched by one like it among the product's, or by itself in its title, features or description; a
wanted option by one like it among those chosen. On the axis `size` only the same will do; elsewhere shades of a color are
that color.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roll.env.webshop.catalogue import Goal, Product
from roll.env.webshop.text import alike, nouns, words

ALIKE = 0.85
"""Texts more alike than this mean the same."""

_COLORS = frozenset(words("black white red blue green yellow purple pink brown grey orange beige gold silver"))


@dataclass(frozen=True)
class PurchaseScore:
    """A purchase, judged: `kind` is r_type; of what was asked for, how many attributes and options were matched, and
    whether the price was."""

    kind: float
    attributes: int
    options: int
    price: bool
    asked_attributes: int
    asked_options: int

    @property
    def reward(self) -> float:
        """From 0 to 1."""
        matched = self.attributes + self.options + self.price
        return self.kind * matched / (self.asked_attributes + self.asked_options + 1)


def score(goal: Goal, product: Product, chosen: Mapping[str, str]) -> PurchaseScore:
    """What buying the product with these options is worth to who has the goal."""
    return PurchaseScore(
        kind=kind_reward(goal.product, product),
        attributes=sum(has_attribute(product, attribute) for attribute in goal.attributes),
        options=sum(any(option_fits(*option, wanted) for option in chosen.items()) for wanted in goal.options),
        price=product.price_with(chosen) <= goal.limit,
        asked_attributes=len(goal.attributes),
        asked_options=len(goal.options),
    )


def kind_reward(wanted: Product, bought: Product) -> float:
    """r_type: whether the thing bought is such a thing as was wanted."""
    named = nouns(wanted.title)
    share = len(named & nouns(bought.title)) / len(named) if named else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    if share > 0.2 or wanted.query == bought.query or len(_shelves(wanted) & _shelves(bought)) >= 2:
        return 1.0
    return 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether a product is what an attribute says."""
    listed = any(alike(attribute, own) > ALIKE for own in product.attributes)
    return listed or attribute.lower() in product.text


def option_fits(axis: str, value: str, wanted: str) -> bool:
    """Whether an option that was chosen is the one that was wanted."""
    if axis.lower() == "size":
        return words(value) == words(wanted)
    if "color" in axis.lower():
        value, wanted = _plain_color(value), _plain_color(wanted)
    return alike(value, wanted) > ALIKE


def _shelves(product: Product) -> set[str]:
    return {shelf.strip() for shelf in product.category.split("›")} - {""}


def _plain_color(value: str) -> str:
    """The color that a shade is of, if it names one alone: `light blue` is `blue`, `blue and white` is itself."""
    named = {word for word in words(value.lower().replace("gray", "grey")) if word in _COLORS}
    return named.pop() if len(named) == 1 else value
