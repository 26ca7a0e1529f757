"""A catalogue read from the data files of the original WebShop.

`items_shuffle*.json` is a list of products, `items_ins_v2*.json` has attributes and synthetic instructions by product id,
`items_human_ins*.json` has human instructions; if the last exists, it gives the goals. An invalid field counts as
missing: a product needs only an id and a name, a goal only an instruction and attributes.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from itertools import product as combinations
from pathlib import Path
from typing import Any

from roll.config.errors import UserError
from roll.env.webshop.catalogue import Catalogue, Goal, Product

_CHUNK_CHARS = 1 << 20
_SMALL_BYTES = 32 << 20
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_NO_PRICE = 100.0
"""The price of a product without one, as in the original."""
_MAX_COMBINATIONS = 64
"""Maximum number of option combinations of a product that become synthetic goals."""


def read(folder: Path, products: int, seed: int) -> Catalogue:
    """The first `products` products of the folder's files (0: all), and their goals, in an order that the seed
    determines."""
    check_folder(folder, products)
    attributes = _by_id(_file(folder, "items_ins_v2", products))
    found: dict[str, Product] = {}
    for item in _items(_require_file(folder, "items_shuffle", products)):
        made = _product(item, attributes.get(_text(item.get("asin")), {}), seed)
        if made is not None:
            found.setdefault(made.id, made)
        if len(found) == products:
            break
    rng = random.Random(f"webshop/files/{seed}")
    human = _file(folder, "items_human_ins", products)
    every = list(_human_goals(found, _by_id(human), rng) if human else _synthetic_goals(found, attributes, rng))
    goals = list({goal.instruction: goal for goal in every}.values())
    if not goals:
        raise UserError(f"webshop: the files in {str(folder)!r} hold {len(found)} products, but no instruction for any")
    rng.shuffle(goals)
    return Catalogue(tuple(found.values()), tuple(goals))


def check_folder(folder: Path, products: int) -> None:
    """Raises `UserError` unless the folder has the original's files."""
    if not folder.is_dir():
        raise UserError(f"webshop: data is {str(folder)!r}, which is no folder: write that of items_shuffle.json")
    _require_file(folder, "items_shuffle", products)


def is_small(folder: Path, products: int) -> bool:
    """Whether its files are read in about a second."""
    files = (_file(folder, stem, products) for stem in ("items_shuffle", "items_ins_v2", "items_human_ins"))
    return sum(file.stat().st_size for file in files if file is not None) <= _SMALL_BYTES


def _file(folder: Path, stem: str, products: int) -> Path | None:
    """The folder's file with that stem. If there are several, such as the original's excerpt of 1000 products next to all
    of them, the smallest that has enough according to the number in its name."""
    files = sorted(folder.glob(f"{stem}*.json"), key=lambda path: (_count_in_name(path), path.name))
    enough = [path for path in files if products and _count_in_name(path) >= products]
    return enough[0] if enough else files[-1] if files else None


def _count_in_name(path: Path) -> float:
    number = re.search(r"_(\d+)$", path.stem)
    return float(number[1]) if number else math.inf


def _require_file(folder: Path, stem: str, products: int) -> Path:
    file = _file(folder, stem, products)
    if file is None:
        raise UserError(f"webshop: data is {str(folder)!r}, where there is no {stem}.json")
    return file


def _by_id(file: Path | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"webshop: {file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"webshop: {file} is not an object of JSON, by product id")
    return value


def _items(file: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON list, one by one: the original's list takes gigabytes when parsed at once."""
    decoder, rest, last = json.JSONDecoder(), "", False
    with file.open(encoding="utf-8") as source:
        while not last:
            chunk = source.read(_CHUNK_CHARS)
            last = not chunk
            rest, at = rest + chunk, 0
            while (begin := rest.find("{", at)) >= 0:
                try:
                    value, at = decoder.raw_decode(rest, begin)
                except ValueError as error:
                    if last:
                        raise UserError(f"webshop: {file} is not a list of JSON objects: {error}") from error
                    break
                yield value
            rest = rest[at:]


def _product(item: Mapping[str, Any], described: Any, seed: int) -> Product | None:
    id, title = _text(item.get("asin")), _text(item.get("name"))
    if not id or not title or id == "nan":
        return None
    return Product(
        id=id,
        title=title,
        price=_price(item.get("pricing"), random.Random(f"webshop/price/{seed}/{id}")),
        query=_text(item.get("query")).lower(),
        category=_text(item.get("product_category")),
        attributes=_texts(described.get("attributes") if isinstance(described, dict) else None),
        options=_options(item.get("customization_options")),
        features=_texts(item.get("small_description")),
        description=_text(item.get("full_description")),
    )


def _price(pricing: Any, rng: random.Random) -> float:
    """The price of `$12.99`, or a random one within `$10.99$24.99`."""
    if isinstance(pricing, int | float):
        return float(pricing)
    prices = [float(number.replace(",", "")) for number in _NUMBER.findall(_text(pricing))][:2]
    return round(rng.uniform(*prices), 2) if len(prices) == 2 else (prices or [_NO_PRICE])[0]


def _options(value: Any) -> dict[str, tuple[str, ...]]:
    options: dict[str, tuple[str, ...]] = {}
    for axis, choices in value.items() if isinstance(value, dict) else ():
        named = [_text(choice.get("value") if isinstance(choice, dict) else choice) for choice in choices or ()]
        if any(named):
            options[_text(axis).lower()] = tuple(dict.fromkeys(name.lower() for name in named if name))
    return options


def _human_goals(products: Mapping[str, Product], instructions: Mapping[str, Any], rng: random.Random) -> Iterator[Goal]:
    for id, product in products.items():
        for instruction in _sequence(instructions.get(id)):
            if isinstance(instruction, dict):
                yield from _goal(
                    product,
                    instruction.get("instruction"),
                    instruction.get("instruction_attributes"),
                    _chosen(instruction),
                    rng,
                )


def _synthetic_goals(
    products: Mapping[str, Product], instructions: Mapping[str, Any], rng: random.Random
) -> Iterator[Goal]:
    """One goal per combination of a product's options."""
    for id, product in products.items():
        instruction = instructions.get(id)
        if not isinstance(instruction, dict):
            continue
        axes = sorted(product.options)
        for values in islice(combinations(*(product.options[axis] for axis in axes)), _MAX_COMBINATIONS):
            wishes = ", and ".join(f"{axis}: {value}" for axis, value in zip(axes, values, strict=True))
            text = _text(instruction.get("instruction"))
            text = f"{text.rstrip('.')} with {wishes}" if text and wishes else text
            yield from _goal(product, text, instruction.get("instruction_attributes"), values, rng)


def _goal(product: Product, text: Any, attributes: Any, options: Sequence[str], rng: random.Random) -> Iterator[Goal]:
    """The goal, if it can be checked. Its limit is one of the four multiples of ten above the price, but not the
    lowest."""
    text, wanted = _text(text).rstrip("."), _texts(attributes)
    if text and wanted:
        limit = (product.price // 10 + rng.choice((2, 3, 3, 4, 4, 4))) * 10.0
        yield Goal(f"{text}, and price lower than {limit:.2f} dollars", product, wanted, tuple(options), limit)


def _chosen(instruction: Mapping[str, Any]) -> tuple[str, ...]:
    options = instruction.get("instruction_options")
    return _texts(list(options.values()) if isinstance(options, dict) else options)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(filter(None, map(_text, [value] if isinstance(value, str) else _sequence(value))))


def _sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """A text on one line. Half of a surrogate pair, which JSON can contain, is replaced."""
    if not isinstance(value, str):
        return ""
    return " ".join(value.encode("utf-8", "replace").decode("utf-8").split())
