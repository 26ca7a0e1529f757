"""The pages of a shop, and where a click leads.

    search ──search[…]──▶ results ──click[id]──▶ product ──click[Features]──▶ tab
      ▲                    Next >, < Prev          │ click[option]              │ < Prev
      └──Back to Search──────────┴─────────────────┴────────────────────────────┘

`< Prev` leads from a tab to its product, from a product to its page of results, and from there to the page before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roll.env.webshop.catalogue import Catalogue, Product

BUY, NEXT, PREV, BACK = "Buy Now", "Next >", "< Prev", "Back to Search"
TABS = ("Description", "Features", "Attributes")


@dataclass(frozen=True)
class Page:
    """The current page: the search page, while there are no keywords; a page of results, while there is no product; a
    product with the options chosen so far; or one of its tabs."""

    keywords: str = ""
    number: int = 1
    product: str = ""
    chosen: tuple[tuple[str, str], ...] = ()
    tab: str = ""

    @property
    def options(self) -> Mapping[str, str]:
        """The chosen options, by axis."""
        return dict(self.chosen)

    def __str__(self) -> str:
        """A key that does not depend on the order in which the options were chosen."""
        options = ", ".join(f"{axis}={value}" for axis, value in sorted(self.chosen))
        return " / ".join((self.keywords, str(self.number), self.product, options, self.tab))


class ShopPages:
    """A catalogue as pages of `page_size` results."""

    def __init__(self, catalogue: Catalogue, page_size: int) -> None:
        self.catalogue = catalogue
        self.page_size = page_size

    def results(self, page: Page) -> tuple[Product, ...]:
        """All search results, best first."""
        return self.catalogue.search(page.keywords)

    def results_on(self, page: Page) -> tuple[Product, ...]:
        """The results on the current page."""
        return self.results(page)[(page.number - 1) * self.page_size : page.number * self.page_size]

    def product(self, page: Page) -> Product:
        return self.catalogue[page.product]

    def buttons(self, page: Page) -> list[str]:
        """The clickable elements besides results and options."""
        if not page.keywords:
            return []
        if page.tab:
            return [PREV, BACK]
        if page.product:
            return [BUY, *TABS, PREV, BACK]
        more = page.number * self.page_size < len(self.results(page))
        return [NEXT] * more + [PREV] * (page.number > 1) + [BACK]

    def elements(self, page: Page) -> list[str]:
        """All clickable elements, as they are written."""
        elements: list[str] = []
        if page.product and not page.tab:
            elements = [value for values in self.product(page).options.values() for value in values]
        elif page.keywords and not page.product:
            elements = [product.id for product in self.results_on(page)]
        return elements + self.buttons(page)

    def search(self, page: Page, keywords: str) -> Page | None:
        """The first page of results; None if there is no search bar, or no keywords."""
        keywords = " ".join(keywords.split())
        return None if page.keywords or not keywords else Page(keywords)

    def click(self, page: Page, element: str) -> Page | None:
        """The page that a click leads to, for elements other than `BUY`; None if there is no such element. Case and
        spaces do not matter, and an option may be named with its axis too: `color: red`."""
        named = {_key(button): button for button in self.buttons(page)}
        key = _key(element)
        if key in named:
            return self._press(page, named[key])
        if page.tab or not page.keywords:
            return None
        if page.product:
            return self._choose(page, key)
        return next((replace(page, product=found.id) for found in self.results_on(page) if _key(found.id) == key), None)

    def _press(self, page: Page, button: str) -> Page | None:
        if button == BACK:
            return Page()
        if button in TABS:
            return replace(page, tab=button)
        if button == NEXT:
            return replace(page, number=page.number + 1)
        if button != PREV:
            return None
        if page.tab:
            return replace(page, tab="")
        return replace(page, product="", chosen=()) if page.product else replace(page, number=page.number - 1)

    def _choose(self, page: Page, key: str) -> Page | None:
        for axis, values in self.product(page).options.items():
            for value in values:
                if key in (_key(value), _key(f"{axis}: {value}")):
                    return replace(page, chosen=tuple({**page.options, axis: value}.items()))
        return None


def is_buy(element: str) -> bool:
    """Whether an element is the button that buys."""
    return _key(element) == _key(BUY)


def _key(element: str) -> str:
    return " ".join(element.lower().replace("<", " ").replace(">", " ").split())
