"""Catalogues: generated ones, the original's files, and what a search finds in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config.errors import UserError
from roll.env.webshop import loader
from roll.env.webshop.catalogue import Catalogue
from roll.env.webshop.env import WebShop, open_catalogue
from roll.env.webshop.generate import generate
from roll.env.webshop.index import Index
from roll.env.webshop.loader import read
from roll.env.webshop.text import shorten, terms

CATALOGUE = generate(1000, 0)


def test_a_search_finds_what_has_the_words_the_rarest_first() -> None:
    index = Index(["red wool socks", "red cotton socks", "a red hat of wool", "blue jeans", "red red red paint"])
    assert index.search("wool") == (0, 2)
    assert index.search("blue") == index.search("BLUE jean") == (3,)
    assert index.search("cotton sock") == (1, 0)
    assert index.search("the socks, of wool") == (0, 1, 2)
    assert index.search("red")[0] == 4
    assert index.search("red", limit=2) == index.search("red")[:2]
    assert index.search("nothing like it") == index.search("") == index.search("?!") == ()


def test_bm25_by_hand() -> None:
    """Of two texts of the mean length 2 with the word once, and one of the length 2 without it."""
    index = Index(["one two", "one three", "four five"])
    numbers, weights = index._postings["one"]
    assert list(numbers) == [0, 1]
    assert list(weights) == pytest.approx([2.2 / 2.2] * 2)
    twice = Index(["one one", "two three"])._postings["one"][1]
    assert list(twice) == pytest.approx([2 * 2.2 / (2 + 1.2)])


def test_an_empty_index_finds_nothing() -> None:
    assert Index([]).search("x") == Index(["", ""]).search("x") == ()


def test_words_of_a_search() -> None:
    assert terms("The dresses and a Berries of glass for us") == ["dresse", "berry", "glass"]
    assert terms("hiking boots") == terms("Hiking boot")


def test_a_product_is_found_by_its_title_and_its_kind_by_its_name() -> None:
    for product in CATALOGUE.products[::25]:
        assert any(found.title == product.title for found in CATALOGUE.search(product.title)[:3])
        assert all(found.query == product.query for found in CATALOGUE.search(product.query)[:5])
        assert product.attributes[0] in CATALOGUE.search(f"{product.attributes[0]} {product.query}")[0].attributes


def test_a_search_returns_no_more_than_fifty() -> None:
    assert len(CATALOGUE.search("machine washable")) == 50


def test_no_two_goals_ask_for_the_same() -> None:
    asked = {
        (goal.product.query, *sorted(goal.attributes), *sorted(goal.options), goal.limit) for goal in CATALOGUE.goals
    }
    assert len(asked) == len({goal.instruction for goal in CATALOGUE.goals}) == len(CATALOGUE.goals)
    assert len(CATALOGUE.goals) > 3900


def test_the_first_goals_are_of_different_products() -> None:
    assert len({goal.product.id for goal in CATALOGUE.goals[:1000]}) > 990


def test_an_instruction_says_all_that_counts() -> None:
    for goal in CATALOGUE.goals[:500]:
        for word in (goal.product.query, *goal.attributes, *goal.options, f"{goal.limit:.2f}"):
            assert word in goal.instruction


def test_ids_are_unique_and_prices_positive_cents() -> None:
    assert len({product.id for product in CATALOGUE.products}) == len(CATALOGUE.products) == 1000
    assert all(0 < product.price == round(product.price, 2) for product in CATALOGUE.products)


def test_the_seed_alone_decides_in_any_process() -> None:
    script = (
        "from roll.env.webshop.generate import generate; c = generate(50, 3);"
        "print(*(g.instruction for g in c.goals), *(repr(p) for p in c.products), sep='\\n')"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash, **PATH},
        ).stdout
        for hash in ("1", "2")
    ]
    here = generate(50, 3)
    lines = [*(goal.instruction for goal in here.goals), *(repr(product) for product in here.products)]
    assert shown[0] == shown[1] == "\n".join(lines) + "\n"
    assert [goal.instruction for goal in generate(50, 4).goals] != [goal.instruction for goal in here.goals]


PATH = {"PYTHONPATH": str(Path(loader.__file__).parents[3])}


def test_a_catalogue_is_made_once_in_a_process() -> None:
    assert open_catalogue(20, 1) is open_catalogue(20, 1)
    assert open_catalogue(20, 1) is not open_catalogue(20, 2)


def test_titles_are_cut_after_a_word() -> None:
    assert shorten("one two three", 20) == "one two three"
    assert shorten("one two, three", 10) == "one two…"
    assert shorten("onetwothree", 5) == "onet…"


# In the shape of the original's files; some fields missing or odd, as some of theirs are.
ITEMS: list[dict[str, Any]] = [
    {
        "asin": "B000000001",
        "name": "Long Clip-in Hair Extension, Natural Looking",
        "query": "Hair Extensions ",
        "category": "beauty",
        "product_category": "Beauty & Personal Care › Hair Care › Hair Extensions",
        "full_description": "Made to be\n worn all day. {braces} \ud83d",
        "small_description": ["Natural looking waves", "No tangles"],
        "pricing": "$12.99",
        "customization_options": {
            "Color": [{"value": "Dark Brown", "image": None}, {"value": "Blonde"}],
            "Size": [{"value": "16 Inch"}],
            "Style": None,
        },
        "images": ["x"],
    },
    {
        "asin": "B000000002",
        "name": "Throw Blanket",
        "query": "throw blankets",
        "product_category": "Home › Bedding",
        "full_description": None,
        "small_description": "Soft [really]",
        "pricing": "$1,010.00$1,020.00",
        "customization_options": {},
    },
    {"asin": "B000000003", "name": "Mug", "pricing": "", "customization_options": {"color": [{"value": "red [matte]"}]}},
    {"asin": "nan", "name": "nobody"},
    {"asin": "B000000001", "name": "A second with the same id"},
    {"name": "no id"},
    {"asin": "B000000004", "name": None},
]
ATTRIBUTES = {
    "B000000001": {
        "attributes": ["natural looking", "long lasting"],
        "instruction": "Find me natural looking hair extensions.",
        "instruction_attributes": ["natural looking"],
    },
    "B000000002": {"attributes": ["super soft"], "instruction": None},
    "B000000003": "odd",
}
HUMAN = {
    "B000000001": [
        {
            "asin": "B000000001",
            "instruction": "I need a long clip-in hair extension which is natural looking.",
            "instruction_attributes": ["natural looking"],
            "instruction_options": ["dark brown"],
        },
        {"instruction": "nothing to check", "instruction_attributes": []},
    ],
    "B000000002": [
        {"instruction": "a super soft blanket", "instruction_attributes": ["super soft"], "instruction_options": {}}
    ],
    "B000000003": [
        {"instruction": "a red mug", "instruction_attributes": ["mug"], "instruction_options": {"color": "red [matte]"}}
    ],
    "B999999999": [{"instruction": "not in the shop", "instruction_attributes": ["x"], "instruction_options": []}],
}


def written(folder: Path, human: bool = True) -> Path:
    (folder / "items_shuffle.json").write_text(json.dumps(ITEMS))
    (folder / "items_ins_v2.json").write_text(json.dumps(ATTRIBUTES))
    if human:
        (folder / "items_human_ins.json").write_text(json.dumps(HUMAN))
    return folder


def by_instruction(catalogue: Catalogue) -> dict[str, Any]:
    return {goal.instruction.split(", and price")[0]: goal for goal in catalogue.goals}


def test_the_originals_files(tmp_path: Path) -> None:
    catalogue = read(written(tmp_path), 0, 0)
    assert [product.id for product in catalogue.products] == ["B000000001", "B000000002", "B000000003"]
    hair, blanket, mug = catalogue.products
    assert hair.options == {"color": ("dark brown", "blonde"), "size": ("16 inch",)}
    assert (hair.price, hair.query, hair.attributes) == (12.99, "hair extensions", ("natural looking", "long lasting"))
    assert hair.description == "Made to be worn all day. {braces} ?"
    assert 1010 <= blanket.price <= 1020
    assert blanket.features == ("Soft [really]",)
    assert (mug.price, mug.attributes, mug.category) == (100.0, (), "")
    goals = by_instruction(catalogue)
    assert set(goals) == {
        "I need a long clip-in hair extension which is natural looking",
        "a super soft blanket",
        "a red mug",
    }
    goal = goals["I need a long clip-in hair extension which is natural looking"]
    assert (goal.product, goal.attributes, goal.options) == (hair, ("natural looking",), ("dark brown",))
    assert goal.limit in (30.0, 40.0, 50.0)
    assert goal.instruction.endswith(f", and price lower than {goal.limit:.2f} dollars")
    assert catalogue.search("natural hair extension")[0] is hair


def test_without_peoples_instructions_the_goals_are_the_made_up_ones(tmp_path: Path) -> None:
    goals = by_instruction(read(written(tmp_path, human=False), 0, 0))
    assert set(goals) == {
        "Find me natural looking hair extensions with color: dark brown, and size: 16 inch",
        "Find me natural looking hair extensions with color: blonde, and size: 16 inch",
    }


def test_the_expert_buys_right_in_the_originals_files_and_brackets_can_be_clicked(tmp_path: Path) -> None:
    written(tmp_path)
    for seed in range(3):
        world = WebShop(data=str(tmp_path), products=0)
        world.reset(seed)
        reward = 0.0
        while (action := world.expert()) is not None:
            reward += world.step(action).reward
        assert reward == 1.0


def test_no_more_products_than_asked_for_are_read_and_chunks_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    whole = read(tmp_path, 0, 0)
    assert [product.id for product in read(tmp_path, 2, 0).products] == ["B000000001", "B000000002"]
    monkeypatch.setattr(loader, "_CHUNK_CHARS", 7)
    assert [repr(product) for product in read(tmp_path, 0, 0).products] == [repr(product) for product in whole.products]


def test_of_several_files_the_smallest_that_has_enough_is_read(tmp_path: Path) -> None:
    for name in ("items_shuffle.json", "items_shuffle_1000.json"):
        (tmp_path / name).touch()
    chosen = {count: loader._file(tmp_path, "items_shuffle", count) for count in (0, 500, 1000, 1001)}
    assert {count: path.name for count, path in chosen.items() if path} == {
        0: "items_shuffle.json",
        500: "items_shuffle_1000.json",
        1000: "items_shuffle_1000.json",
        1001: "items_shuffle.json",
    }


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("items_shuffle.json", '[{"asin": ', "is not a list of JSON objects"),
        ("items_shuffle.json", "[]", "0 products, but no instruction"),
        ("items_human_ins.json", "[]", "is not an object of JSON"),
        ("items_ins_v2.json", "{", "is not JSON"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, file: str, text: str, says: str) -> None:
    written(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=says):
        read(tmp_path, 0, 0)


def test_folders_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no items_shuffle"):
        read(tmp_path, 0, 0)
    with pytest.raises(UserError, match="which is no folder"):
        read(tmp_path / "nowhere", 0, 0)
