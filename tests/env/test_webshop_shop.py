"""Episodes in the shop: pages, clicks, purchases, the expert, and that nothing an agent says harms it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from roll.data.task import EnvSpec
from roll.env.base import parse_reset, parse_step
from roll.env.pool import EnvPool
from roll.env.resolve import resolve
from roll.env.tasks import environment_tasks
from roll.env.webshop.env import WebShop
from roll.env.webshop.navigation import BACK, NEXT, PREV, Page, ShopPages

SMALL: dict[str, Any] = {"products": 400, "catalogue_seed": 1}


def begun(seed: int = 0, **options: Any) -> WebShop:
    world = WebShop(**{**SMALL, **options})
    parse_reset(world.reset(seed))
    return world


def says(world: WebShop, action: str) -> str:
    return str(world.step(action).observation)


def store(page_size: int = 5) -> ShopPages:
    return ShopPages(begun()._shop.catalogue, page_size)


def test_pages_lead_on_and_back() -> None:
    shop = store()
    first = shop.search(Page(), "machine washable")
    assert first is not None
    assert shop.buttons(first) == [NEXT, BACK]
    second = shop.click(first, "next >")
    assert second is not None
    assert not {product.id for product in shop.results_on(first)} & {product.id for product in shop.results_on(second)}
    assert shop.buttons(second) == [NEXT, PREV, BACK]
    assert shop.click(second, "< Prev") == first
    item = shop.click(second, shop.results_on(second)[2].id.lower())
    assert item is not None
    tab = shop.click(item, "Features")
    assert tab is not None
    assert shop.buttons(tab) == [PREV, BACK]
    assert shop.click(tab, "prev") == item
    assert shop.click(item, "< Prev") == second
    for place in (first, second, item, tab):
        assert shop.click(place, "Back to Search") == Page()


def test_the_last_page_holds_the_rest_and_leads_no_further() -> None:
    shop, seen = store(page_size=7), []
    place = shop.search(Page(), "color black resistant free")
    while place is not None:
        seen += [product.id for product in shop.results_on(place)]
        last, place = place, shop.click(place, NEXT)
    assert seen == [product.id for product in shop.results(last)]
    assert len(seen) == len(set(seen)) == 50
    assert (last.number, len(shop.results_on(last))) == (8, 1)


def test_options_replace_each_other_stay_on_tabs_and_are_gone_with_the_product() -> None:
    shop = store()
    place = shop.search(Page(), "hoodie")
    assert place is not None
    item = shop.click(place, shop.results_on(place)[0].id)
    assert item is not None
    (axis, (one, two, *_)), *_ = shop.product(item).options.items()
    chosen = shop.click(item, one.upper())
    assert chosen is not None
    assert chosen.options == {axis: one}
    changed = shop.click(chosen, f"{axis}: {two}")
    assert changed is not None
    assert changed.options == {axis: two}
    tab = shop.click(changed, "Description")
    assert tab is not None
    assert shop.click(tab, PREV) == changed
    back = shop.click(changed, PREV)
    assert back == place


def test_pages_are_the_same_whatever_the_order_of_choices() -> None:
    one = Page("x", 1, "P1", (("color", "red"), ("size", "large")))
    other = Page("x", 1, "P1", (("size", "large"), ("color", "red")))
    assert str(one) == str(other) != str(Page("x", 1, "P1", (("color", "red"),)))


def test_a_search_that_finds_nothing_leads_back() -> None:
    world = begun()
    assert says(world, "search[qwertzuiop]") == "Nothing found for: qwertzuiop\nclick[Back to Search]"
    assert "Search page" in says(world, "click[back to search]")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("hello", "there is no search"),
        ("search[ ]", "you searched for nothing"),
        ("click[Buy Now]", "nothing called 'Buy Now'"),
        ("click[P0001]", "nothing called 'P0001'"),
        ("click[" * 5000, "there is no search"),
        ("[" * 5000 + "]" * 5000, "there is no search"),
        ("click[" + "x" * 5000 + "]", "nothing called 'xxx"),
        ("", "there is no search"),
    ],
)
def test_what_cannot_be_done_is_reported_costs_a_little_and_changes_nothing(said: str, reason: str) -> None:
    world = begun(invalid_penalty=0.25)
    step = world.step(said)
    assert (step.reward, step.done, step.info["invalid"]) == (-0.25, False, 1.0)
    assert str(step.observation).startswith("Invalid action: ")
    assert reason in str(step.observation)
    assert str(step.observation).endswith(world.view())
    assert len(str(step.observation)) < 300
    assert step.info["state"] == str(Page())


def test_one_searches_on_the_search_page_only() -> None:
    world = begun()
    world.step("search[hoodie]")
    assert "the search bar is on the search page" in says(world, "search[jeans]")


def test_the_last_action_counts_wherever_it_stands() -> None:
    world = begun()
    step = world.step("I could click[this], or search[hoodie]; let me\nSEARCH[Yoga mat] now. search[")
    assert step.info["state"] == str(Page("Yoga mat"))


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("answer", "search[jeans] <answer>search[yoga mat]</answer>"),
        ("json", '{"name": "act", "arguments": {"action": "search[yoga mat]"}}'),
    ],
)
def test_actions_come_in_other_formats_too(format: str, said: str) -> None:
    world = begun(format=format)
    assert world.step(said).info["state"] == str(Page("yoga mat"))
    assert world.step("search[yoga mat]").info["invalid"] == 1.0


def test_the_turns_end_without_a_purchase() -> None:
    world = begun(turns=2, invalid_penalty=0.1)
    assert not world.step("search[hoodie]").done
    last = world.step("hm")
    assert (last.truncated, last.terminated, last.reward) == (True, False, -0.1)
    assert world.expert() is None


def test_a_purchase_ends_it_and_tells_its_parts() -> None:
    world = begun()
    goal = world._goal
    world.step(f"search[{goal.product.title}]")
    before = world.step(f"click[{goal.product.id}]")
    told = {name: before.info[name] for name in ("score", "success", "bought")}
    assert told == {"score": 0.0, "success": 0.0, "bought": 0.0}  # who buys nothing counts in the means
    last = world.step("click[buy now]")
    assert last.terminated
    assert (last.info["score"], last.info["bought"]) == (last.reward, 1.0)
    asked = len(goal.attributes) + len(goal.options) + 1
    assert last.reward == pytest.approx((len(goal.attributes) + 1) / asked)
    parts = {name: last.info[name] for name in ("type", "attributes", "options", "price", "success")}
    assert parts == {"type": 1.0, "attributes": 1.0, "options": 0.0, "price": 1.0, "success": 0.0}
    assert world.expert() is None


def test_the_expert_buys_all_that_is_asked_for() -> None:
    for seed in range(100):
        world, rewards = begun(seed), []
        while (action := world.expert()) is not None:
            step = world.step(action)
            assert step.info["invalid"] == 0.0
            rewards.append(step.reward)
        assert step.terminated
        assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


def test_the_expert_goes_on_from_wherever_another_got_to() -> None:
    for seed in range(100):
        world, rng = begun(seed, turns=0), random.Random(seed)
        for _ in range(rng.randrange(12)):
            world.step(random_action(world, rng, buys=False))
        for _ in range(40):
            action = world.expert()
            assert action is not None
            step = world.step(action)
            if step.done:
                break
        assert (step.terminated, step.reward) == (True, 1.0)


def random_action(world: WebShop, rng: random.Random, buys: bool = True) -> str:
    elements = [element for element in world._shop.elements(world._page) if buys or element != "Buy Now"]
    if not elements:
        return f"search[{' '.join(rng.sample(world._goal.instruction.split(), 3))}]"
    return f"click[{rng.choice(elements)}]"


NOISE = [
    "",
    "click[]",
    "search[]",
    "click[\x00]",
    "search[[x]",
    "click[< Prev]",
    "search[%s {0} \\]",
    "🙂" * 50,
    "click[Next >]",
]


@pytest.mark.parametrize("view", ["compact", "full"])
def test_random_episodes_end_without_error_and_with_a_reward_from_0_to_1(view: str) -> None:
    for seed in range(300):
        world, rng = begun(seed, view=view, invalid_penalty=0.0), random.Random(seed)
        for _ in range(15):
            noise = rng.random() < 0.2
            step = parse_step(world.step(rng.choice(NOISE) if noise else random_action(world, rng)))
            assert noise or not str(step.observation).startswith("Invalid")
            assert 0 <= step.reward <= 1
            if step.done:
                break
        assert step.done


def test_all_that_a_page_offers_can_be_clicked_and_is_shown() -> None:
    for view in ("compact", "full"):
        world = begun(4, view=view)
        for _ in range(3):
            elements = world._shop.elements(world._page)
            for element in elements:
                assert element in world.view()
                assert element == "Buy Now" or world._shop.click(world._page, element) is not None
            world.step(world.expert() or "")


def test_the_compact_view_is_short_and_the_full_one_repeats_the_instruction() -> None:
    for seed in range(20):
        world, full = begun(seed), begun(seed, view="full")
        begins, _ = parse_reset(world.reset(seed)), full.reset(seed)
        instruction = world._goal.instruction
        assert instruction in begins.messages[0]["content"]
        while (action := world.expert()) is not None:
            step = world.step(action)
            assert len(str(step.observation)) < 900
            assert instruction not in str(step.observation)
            if not (said := full.step(full.expert() or "")).done:
                assert str(said.observation).startswith(f"Instruction: [SEP] {instruction} [SEP] Back to Search [SEP] ")


def test_seeds_are_goals_and_there_are_no_others() -> None:
    world = WebShop(**SMALL)
    world.reset(0)
    count = len(world._shop.catalogue.goals)
    assert world.episodes == count
    instructions = {begun(seed)._goal.instruction for seed in range(count)}
    assert len(instructions) == count
    for seed in (-1, count):
        with pytest.raises(ValueError, match=f"goals of this catalogue are 0 to {count - 1}"):
            world.reset(seed)


def test_training_and_held_out_seeds_share_no_goal() -> None:
    goals = {}
    for split in ("train", "held_out"):
        tasks = list(environment_tasks(split, "webshop", count=1000, held_out=300, **SMALL))  # type: ignore[arg-type]
        goals[split] = {begun(task.environment.seed)._goal.instruction for task in tasks if task.environment}
    assert (len(goals["train"]), len(goals["held_out"])) == (1000, 300)
    assert not goals["train"] & goals["held_out"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"view": "brief"}, "write compact or full"),
        ({"products": 0}, "above 0"),
        ({"page_size": -1}, "above 0"),
        ({"format": "xml"}, "format"),
        ({"turns": -1}, "turns"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WebShop(**{**SMALL, **options})


def test_the_episode_in_the_docs_is_the_one_that_is_played() -> None:
    world = WebShop()
    said = [parse_reset(world.reset(3)).messages[0]["content"]]
    while (action := world.expert()) is not None:
        said += [f"> {action}", str(world.step(action).observation)]
    page = Path(__file__).parents[2] / "docs" / "guides" / "webshop.md"
    assert "```text\n" + "\n\n".join(said) + "\n```" in page.read_text(encoding="utf-8")


def test_in_processes_of_its_own_the_same_seed_is_the_same_episode() -> None:
    async def play(pool: EnvPool, episode: str, seed: int) -> None:
        world = begun(seed)
        assert await pool.reset(episode, EnvSpec("webshop", seed, SMALL)) == parse_reset(world.reset(seed))
        while (action := world.expert()) is not None:
            assert await pool.step(episode, action) == parse_step(world.step(action))

    async def main() -> None:
        async with EnvPool(workers=2) as pool:
            await asyncio.gather(*(play(pool, f"{seed}.{number}", seed) for seed in range(20) for number in range(2)))

    assert resolve("webshop") is WebShop
    asyncio.run(asyncio.wait_for(main(), 600))
