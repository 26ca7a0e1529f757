"""Converts mathematics in free text to LaTeX that math-verify parses. Pure functions of text.

`tidy` removes markup around an expression (dollars, emphasis) and replaces Unicode symbols by LaTeX. `expression_in`
finds the expression in a sentence. `lists_several`, `equation_sides` and `has_words` detect answers that state more than
one thing, of which math-verify would choose the part that fits.
"""

from __future__ import annotations

import re
import unicodedata

from roll.reward.numerals import VULGAR, last_two_numerals, plain_numerals, tail_with_digits

LONGEST = 2000
"""Maximum characters of an expression."""

_SUPER = {ord(sup): digit for sup, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True)}
_SUB = {ord(sub): digit for sub, digit in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)}
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–﹣－", "-"),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        **dict.fromkeys("·⋅∗", r" \cdot "),
        **{
            a: f" {b} "
            for a, b in {
                "×": r"\times",
                "÷": r"\div",
                "π": r"\pi",
                "∞": r"\infty",
                "≤": r"\le",
                "≥": r"\ge",
                "≠": r"\ne",
                "∪": r"\cup",
                "∩": r"\cap",
                "∈": r"\in",
                "±": r"\pm",
                "∅": r"\emptyset",
                "θ": r"\theta",
                "α": r"\alpha",
                "β": r"\beta",
                "ℝ": r"\mathbb{R}",
                "≈": r"\approx",
            }.items()
        },
        "°": r"^\circ ",
        "′": "'",
    }
)
_FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        """sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan asin acos atan log ln lg exp sqrt max min gcd lcm
        mod det dim ker lim sup inf deg arg abs floor ceil sgn pi theta alpha beta infty infinity""",
    )
)
_COMPUTED = frozenset(
    re.findall(
        r"\w+",
        """frac sqrt cdot times div binom pi theta alpha beta log ln lg exp sin cos tan cot sec csc arcsin arccos arctan
        sinh cosh tanh max min gcd lcm sum prod int lfloor rfloor lceil rceil lvert rvert vert circ degree overline
        text textbf textit textrm mathrm mathbf mathit mbox operatorname infty approx boldsymbol""",
    )
)
"""Commands in expressions that evaluate to a number."""
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|boldsymbol|mbox)\s?\{([^{}]*)\}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_UNIT = re.compile(
    r"""(?:\\[,;: !]|\\q?quad|~|\s)*
    (?: \\(?:text(?:rm|bf|it)?|mathrm|mbox)\s?\{\s*(?P<text>[^{}\d]*)\}(?:\^\s?\{?\s?[23]\s?\}?)?
      | (?<=[\d})$\s])(?P<words>[^\W\d_]{1,16}\.?(?:(?:[ -]|\s?/\s?)[^\W\d_]{1,16}\.?){0,4}(?:\^\s?\{?\s?-?[23]\s?\}?)?)
    )\s*$""",
    re.VERBOSE,
)
_NO_UNITS = re.compile(
    r"\b(?:not?|nor|never|wrong|incorrect|is|are|isn|or|and|if|but|maybe|either|percent|pct|hundred|thousand|million|billion|trillion|[a-zA-Z]{16,}|i|e|x|y|z|n|k|a|b)\b",
    re.IGNORECASE,
)
_SEPARATED = re.compile(r"(?<=\d)(?:\{,\}|\\[,!;: ]|[\u00a0\u2009\u202f'’])(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d]|,\d)")
_OR = re.compile(r"(?:\s|\\text\{|\}|,)\s*(?:or|and|OR|AND)\b\s*|\\(?:lor|vee|land|wedge)(?![a-zA-Z])|;")
_REPEATING = re.compile(r"(\d{0,9})\.(\d{0,9})\\(?:overline|bar|dot)\s?\{(\d{1,9})\}")
_VULGAR = re.compile(f"[{''.join(VULGAR)}]")
_SIDE = re.compile(r"(?<![<>!\\:=])=(?![=>])")
_NAMED = re.compile(
    r"[a-zA-Z](?:_\{?\w{1,4}\}?)?'?(?:\((?:[a-zA-Z]|-?\d{1,4})\))?|[A-Z]{2,4}"
    r"|\\(?:theta|alpha|beta|gamma|phi|lambda|mu|angle\s?\w{1,3})"
)
_FORMULA = re.compile(r"(?<!\\)\$\$?([^$\n]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DENIED_BEFORE = re.compile(r"(?:\bnot|n't|\bnever|\bneither|\bnor|≠|!=)\W{0,4}$", re.IGNORECASE)
_JOINED = re.compile(r"\b(?:and|or)\b")
_LISTED_BETWEEN = re.compile(r"[ \t,;]*(?:or|and|nor|to)?[ \t,;]*", re.IGNORECASE)


def tidy(text: str) -> str:
    """An expression in LaTeX, without markup around it."""
    text = text.strip().strip("`").strip()
    text = re.sub(r"\*\*", "", re.sub(r"(?<=[\w)])\*\*(?=[\d(-])", "^", text))
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{m[0].translate(_SUPER)}}}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: f"_{{{m[0].translate(_SUB)}}}", text)
    text = re.sub(r"√\s?(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    text = _SEPARATED.sub("", text)
    text = _VULGAR.sub(_as_frac, text)
    text = text.translate(_SYMBOLS)
    text = re.sub(r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}", unicodedata.normalize("NFKC", text))
    text = re.sub(
        r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\(?:displaystyle|large|Large|huge)(?![a-zA-Z])|\\(?:,|;|:|!)|\\(?=\s)",
        " ",
        text,
    )
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]|(?<!\\)\$\$?", " ", text)
    text = re.sub(r"\\\$|[€£¥]", " ", text)
    text = " ".join(text.split())
    if not re.match(r"\\?[(\[{]", text):  # (1,234) is a pair
        text = _GROUPED.sub(lambda m: m[0].replace(",", "").replace(" ", ""), text)
    text = _REPEATING.sub(_repeating_fraction, text)
    text = text.rstrip(".,;: ") if not text.endswith(("\\,", "\\;")) else text
    return _bare(text)


def _as_frac(vulgar: re.Match[str]) -> str:
    over, _, under = VULGAR[vulgar[0]].partition("/")
    return rf"\frac{{{over}}}{{{under}}}"


def _repeating_fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, fixed, period = match[1] or "0", match[2], match[3]
    under = 10 ** len(fixed) * (10 ** len(period) - 1)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{under}}}"


def _bare(text: str) -> str:
    """Removes brackets around a single number: `(-5)` is -5, while `(1, 2)` stays."""
    inner = re.fullmatch(r"[({]\s*([-+]?[\d.]+(?:/\d+)?|-?\\frac\s?\{\d+\}\s?\{\d+\})\s*[)}]", text)
    return inner[1] if inner else text


def without_unit(text: str) -> str:
    """A number without the words after it: for `5 cm^2` or `7 apples`, the number."""
    unit = _UNIT.search(text)
    if unit is None or not unit.start():
        return text
    words = unit["text"] if unit["text"] is not None else unit["words"]
    head = text[: unit.start()].strip()
    return head if not _NO_UNITS.search(words) and re.search(r"[\d})]$", head) and not has_words(head) else text


def has_words(text: str) -> bool:
    """Whether there are natural-language words besides the mathematics."""
    bare = _COMMAND.sub(" ", _TEXT.sub(r" \1 ", re.sub(r"\\(?:begin|end)\s?\{[^{}]*\}", " ", text)))
    return any(word.lower() not in _FUNCTIONS and not word.isupper() for word in _WORD.findall(bare))


def expand_text_commands(text: str) -> str:
    """The text, with LaTeX text commands replaced by their content."""
    return _TEXT.sub(r" \1 ", text)


def without_text_commands(text: str) -> str:
    """The text without LaTeX text commands and without the words that join several answers."""
    return _JOINED.sub(" ", _TEXT.sub(" ", text))


def without_joining_words(text: str) -> str:
    """The text with LaTeX text commands replaced by their content, without the words that join several answers."""
    return _JOINED.sub(" ", expand_text_commands(text))


def is_letters(text: str) -> bool:
    """Whether it is letters only, words or the name of a choice: such answers are compared as text."""
    return bool(re.fullmatch(r"[(\s]*[^\W\d_]+(?:[\s'’-]+[^\W\d_]+)*[)\s.]*", _TEXT.sub(r"\1", text)))


def words(text: str) -> str:
    """Normalised words, for comparison."""
    return " ".join(re.findall(r"[^\W_]+", _TEXT.sub(r" \1 ", text).casefold()))


def lists_several(text: str) -> bool:
    """Whether it names several things, by a comma, `or`, `and` or a gap between numbers, outside brackets."""
    flat = _outside_brackets(expand_text_commands(text))
    return bool("," in flat or _OR.search(flat) or re.search(r"\d\s+-?\d", flat) or re.search(r"\\pm|\\mp|/\s*/", flat))


def bare_base(text: str) -> str:
    """A numeral and its base without brackets and spaces: `1010_2` for `1010_{2}` and `1010_{\\text{2}}`."""
    return re.sub(r"[\s{}()]", "", expand_text_commands(text))


def is_computed(text: str) -> bool:
    """Whether the whole expression is arithmetic, so that it can evaluate to one number: no relation but `=`, no arrow,
    dots, union or anything else of which math-verify would parse one side."""
    if not text.isascii() or re.search(r"[<>?;&#@~]|\.\.|:=|==|\|\s*\|", text) or text.count("|") % 2:
        return False
    commands = [command[1:] for command in _COMMAND.findall(text)]
    return all(command in _COMPUTED for command in commands) and (
        "approx" not in commands or (text.startswith("\\approx") and commands.count("approx") == 1)
    )


def equation_sides(text: str) -> list[str]:
    """The sides of an equation, without those that only name the unknown: `3 + 4` and `7` for `x = 3 + 4 = 7`. The whole
    text, if it is not exactly one equation."""
    if lists_several(text):
        return [text]
    parts = [part.strip() for part in _SIDE.split(text)]
    if len(parts) == 1 or any(re.search(r"\\[lgn]eq?(?![a-zA-Z])|[<>]|\\in(?![a-zA-Z])", part) for part in parts):
        return [text]
    if not all(parts):
        return [parts[-1]] if parts[-1] and not any(parts[:-1]) else [text]
    values = [part for part in parts if not _NAMED.fullmatch(part)]
    return values or [parts[-1]]


def expression_in(text: str) -> str | None:
    """The expression that a sentence gives: all of it if it has no words, otherwise its last formula or its last number;
    None if it lists several, or says what the answer is not."""
    if len(text) > LONGEST:
        return _last_numeral(text)
    whole = tidy(text)
    if not has_words(_JOINED.sub(" ", without_unit(whole))) or not re.search(r"[\d$\\]", text):
        return whole
    formulas = [match for match in _FORMULA.finditer(text) if _is_formula(match)]
    if formulas:
        last = formulas[-1]
        listed = len(formulas) > 1 and _LISTED_BETWEEN.fullmatch(text, formulas[-2].end(), last.start())
        if listed or _DENIED_BEFORE.search(text[max(0, last.start() - 12) : last.start()]):
            return None
        if not re.search(r"\d", text[last.end() :]):
            return tidy(next(group for group in last.groups() if group is not None))
    return _last_numeral(text)


def _is_formula(match: re.Match[str]) -> bool:
    """Dollar signs may mean money: `$5 and $7` is not a formula."""
    inside = next(group for group in match.groups() if group is not None)
    return not has_words(inside)


def _last_numeral(text: str) -> str | None:
    plain = plain_numerals(tail_with_digits(text))
    before, last = last_two_numerals(plain)
    if last is None or last.value is None:
        return None
    if before is not None and _LISTED_BETWEEN.fullmatch(plain, before.end, last.start):
        return None
    return f"{last.value}" + (r"\%" if last.percent else "")


def _outside_brackets(text: str) -> str:
    """The text outside brackets; the brackets of a whole set or tuple count too."""
    flat: list[str] = []
    depth = 0
    for token in re.findall(r"\\[{}]|\\.|[()\[\]{}]|.", text, re.DOTALL):
        if token in ("(", "[", "{", "\\{"):
            depth += 1
        elif token in (")", "]", "}", "\\}"):
            depth = max(0, depth - 1)
        elif not depth:
            flat.append(token)
    return "".join(flat)
