"""An oracle policy that knows the goal.

It depends only on the current page, so it can continue from any page that another agent has reached. It searches for
words of the goal and buys the first result that has everything the goal asks for: an agent can learn both.
"""

from __future__ import annotations

from collections.abc import Mapping

from roll.env.webshop.catalogue import Goal, Product
from roll.env.webshop.navigation import BACK, BUY, NEXT, PREV, Page, ShopPages
from roll.env.webshop.reward import option_fits, score
from roll.env.webshop.text import words


class ShopOracle:
    """The oracle for one goal in one shop."""

    def __init__(self, shop: ShopPages, goal: Goal) -> None:
        self._shop = shop
        self._goal = goal
        self._fitting: dict[str, bool] = {}

    def action(self, page: Page) -> str:
        """The next action on a page."""
        return f"click[{self._click(page)}]" if page.keywords else f"search[{self._keywords()}]"

    def _keywords(self) -> str:
        """The first of some queries that finds a fitting product; if none does, the title of the goal's product."""
        goal = self._goal
        plain = " ".join((*goal.attributes, goal.product.query))
        for query in (plain, " ".join((plain, *goal.options)), goal.product.query, goal.instruction):
            if any(self._fits(product) for product in self._shop.catalogue.search(query)):
                return query
        return goal.product.title

    def _click(self, page: Page) -> str:
        if page.tab:
            return PREV
        if not page.product:
            return self._among_results(page)
        product = self._shop.product(page)
        if not self._fits(product):
            return PREV
        plan = plan_of(self._goal, product)
        missing = next((value for axis, value in plan.items() if page.options.get(axis) != value), None)
        if missing is not None:
            return missing
        harm = score(self._goal, product, page.options).reward < score(self._goal, product, plan).reward
        return PREV if harm else BUY  # going back undoes a choice that the goal does not ask for and that costs too much

    def _among_results(self, page: Page) -> str:
        results = self._shop.results(page)
        number = next((number for number, product in enumerate(results) if self._fits(product)), None)
        if number is None:
            return BACK
        page_number = number // self._shop.page_size + 1
        if page_number == page.number:
            return results[number].id
        return NEXT if page_number > page.number else PREV

    def _fits(self, product: Product) -> bool:
        """Whether it can be bought as wanted, or is the product that the goal was made from."""
        if product.id not in self._fitting:
            best = score(self._goal, product, plan_of(self._goal, product)).reward
            self._fitting[product.id] = product is self._goal.product or best == 1.0
        return self._fitting[product.id]


def plan_of(goal: Goal, product: Product) -> Mapping[str, str]:
    """The options of a product to choose, by axis: those that fit the goal's, equal ones before similar ones."""
    plan: dict[str, str] = {}
    for wanted in goal.options:
        fitting = [
            (words(value) != words(wanted), axis, value)
            for axis, values in product.options.items()
            for value in values
            if axis not in plan and option_fits(axis, value, wanted)
        ]
        if fitting:
            _, axis, value = min(fitting)
            plan[axis] = value
    return plan
