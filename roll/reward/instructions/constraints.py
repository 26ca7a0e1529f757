"""The constraints, by the names that IFEval gives them. A text without words follows none.

Each is a function of the text and of the arguments that a task gives it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from roll.config.suggest import did_you_mean
from roll.reward.format import read_json
from roll.reward.instructions.counting import capital_words, paragraphs, sentences, split_at, words
from roll.reward.instructions.languages import is_written_in

_ANSWERS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the text follows the instruction of that name. Raises `ValueError` if there is none, or it does not take
    these arguments."""
    if name not in CONSTRAINTS:
        raise ValueError(f"instruction {name!r} is not known{did_you_mean(name, CONSTRAINTS)}")
    check = CONSTRAINTS[name]
    try:
        bound = inspect.signature(check).bind(text, **arguments)
    except TypeError as error:
        raise ValueError(f"instruction {name!r}: {error}, of {dict(arguments)!r}") from error
    return bool(text.strip()) and check(*bound.args, **bound.kwargs)


def _compare(count: int, relation: str, number: int) -> bool:
    if relation == "at least":
        return count >= number
    if relation == "less than":
        return count < number
    raise ValueError(f"relation {relation!r} is not known: it is `at least` or `less than`")


def _count_word(text: str, keyword: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE))


# words


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(keyword.casefold() in text.casefold() for keyword in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(text.casefold().count(keyword.casefold()), relation, frequency)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(_count_word(text, word) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.casefold().count(letter.casefold()), let_relation, let_frequency)


# length


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(len(words(text)), relation, num_words)


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(len(sentences(text)), relation, num_sentences)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs divided by `***`; an empty one between two dividers is none."""
    found = split_at(text, r"\s?\*\*\*\s?")
    return len(found) == num_paragraphs and all(found)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs divided by empty lines, the n-th of which begins with the word."""
    found = paragraphs(text)
    if len(found) != num_paragraphs or nth_paragraph > len(found):
        return False
    first = re.match(r"\W*([\w'’-]+)", found[nth_paragraph - 1])
    return first is not None and first[1].casefold() == first_word.casefold()


# content and form


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in postscript_marker if letter.isalpha()]
    spelled = r"\.?\s?".join(letters) if "." in postscript_marker else re.escape(postscript_marker)
    return re.search(rf"^(?:[^\w\n]|_)*{spelled}(?!\w)", text, re.IGNORECASE | re.MULTILINE) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-))", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(answer in text.casefold() for answer in _ANSWERS)


def _highlights(text: str, num_highlights: int) -> bool:
    """Pieces of a line between single or double asterisks."""
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(bool((double or single).strip()) for double, single in found) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s+\d+", text)) >= num_sections


def _json(text: str) -> bool:
    return read_json(text)[0]


def _title(text: str) -> bool:
    """A line with something between its first `<<` and its last `>>`."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start + 2 : end].strip("<> \t"):
            return True
    return False


def _two_responses(text: str) -> bool:
    """Two texts that differ, divided by six asterisks."""
    found = text.split("******")
    return len(found) == 2 and all(part.strip() for part in found) and found[0].strip() != found[1].strip()


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())


# beginnings, ends, cases, punctuation


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').strip().casefold().endswith(end_phrase.strip().casefold())


def _quoted(text: str) -> bool:
    inside = text.strip()
    return len(inside) > 1 and inside.startswith('"') and inside.endswith('"')


def _capitals(text: str) -> bool:
    return text.isupper()


def _small_letters(text: str) -> bool:
    return text.islower()


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(capital_words(text), capital_relation, capital_frequency)


def _no_comma(text: str) -> bool:
    return "," not in text


CONSTRAINTS: Mapping[str, Callable[..., bool]] = MappingProxyType(
    {
        "change_case:capital_word_frequency": _capital_words,
        "change_case:english_capital": _capitals,
        "change_case:english_lowercase": _small_letters,
        "combination:repeat_prompt": _repeat_prompt,
        "combination:two_responses": _two_responses,
        "detectable_content:number_placeholders": _placeholders,
        "detectable_content:postscript": _postscript,
        "detectable_format:constrained_response": _constrained,
        "detectable_format:json_format": _json,
        "detectable_format:multiple_sections": _sections,
        "detectable_format:number_bullet_lists": _bullets,
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:title": _title,
        "keywords:existence": _keywords,
        "keywords:forbidden_words": _forbidden,
        "keywords:frequency": _frequency,
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": is_written_in,
        "length_constraints:nth_paragraph_first_word": _first_word,
        "length_constraints:number_paragraphs": _number_paragraphs,
        "length_constraints:number_sentences": _number_sentences,
        "length_constraints:number_words": _number_words,
        "punctuation:no_comma": _no_comma,
        "startend:end_checker": _ends_with,
        "startend:quotation": _quoted,
    }
)
