"""What a purchase is worth, by hand-made cases and by properties that hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.env.webshop.catalogue import Goal, Product
from roll.env.webshop.catalogue_data import KINDS
from roll.env.webshop.generate import generate
from roll.env.webshop.oracle import plan_of
from roll.env.webshop.reward import SAME_SIMILARITY, has_attribute, kind_reward, option_fits, score
from roll.env.webshop.text import nouns, similarity, words

BLANKET = Product(
    id="P1",
    title="Velora Throw Blanket, Machine Washable",
    price=19.99,
    query="throw blanket",
    category="Home › Bedding › Blankets",
    attributes=("machine washable", "ultra soft"),
    options={"color": ("red", "light blue"), "size": ("50 x 60 inch", "60 x 80 inch")},
    extra={("size", "60 x 80 inch"): 5.0},
    features=("Hypoallergenic: for all of us",),
    description="Fringed by hand.",
)
GOAL = Goal("…", BLANKET, ("machine washable", "ultra soft"), ("red", "60 x 80 inch"), 30.0)
CATALOGUE = generate(300, 7)


def other(title: str, query: str = "other", category: str = "Elsewhere") -> Product:
    return replace(BLANKET, title=title, query=query, category=category)


@pytest.mark.parametrize(
    ("chosen", "goal", "reward"),
    [
        ({"color": "red", "size": "60 x 80 inch"}, GOAL, 1.0),
        ({"color": "red"}, GOAL, 4 / 5),
        ({}, GOAL, 3 / 5),
        ({"color": "light blue", "size": "50 x 60 inch"}, GOAL, 3 / 5),
        ({"color": "red", "size": "60 x 80 inch"}, replace(GOAL, limit=24.99), 1.0),
        ({"color": "red", "size": "60 x 80 inch"}, replace(GOAL, limit=24.98), 4 / 5),
        ({"color": "red"}, replace(GOAL, limit=19.98), 3 / 5),
        ({"color": "red"}, replace(GOAL, attributes=("machine washable", "heat resistant")), 3 / 5),
        ({"color": "red"}, replace(GOAL, attributes=("hypoallergenic", "fringed"), options=("red",)), 1.0),
        ({}, replace(GOAL, options=(), limit=math.inf), 1.0),
        ({"color": "light blue"}, replace(GOAL, options=("blue",)), 1.0),
    ],
)
def test_the_formula(chosen: dict[str, str], goal: Goal, reward: float) -> None:
    assert score(goal, BLANKET, chosen).reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("bought", "kind"),
    [
        (BLANKET, 1.0),
        (other("Throw Blanket of another make"), 1.0),
        (other("Frying Pan"), 0.0),
        (other("Frying Pan", query="throw blanket"), 0.0),  # not one noun in common: whatever it was searched by
    ],
)
def test_the_kind_of_thing(bought: Product, kind: float) -> None:
    assert kind_reward(BLANKET, bought) == kind
    assert score(GOAL, bought, {"color": "red", "size": "60 x 80 inch"}).reward == kind


def test_a_title_that_shares_few_nouns_is_half_the_kind_and_very_few_a_tenth() -> None:
    wanted = other("apple brook cliff dune elm", "fruit", "Food › Fruit › Apples")
    assert kind_reward(wanted, other("apple house")) == 0.5
    assert kind_reward(wanted, other("apple brook house")) == 1.0
    assert kind_reward(wanted, other("apple house", query="fruit")) == 1.0
    assert kind_reward(wanted, other("apple house", category="Food › Fruit › Pears")) == 1.0
    assert kind_reward(wanted, other("apple house", category="Food › Bread")) == 0.5
    long = other("apple brook cliff dune elm fern grove hill inlet jar kelp", "fruit")
    assert kind_reward(long, other("apple house", query="fruit")) == 0.1


def test_where_a_title_names_nothing_the_query_and_the_categories_decide() -> None:
    nameless = other("the red 12", "fruit", "Food › Fruit")
    assert nouns(nameless.title) == frozenset()
    assert kind_reward(nameless, BLANKET) == 0.5
    assert kind_reward(nameless, other("pear", "fruit")) == 1.0


@pytest.mark.parametrize(
    ("axis", "value", "wanted", "fits"),
    [
        ("color", "navy blue", "blue", True),
        ("color", "Light Gray", "grey", True),
        ("color", "blue and white", "red", False),
        ("color", "red", "black", False),
        ("size", "x-large", "X Large", True),
        ("size", "x-large", "large", False),
        ("size", "pack of 2", "pack of 4", False),
        ("flavor", "sea salt", "salt, sea", True),
        ("flavor", "sea salt", "orange", False),
    ],
)
def test_options(axis: str, value: str, wanted: str, fits: bool) -> None:
    assert option_fits(axis, value, wanted) is fits


@pytest.mark.parametrize(
    ("one", "same", "expected"),
    [("long lasting", "lasting long", 1.0), ("washable", "machine washable", 1.0), ("", "red", 0.0), ("?", "?", 0.0)],
)
def test_likeness_by_hand(one: str, same: str, expected: float) -> None:
    assert similarity(one, same) == expected


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.text("ab -é", max_size=12), st.text("ab -é", max_size=12))
def test_likeness_is_a_share(one: str, two: str) -> None:
    assert 0 <= similarity(one, two) <= 1
    assert similarity(one, one) == float(bool(words(one)))


GOALS = st.sampled_from(CATALOGUE.goals)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(GOALS, st.sampled_from(CATALOGUE.products), st.data())
def test_rewards_are_from_0_to_1_and_no_choice_of_options_beats_the_plan(
    goal: Goal, product: Product, data: st.DataObject
) -> None:
    chosen = {
        axis: data.draw(st.sampled_from(values)) for axis, values in product.options.items() if data.draw(st.booleans())
    }
    plan = score(goal, product, plan_of(goal, product))
    judged = score(goal, product, chosen)
    assert 0 <= judged.reward <= 1
    assert judged.options <= plan.options


def test_buying_what_the_goal_was_made_of_is_worth_1_and_a_worse_choice_less() -> None:
    for goal in CATALOGUE.goals:
        plan = plan_of(goal, goal.product)
        assert sorted(plan.values()) == sorted(goal.options)
        assert score(goal, goal.product, plan).reward == 1.0
        for axis in plan:
            without = {other: value for other, value in plan.items() if other != axis}
            assert score(goal, goal.product, without).reward < 1.0
            for value in goal.product.options[axis]:
                if value != plan[axis]:
                    assert score(goal, goal.product, {**plan, axis: value}).reward < 1.0


def test_within_a_kind_nothing_passes_for_another() -> None:
    for kind in KINDS:
        assert not [pair for pair in combinations(kind.attributes, 2) if similarity(*pair) > SAME_SIMILARITY]
        options = [(axis, value) for axis, values in kind.options.items() for value in values]
        assert not [(one, two) for one, two in permutations(options, 2) if option_fits(*one, two[1])]


def test_a_generated_product_has_its_own_attributes_and_no_other_of_its_kind() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    for product in CATALOGUE.products:
        found = {attribute for attribute in kinds[product.query].attributes if has_attribute(product, attribute)}
        assert found == set(product.attributes)


def test_what_is_of_another_kind_and_other_categories_is_mostly_worth_nothing() -> None:
    pairs = [(one, two) for one in CATALOGUE.products[:60] for two in CATALOGUE.products[:60] if one.query != two.query]
    worth = [kind_reward(one, two) for one, two in pairs]
    assert sum(worth) / len(worth) < 0.25
    assert all(
        kind_reward(one, two) == 1.0
        for one in CATALOGUE.products
        for two in CATALOGUE.products[:40]
        if one.query == two.query
    )
