"""A catalogue generated from a seed: the same seed gives the same catalogue on any machine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from roll.env.webshop.catalogue import Catalogue, Goal, Product
from roll.env.webshop.catalogue_data import KINDS, Kind
from roll.env.webshop.text import words

ROUNDS = 4
"""Maximum number of goals per product."""
_MAX_ATTEMPTS = 20
"""Maximum number of attempts to draw a goal that no other customer has."""

_SYLLABLES = words(
    "ba be bo da del do el fa fi ga go ha ka ki ko la lo lu ma mi mo na ni no pa pe ra ri ro sa se ta ti va"
)
_ENDINGS = words("ra lo x na ris ven dor lia mo tec")
_LINES = words(
    "aria atlas bliss cedar comet ember fable grove harbor iris juno lumen nova orbit pearl quest sierra tempo zen"
)
_BRANDS_PER_KIND = 12
_FEATURES = (
    "{attribute}: made that way from the first piece to the last",
    "{attribute}, and tested for it by our own team",
    "{attribute}: what our buyers praise most",
    "Truly {attribute}, as the name {line} stands for",
)
_OPENERS = (
    "The {line} by {brand} is a favorite for {use}.",
    "{brand} made the {line} with {use} in mind.",
    "Whether for {use} or {other}, the {line} will not let you down.",
    "Meet the {line}: {brand} thought of {use} and of {other}.",
)
_CLOSERS = (
    "Write to us within thirty days and get your money back.",
    "Comes in a box that is ready to be given away.",
    "Colors may differ a little from your screen.",
    "Please check the chart before you order.",
    "A family business since {year}.",
)

_WISHES = ("i need", "i want", "i am looking for", "find me", "i would like to buy", "please get me", "i'm searching for")
_BUDGETS = (
    "and price lower than {limit:.2f} dollars",
    "for no more than {limit:.2f} dollars",
    "and it should cost {limit:.2f} dollars or less",
    "and my budget is {limit:.2f} dollars",
)


def generate(products: int, seed: int) -> Catalogue:
    """`products` products, and up to four goals for each. No two goals are equal. Goals are in random order, except that
    all products have a first one before any has a second."""
    made = tuple(_products(products, random.Random(f"webshop/products/{seed}")))
    kinds = {kind.name: kind for kind in KINDS}
    goals = _goals(made, kinds, random.Random(f"webshop/goals/{seed}"))
    return Catalogue(made, tuple(goals))


def _products(count: int, rng: random.Random) -> Iterator[Product]:
    brands = _brands(rng)
    digits = max(4, len(str(count - 1)))
    for number in range(count):
        kind = rng.choice(KINDS)
        yield _product(f"P{number:0{digits}d}", kind, rng.choice(brands[kind.name]), rng)


def _brands(rng: random.Random) -> dict[str, list[str]]:
    """Brands by kind: no brand has products of two kinds, so that a shared brand never makes two kinds similar."""
    names: dict[str, None] = {}
    while len(names) < _BRANDS_PER_KIND * len(KINDS):
        names["".join(rng.choices(_SYLLABLES, k=2) + rng.choices(_ENDINGS)).capitalize()] = None
    every = list(names)
    return {kind.name: every[number :: len(KINDS)] for number, kind in enumerate(KINDS)}


def _product(id: str, kind: Kind, brand: str, rng: random.Random) -> Product:
    attributes = tuple(rng.sample(kind.attributes, rng.randint(3, 5)))
    options = {axis: _some(values, rng) for axis, values in kind.options.items()}
    line, year = rng.choice(_LINES).capitalize(), rng.randint(1921, 2015)
    use, other = rng.sample(kind.uses, 2)
    extra = {}
    if "size" in options and rng.random() < 0.5:
        step = rng.choice((1.0, 1.5, 2.0, 3.0, 5.0))
        extra = {("size", value): number * step for number, value in enumerate(options["size"]) if number}
    values = {"brand": brand, "line": line, "use": use, "other": other, "year": year}
    features = (rng.choice(_FEATURES).format(attribute=attribute, line=line) for attribute in attributes)
    return Product(
        id=id,
        title=", ".join((f"{brand} {kind.name.title()}", *(attribute.title() for attribute in attributes[:3]))),
        price=rng.randint(*kind.prices) + rng.choice((0.49, 0.79, 0.95, 0.99)),
        query=kind.name,
        category=kind.category,
        attributes=attributes,
        options=options,
        extra=extra,
        features=tuple(feature[0].upper() + feature[1:] for feature in features),
        description=" ".join((rng.choice(_OPENERS).format(**values), rng.choice(_CLOSERS).format(**values))),
    )


def _some(values: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """Two to six of the values, in their order."""
    chosen = set(rng.sample(range(len(values)), rng.randint(2, min(6, len(values)))))
    return tuple(value for number, value in enumerate(values) if number in chosen)


def _goals(products: tuple[Product, ...], kinds: dict[str, Kind], rng: random.Random) -> Iterator[Goal]:
    taken = set()
    for _ in range(ROUNDS):
        for product in rng.sample(products, len(products)):
            for _ in range(_MAX_ATTEMPTS):
                goal = _goal(product, kinds[product.query], rng)
                key = (product.query, frozenset(goal.attributes), frozenset(goal.options), goal.limit)
                if key not in taken:
                    taken.add(key)
                    yield goal
                    break


def _goal(product: Product, kind: Kind, rng: random.Random) -> Goal:
    attributes = tuple(rng.sample(product.attributes, rng.choice((1, 2, 2, 3))))
    axes = rng.sample(list(product.options), rng.randint(1, len(product.options)))
    chosen = {axis: rng.choice(product.options[axis]) for axis in axes}
    limit = 5.0 * math.ceil(product.price_with(chosen) * rng.uniform(1.0, 1.3) / 5)
    return Goal(_instruction(kind, attributes, chosen, limit, rng), product, attributes, tuple(chosen.values()), limit)


def _instruction(
    kind: Kind, attributes: tuple[str, ...], chosen: dict[str, str], limit: float, rng: random.Random
) -> str:
    if rng.random() < 0.5:
        thing = _with_article(kind, f"{', '.join(attributes)} {kind.name}")
    else:
        thing = f"{_with_article(kind, kind.name)} that {'are' if kind.plural else 'is'} {_enumerate(attributes)}"
    options = rng.choice((_options_with_axis, _options_in_words))(chosen)
    return f"{rng.choice(_WISHES)} {thing} {options}, {rng.choice(_BUDGETS).format(limit=limit)}"


def _with_article(kind: Kind, phrase: str) -> str:
    if kind.plural:
        return phrase
    return f"an {phrase}" if phrase[0] in "aeio" else f"a {phrase}"


def _options_with_axis(chosen: dict[str, str]) -> str:
    return "with " + _enumerate(tuple(f"{axis}: {value}" for axis, value in chosen.items()))


def _options_in_words(chosen: dict[str, str]) -> str:
    return "in " + _enumerate(
        tuple(value if axis in ("color", *value.split()) else f"{axis} {value}" for axis, value in chosen.items())
    )


def _enumerate(parts: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
