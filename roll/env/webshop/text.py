"""Words of texts, and the similarity of two texts."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+")

FUNCTION_WORDS = frozenset(
    _WORD.findall(
        "a about an and any are as at be but by can for from has have i if in into is it its me my not of on or our so "
        "some than that the their them then there these they this those to up us was we were what which will with would "
        "you your"
    )
)

_ADJECTIVES = frozenset(
    _WORD.findall(
        "big black blue bright brown classic clean clear cold compact complete cool cotton cute dark deep deluxe "
        "double dry easy elastic extra fast fine firm flat free fresh full gentle good gray great green grey heavy "
        "high hot huge ideal large light long loose lightweight low mini modern natural new non perfect pink plain "
        "plus pre premium professional pure purple quick red rich round safe sheer short simple single slim small "
        "smooth soft solid steady strong stretchy super sweet tall thick thin tiny top ultra unisex vintage warm "
        "white wide wireless yellow young"
    )
)
_ADJECTIVE_ENDINGS = ("able", "ible", "less", "ous", "ful", "proof", "ly", "ish", "ant", "ing", "ed")
_NOUNS_THAT_END_LIKE_ADJECTIVES = frozenset(
    _WORD.findall("bed cable clothing dish earring fish jelly lighting pant plant ring shed string table wedding")
)


def words(text: str) -> list[str]:
    """The words of a text in lower case, in order."""
    return _WORD.findall(text.lower())


def terms(text: str) -> list[str]:
    """The words for a search: no function words, plurals as singulars."""
    return [_singular(word) for word in words(text) if word not in FUNCTION_WORDS]


@lru_cache(maxsize=1 << 14)
def nouns(title: str) -> frozenset[str]:
    """The nouns of a product's title, as far as lists and endings tell: without function words, numbers and
    adjectives."""
    return frozenset(word for word in words(title) if _names_a_thing(word))


@lru_cache(maxsize=1 << 16)
def similarity(one: str, other: str) -> float:
    """Similarity of two short texts as sets of words, from 0 to 1: 1 if all words of one are in the other, otherwise the
    best character match among the shared words and the shared words with either text's other words."""
    left, right = set(words(one)), set(words(other))
    shared = sorted(left & right)
    if not left or not right:
        return 0.0
    if left <= right or right <= left:
        return 1.0
    texts = [" ".join(shared), " ".join(shared + sorted(left - right)), " ".join(shared + sorted(right - left))]
    pairs = [(texts[1], texts[2])] + [(texts[0], text) for text in texts[1:] if shared]
    return max(SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs)


def shorten(text: str, chars: int) -> str:
    """The text, cut after a word if it is too long."""
    if len(text) <= chars:
        return text
    cut = text[:chars]
    return (cut.rsplit(" ", 1)[0] if " " in cut else cut[:-1]).rstrip(" ,;:-") + "…"


def _singular(word: str) -> str:
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    return f"{word[:-3]}y" if word.endswith("ies") and len(word) > 4 else word[:-1]


def _names_a_thing(word: str) -> bool:
    if word in FUNCTION_WORDS or word in _ADJECTIVES or word.isdigit() or len(word) < 2:
        return False
    return word in _NOUNS_THAT_END_LIKE_ADJECTIVES or not word.endswith(_ADJECTIVE_ENDINGS)
