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
    page: int = 1
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
        return " / ".join((self.keywords, str(self.page), self.product, options, self.tab))


class ShopPages:
    """A catalogue as pages of `page_size` results."""

    def __init__(self, catalogue: Catalogue, page_size: int) -> None:
        self.catalogue = catalogue
        self.page_size = page_size

    def results(self, place: Page) -> tuple[Product, ...]:
        """All search results, best first."""
        return self.catalogue.search(place.keywords)

    def shown(self, place: Page) -> tuple[Product, ...]:
        """The results on the current page."""
        return self.results(place)[(place.page - 1) * self.page_size : place.page * self.page_size]

    def product(self, place: Page) -> Product:
        return self.catalogue[place.product]

    def buttons(self, place: Page) -> list[str]:
        """The clickable elements besides results and options."""
        if not place.keywords:
            return []
        if place.tab:
            return [PREV, BACK]
        if place.product:
            return [BUY, *TABS, PREV, BACK]
        more = place.page * self.page_size < len(self.results(place))
        return [NEXT] * more + [PREV] * (place.page > 1) + [BACK]

    def elements(self, place: Page) -> list[str]:
        """All clickable elements, as they are written."""
        elements: list[str] = []
        if place.product and not place.tab:
            elements = [value for values in self.product(place).options.values() for value in values]
        elif place.keywords and not place.product:
            elements = [product.id for product in self.shown(place)]
        return elements + self.buttons(place)

    def search(self, place: Page, keywords: str) -> Page | None:
        """The first page of results; None if there is no search bar, or no keywords."""
        keywords = " ".join(keywords.split())
        return None if place.keywords or not keywords else Page(keywords)

    def click(self, place: Page, element: str) -> Page | None:
        """The page that a click leads to, for elements other than `BUY`; None if there is no such element. Case and
        spaces do not matter, and an option may be named with its axis too: `color: red`."""
        named = {_key(button): button for button in self.buttons(place)}
        key = _key(element)
        if key in named:
            return self._press(place, named[key])
        if place.tab or not place.keywords:
            return None
        if place.product:
            return self._choose(place, key)
        return next((replace(place, product=found.id) for found in self.shown(place) if _key(found.id) == key), None)

    def _press(self, place: Page, button: str) -> Page | None:
        if button == BACK:
            return Page()
        if button in TABS:
            return replace(place, tab=button)
        if button == NEXT:
            return replace(place, page=place.page + 1)
        if button != PREV:
            return None
        if place.tab:
            return replace(place, tab="")
        return replace(place, product="", chosen=()) if place.product else replace(place, page=place.page - 1)

    def _choose(self, place: Page, key: str) -> Page | None:
        for axis, values in self.product(place).options.items():
            for value in values:
                if key in (_key(value), _key(f"{axis}: {value}")):
                    return replace(place, chosen=tuple({**place.options, axis: value}.items()))
        return None


def is_buy(element: str) -> bool:
    """Whether an element is the button that buys."""
    return _key(element) == _key(BUY)


def _key(element: str) -> str:
    return " ".join(element.lower().replace("<", " ").replace(">", " ").split())
