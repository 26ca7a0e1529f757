"""The WebShop environment: an episode in a shop."""

from __future__ import annotations

import os
import re
import threading
from functools import cache
from pathlib import Path

from roll.env.actions import ActingEnvironment, Action, Format, Invalid
from roll.env.base import Step
from roll.env.resolve import register
from roll.env.webshop.catalogue import Catalogue
from roll.env.webshop.generate import ROUNDS, generate
from roll.env.webshop.loader import check_folder, is_small, read
from roll.env.webshop.navigation import Page, ShopPages, is_buy
from roll.env.webshop.oracle import ShopOracle
from roll.env.webshop.reward import score
from roll.env.webshop.views import PAGE_SIZES, VIEWS, View

# The brackets may contain another pair of brackets. Possessive quantifiers, so that no text takes long.
_ACTION = re.compile(r"\b(search|click)\s?\[((?:[^\[\]\n]++|\[[^\[\]\n]*+\])*+)\]", re.IGNORECASE)

_OPENING = threading.Lock()


@register("webshop")
class WebShop(ActingEnvironment):
    """Buy the product that an instruction describes, by `search[keywords]` and `click[element]`.

    The purchase gives the paper's reward, from 0 to 1. The seed is the number of a goal, and no two goals of a catalogue
    are equal. The catalogue has `products` products, generated from `catalogue_seed`, or read from the original's files
    in the folder `data` (where 0 means all of them). The `view` is `compact` or, like the original's, `full`; a page has
    `page_size` results (0: 5 in a compact view, 10 in a full one).
    """

    def __init__(
        self,
        products: int = 4000,
        catalogue_seed: int = 0,
        data: str = "",
        view: View = "compact",
        page_size: int = 0,
        format: Format = "free",
        invalid_penalty: float = 0.05,
        turns: int = 15,
    ) -> None:
        super().__init__(format, invalid_penalty, turns)
        if view not in VIEWS:
            raise ValueError(f"webshop: view is {view!r}: write {' or '.join(VIEWS)}")
        if products < (0 if data else 1) or page_size < 0:
            raise ValueError(f"webshop: {products=}, {page_size=}: write how many, above 0")
        if data:
            check_folder(Path(data), products)
        self._catalogue = (products, catalogue_seed, data)
        self._page_size = page_size or PAGE_SIZES[view]
        self._view = VIEWS[view]
        self._page = Page()
        self._bought, self._score = False, 0.0

    @property
    def episodes(self) -> int | None:
        """The number of goals of the catalogue; None if its files take long to read."""
        products, _, data = self._catalogue
        if not data:
            return ROUNDS * products
        return len(open_catalogue(*self._catalogue).goals) if is_small(Path(data), products) else None

    def begin(self, seed: int) -> str:
        self._shop = ShopPages(open_catalogue(*self._catalogue), self._page_size)
        goals = self._shop.catalogue.goals
        if not 0 <= seed < len(goals):
            raise ValueError(f"webshop: the seed is {seed}, but the goals of this catalogue are 0 to {len(goals) - 1}")
        self._goal = goals[seed]
        self._expert = ShopOracle(self._shop, self._goal)
        self._page, self._bought, self._score = Page(), False, 0.0
        return (
            "You are shopping in a web store. Find what is asked for, choose its options, then buy it.\n"
            f"Each turn, write only one action: {self.format_action('search[keywords]')} on the search page, or "
            f"{self.format_action('click[element]')} for something on the page, such as click[Buy Now].\n"
            f"Instruction: {self._goal.instruction}\n\n{self.view()}"
        )

    def read(self, text: str) -> str | Invalid:
        """The last action in the text."""
        found = [match[0] for match in _ACTION.finditer(text)]
        return found[-1] if found else Invalid("there is no search[keywords] or click[element] in what you said.")

    def act(self, action: Action) -> Step | Invalid:
        match = _ACTION.search(action.text)
        if match is None:
            return Invalid("an action is search[keywords] or click[element].")
        verb, argument = match[1].lower(), match[2].strip()
        if verb == "click" and is_buy(argument) and self._page.product and not self._page.tab:
            return self._buy()
        page = (self._shop.search if verb == "search" else self._shop.click)(self._page, argument)
        if page is None:
            return self._reject(verb, argument)
        self._page = page
        return Step(self.view())

    def view(self) -> str:
        return self._view(self._shop, self._page, self._goal.instruction)

    def state(self) -> str:
        return str(self._page)

    def extra_info(self) -> dict[str, float | str]:
        return {"score": self._score, "success": float(self._score == 1.0), "bought": float(self._bought)}

    def expert(self) -> str | None:
        """The oracle's next action; None once something is bought or no turn is left."""
        over = self._bought or 0 < self._turns <= self._turn
        return None if over else self.format_action(self._expert.action(self._page))

    def _buy(self) -> Step:
        self._bought = True
        product, options = self._shop.product(self._page), self._page.options
        purchase = score(self._goal, product, options)
        parts: dict[str, float | str] = {
            "type": purchase.kind,
            "attributes": purchase.attributes / (purchase.goal_attributes or 1),
            "options": purchase.options / purchase.goal_options if purchase.goal_options else 1.0,
            "price": float(purchase.price),
        }
        self._score = purchase.reward
        chosen = f" ({', '.join(options.values())})" if options else ""
        message = (
            f"You bought {product.title}{chosen} for ${product.price_with(options):.2f}. Score: {purchase.reward:.2f}"
        )
        return Step(message, purchase.reward, terminated=True, info=parts)

    def _reject(self, verb: str, argument: str) -> Invalid:
        if verb == "click":
            return Invalid(f"there is nothing called {argument[:60]!r} to click here.")
        return Invalid("the search bar is on the search page." if self._page.keywords else "you searched for nothing.")


def open_catalogue(products: int, seed: int, data: str = "") -> Catalogue:
    """The catalogue of these parameters, created at the first call in this process and then shared. Episodes begin in
    many threads at once, and only one of them creates it."""
    with _OPENING:
        return _load_catalogue(products, seed, os.path.abspath(data) if data else "")


@cache
def _load_catalogue(products: int, seed: int, data: str) -> Catalogue:
    return read(Path(data), products, seed) if data else generate(products, seed)
