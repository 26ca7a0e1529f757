"""The agent's view: pages of a shop as text.

`compact` is for small models: short titles, each axis of options on one line, the instruction only at the beginning;
clickable elements are written as actions. `full` is like the original's text mode: all texts of a page in order, the
instruction on every page, then the available actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from roll.env.webshop.catalogue import Product
from roll.env.webshop.navigation import BUY, TABS, Page, ShopPages
from roll.env.webshop.text import shorten

View: TypeAlias = Literal["compact", "full"]

TITLE_CHARS = 80
"""Maximum length of titles in a compact list of results."""


def compact(shop: ShopPages, page: Page, instruction: str) -> str:
    """A page in compact form."""
    if not page.keywords:
        return "Search page. Write search[ and the keywords, for example: search[red wool socks]"
    lines = _compact_product(shop, page) if page.product else _compact_results(shop, page)
    return "\n".join((*lines, " ".join(f"click[{button}]" for button in shop.buttons(page))))


def full(shop: ShopPages, page: Page, instruction: str) -> str:
    """A page with all its content."""
    texts = ["WebShop", "Instruction:", instruction, "Search"] if not page.keywords else ["Instruction:", instruction]
    if page.product:
        texts += _full_product(shop, page)
    elif page.keywords:
        texts += _full_results(shop, page)
    actions = [f"click[{element}]" for element in shop.elements(page)] or ["search[keywords]"]
    return f"{' [SEP] '.join(texts)}\nAvailable actions: {', '.join(actions)}"


VIEWS: dict[View, Callable[[ShopPages, Page, str], str]] = {"compact": compact, "full": full}
PAGE_SIZES: dict[View, int] = {"compact": 5, "full": 10}


def tab_text(product: Product, tab: str) -> list[str]:
    """The texts of a tab."""
    contents = {"Description": [product.description], "Features": product.features, "Attributes": product.attributes}[tab]
    return [text for text in contents if text] or ["Nothing is said here."]


def _compact_results(shop: ShopPages, page: Page) -> list[str]:
    found, shown = shop.results(page), shop.results_on(page)
    if not found:
        return [f"Nothing found for: {page.keywords}"]
    first = (page.number - 1) * shop.page_size + 1
    lines = [f"click[{product.id}] {shorten(product.title, TITLE_CHARS)}, {_price(product.price)}" for product in shown]
    return [f"Results {first} to {first + len(shown) - 1} of {len(found)}:", *lines]


def _compact_product(shop: ShopPages, page: Page) -> list[str]:
    product = shop.product(page)
    if page.tab:
        return [f"{page.tab}: {'; '.join(tab_text(product, page.tab))}"]
    axes = [f"{axis}: {' | '.join(_values(product, axis, page))}" for axis in product.options]
    return [f"{product.title}, {_price(product.price_with(page.options))}", *axes]


def _values(product: Product, axis: str, page: Page) -> list[str]:
    """The values of an axis, with what they add to the price; the chosen one is marked."""
    values = []
    for value in product.options[axis]:
        extra = product.extra.get((axis, value), 0.0)
        mark = " (chosen)" if page.options.get(axis) == value else ""
        values.append(f"{value}{f' +{_price(extra)}' if extra else ''}{mark}")
    return values


def _full_results(shop: ShopPages, page: Page) -> list[str]:
    texts = ["Back to Search", f"Page {page.number} (Total results: {len(shop.results(page))})"]
    texts += [button for button in shop.buttons(page) if button not in texts]
    for product in shop.results_on(page):
        texts += [product.id, product.title, _price(product.price)]
    return texts


def _full_product(shop: ShopPages, page: Page) -> list[str]:
    product, texts = shop.product(page), ["Back to Search", "< Prev"]
    if page.tab:
        return texts + tab_text(product, page.tab)
    for axis in product.options:
        texts += [axis, *_values(product, axis, page)]
    return [*texts, product.title, f"Price: {_price(product.price_with(page.options))}", *TABS, BUY]


def _price(dollars: float) -> str:
    return f"${dollars:.2f}"
