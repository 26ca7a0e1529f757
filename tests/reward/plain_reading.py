"""The plain definition of numerals and final statements: the grammar without the shortcuts of `roll.reward.numerals` and
`roll.reward.extract`, which must find the same in every text.

Every substitution is applied to every text, every word is a token, every numeral is computed, and every line is searched.
A change of the grammar is made here too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from roll.reward.extract import trim

LONGEST = 400

_TRANSLATED = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–﹣－", "-"),
        **dict.fromkeys("×·⋅∗✕", "*"),
        **dict.fromkeys("€£¥₹₽₩¢", "$"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        **dict.fromkeys("’‘＇", "'"),
        "⁄": "/",
        "∕": "/",
        "÷": "/",
        "—": " ",
        "＋": "+",
        "．": ".",
        "，": ",",
        "％": "%",
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    }
)
VULGAR = {
    c: unicodedata.normalize("NFKC", c).replace("⁄", "/")
    for c in map(chr, (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189))
}
_DIGITS = "0123456789" + "".join(chr(0xFF10 + digit) for digit in range(10)) + "⁰¹²³⁴⁵⁶⁷⁸⁹" + "".join(VULGAR)
_RUNNING = _DIGITS + ".,:/'^- "
_TAIL = 200
"""Characters that are read for the last numerals of a text, and more if they begin inside a numeral."""
_VULGAR = re.compile(f"(\\d?)([{''.join(VULGAR)}])")
_SUPERSCRIPTS = {ord(sup): digit for sup, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True)}
_SUPER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_FRAC = re.compile(r"(?:(\d)\s{0,2})?\\[dtc]?frac\s?(?:\{\s?(\d+)\s?\}|(\d))\s?(?:\{\s?(\d+)\s?\}|(\d))", re.ASCII)
_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt)?|mathrm|mathbf|mathit|boldsymbol|mbox)"
_REPLACED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.ASCII), by)
    for pattern, by in (
        (r"\\(?:left|right|displaystyle|textstyle|[bB]igg?)(?![a-zA-Z])", ""),
        (r"\{,\}", ","),
        (r"\\[,;:! ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])", "≈"),
        (r"\\(?:to|implies|therefore|mapsto|leadsto|[lL]ong[rR]ightarrow|[rR]ightarrow)(?![a-zA-Z])", "→"),
        (r"\\(?:[hv]space|phantom|label|tag|color)\s?\{[^{}]*\}|\\(?:begin|end)\s?\{[a-z]*\*?\}", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|°", " "),
        (rf"{_TEXT}\s?\{{([^{{}}]*)\}}(?=\^)", r" \1"),
        (rf"{_TEXT}\s?\{{([^{{}}]*)\}}", r" \1 "),
        (r"\^\s?\{\s?([+-]?\d+)\s?\}|\^\s?\(\s?([+-]?\d+)\s?\)", r"^\1\2"),
        (r"(?<=\d)\s?\*\*\s?(?=[+-]?\d)", "^"),
        (r"\*\*+|\*(?!\s?[-(\d])|(?<![\d)])(?<![\d)]\s)\*|(?<!\w)_+|_+(?!\w)|\\[()\[\]]", " "),
        (r"`|(?<![^\W\d_])[$]", ""),
        (r"[$]", " "),
    )
)
_MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

_WHOLE = r"""(?:(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?:[ ]\d{3})+|(?:'\d{3})+)|[1-9]\d?(?:,\d\d)+,\d{3})(?!\d)|\d+)"""
_NUMERAL = re.compile(
    rf"""
    (?P<word>[^\W\d_]\w*(?:[\^/-]\{{?[-+]?\w+\}}?)*)          # m^2, m/s^2, GPT-4, x_1: words, whatever digits they hold
  | (?P<command>\\[a-zA-Z]+[ ]?(?:\{{[^{{}}]*\}}|\d[\d.,]*)*)    # \sqrt{{2}}: not computed
  | (?P<sign>[-+])?
    (?: (?P<mixed>\d{{1,9}})[ ]{{1,2}}(?P<over>\d{{1,9}})[ ]?/[ ]?(?P<under>\d{{1,9}})(?![\d/])
      | (?P<european>[1-9]\d{{0,2}}(?:(?:\.\d{{3}})+,\d+|(?:\.\d{{3}}){{2,}}))(?![\d.,]\d)
      | (?P<top>{_WHOLE})[ ]?/[ ]?(?P<bottom>\d+)(?!/)
      | (?P<plain>{_WHOLE}(?:\.\d+)?|(?<![\w.])\.\d+)
        (?:[eE](?P<e>[+-]?\d{{1,6}})(?!\w)|[ ]?[*x][ ]?10[ ]?\^[ ]?(?P<ten>[+-]?\d{{1,6}}))?
    )
    (?:\^(?P<power>[+-]?\d{{1,6}}))?
    (?:[ -]?(?P<times>{"|".join(_MULTIPLIERS)})\b)?
    (?P<percent>[ ]?%)?
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_GLUED = re.compile(
    r"""[.:,/'^_*+-]?\d | \^ | _\{ | \(\s?[-\d] | !(?=[\w(]) | [.]?\s?\\(?:sqrt|pi|frac|log|ln|sin|cos|tan|infty|overline)
    | (?:[xyznkKMBie]|[^\W\d_]+\d)(?!\w)""",
    re.VERBOSE | re.ASCII,
)
r"""What makes a numeral part of something else when it follows at once: `:30`, `/3`, `x`, `\sqrt`."""
_RUN = re.compile(r"[\w.,:/'^*+\\{}-]*", re.ASCII)
NEGATED = re.compile(
    r"""(?:(?:\b(?:can)?not|n't|\bnever)(?:\s(?:be|equal|equal\sto))?|\bup\sto|\bthan|\bat\sleast|\bat\smost|\bneither|\bnor|≠|!=|≤|≥|\\n?[lg]eq?|\\neq?|\\[lg]t|<=|>=|<|(?<![-=\w"'/>])>|(?<![<\w/])[a-zA-Z]>|\\not\s?=?|\\pm|±)\s{0,3}$""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
CONTRASTED = re.compile(r"(?:[,;(]\s{0,2}not|rather than|instead of)\s{1,3}$", re.IGNORECASE)
SIGNED = re.compile(r"(\S?)\s{0,2}(?:\b(?:minus|negative)\s{1,2}|-\s?[({]{1,2}\s?)$", re.IGNORECASE)
_DENIED = re.compile(r"\s?(?:is|was|are|isn't|wasn't)(?:\snot\b|\s(?:wrong|incorrect|false)\b|n't)", re.IGNORECASE)
_OPERATED = re.compile(r"[\w)\]}.%-]\Z", re.ASCII)


@dataclass(frozen=True)
class Numeral:
    """A numeral in a text: its position and its value; None for text that only begins like a number."""

    start: int
    end: int
    value: Fraction | None
    percent: bool = False


def tail_with_digits(text: str) -> str:
    """The end of a text with its last numerals, so that a long text is not read completely for one number."""
    end = max(text.rfind(digit) for digit in _DIGITS) + 1
    start = max(0, end - _TAIL)
    while start and end - start < _TAIL + 2 * LONGEST and text[start - 1] in _RUNNING:
        start -= 1
    tail = text[start : end + _TAIL]
    return tail.lstrip(_RUNNING) if start and text[start - 1] in _RUNNING else tail


def plain_numerals(text: str) -> str:
    """The text with its numbers in plain characters."""
    if not text.isascii():
        text = _SUPER.sub(lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
        text = _VULGAR.sub(lambda match: f"{match[1]} {VULGAR[match[2]]}" if match[1] else VULGAR[match[2]], text)
        text = text.translate(_TRANSLATED)
    if "frac" in text:
        text = _FRAC.sub(
            lambda match: f"{match[1] + ' ' if match[1] else ''}{match[2] or match[3]}/{match[4] or match[5]}", text
        )
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    return text


def numerals(text: str) -> Iterator[Numeral]:
    """The numerals of a text in plain characters, in order."""
    at = 0
    while match := _NUMERAL.search(text, at):
        at = match.end()
        if match["word"]:
            continue
        if match["command"]:
            if any(character.isdigit() for character in match[0]) and not _is_layout(match[0]):
                yield Numeral(match.start(), at, None)
            continue
        start = match.start()
        before = text[max(0, start - 16) : start]
        value: Fraction | None
        if CONTRASTED.search(before):
            continue
        if _GLUED.match(text, at):
            run = _RUN.match(text, at)
            at = run.end() if run else at
            value = None
        elif NEGATED.search(before) or _DENIED.match(text, at) or (match["sign"] and _OPERATED.search(before)):
            value = None
        else:
            value = _value(match)
            if value is not None and not match["sign"]:
                value = _under_sign(value, before)
        yield Numeral(start, at, value, match["percent"] is not None)


def tuples(text: str) -> list[tuple[int, int, Fraction | None, bool]]:
    """The numerals, to be compared."""
    return [(each.start, each.end, each.value, each.percent) for each in numerals(text)]


def _under_sign(value: Fraction, before: str) -> Fraction | None:
    """The value of an unsigned numeral, given the text before it: -5 for `minus 5`, `-(5)` and `= - 5`. None for the
    argument of a function, `f(5)`, and for a subtrahend, `9 minus 5`."""
    sign = SIGNED.search(before)
    if sign:
        return None if sign[1] and _OPERATED.search(sign[1]) and sign[0].lower().find("negative") < 0 else -value
    if re.search(r"\b[a-zA-Z]\($", before):
        return None
    return -value if re.search(r"[=(]\s?-\s$", before) else value


def _is_layout(command: str) -> bool:
    return bool(re.match(r"\\(?:ref|quad)", command))


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a matched numeral; None if it has none, or too many digits."""
    if len(match[0]) > LONGEST:
        return None
    try:
        value = _unsigned(match)
    except ZeroDivisionError:
        return None
    if value is None:
        return None
    if match["power"]:
        if value.denominator != 1 or abs(int(match["power"])) * len(str(value)) > LONGEST or not value:
            return None
        value = value ** int(match["power"])
    if match["times"]:
        value *= _MULTIPLIERS[match["times"].lower()]
    return -value if match["sign"] == "-" else value


def _unsigned(match: re.Match[str]) -> Fraction | None:
    if match["mixed"]:
        over, under = int(match["over"]), int(match["under"])
        return int(match["mixed"]) + Fraction(over, under) if over < under else None
    if match["european"]:
        return Fraction(match["european"].replace(".", "").replace(",", "."))
    if match["top"]:
        return Fraction(_digits(match["top"])) / Fraction(match["bottom"])
    exponent = int(match["e"] or match["ten"] or 0)
    if abs(exponent) > LONGEST:
        return None
    return Fraction(_digits(match["plain"])) * Fraction(10) ** exponent


def _digits(numeral: str) -> str:
    return numeral.replace(",", "").replace(" ", "").replace("'", "")


_MARKUP = r"[ \t*_`]{0,4}"
_CLAUSE = r"(?:[^\n.:=?!]|\.(?=\d)){0,60}?"
STATEMENT = re.compile(
    rf"""\banswers?\b(?:
        {_CLAUSE}\b(?:is|are|was|equals|(?:would|should|must|will)[ ]be)\b(?:[ ]equal[ ]to\b)?{_MARKUP}[:=]?
      | {_CLAUSE}[:=]
    )
    | ^[ \t\#*_]{{0,12}}(?:the[ ])?(?:final[ ])?answer[ \t*_]{{0,12}}$""",
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)


def final_statement(text: str) -> str | None:
    """The line after the last "the answer is", or after a heading `Answer`."""
    if "answer" not in text.lower():
        return None
    ends = [match.end() for match in STATEMENT.finditer(text)]
    return _line(text[ends[-1] :]) if ends else None


def _line(rest: str) -> str:
    rest = rest.lstrip(" \t\r\n*_`:=#>")
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        end = rest.find(closing, 2)
        if rest.startswith(opening) and end >= 0:
            return rest[2:end].strip()
    return trim(rest.partition("\n")[0])
