"""Parses numerals in plain text and LaTeX to exact values.

A text is first brought into plain characters (`plain_numerals`): one kind of minus, `*` for every multiplication sign,
`^` for exponents, `3/4` for `\\frac{3}{4}` and `¾`, no currency signs, emphasis or dollars around formulas. Then numerals
are searched in one pass, in time linear in the text.

A numeral is a whole number, a decimal, a fraction or a mixed number, with separators of thousands, an exponent or a power
of ten. What begins like a number and is none (`3:30`, `1/2/3`, `2024-01-15`, `7x`, `3\\sqrt{2}`) is found too, without a
value: neither a piece of it nor a number that stands before it may be taken in its place.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

LONGEST = 400
"""Maximum characters of a numeral, and digits from an exponent; a longer numeral has no value."""

_TRANSLATED = {
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
VULGAR = {
    c: unicodedata.normalize("NFKC", c).replace("⁄", "/")
    for c in map(chr, (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189))
}
_DIGITS = "0123456789" + "".join(chr(0xFF10 + digit) for digit in range(10)) + "⁰¹²³⁴⁵⁶⁷⁸⁹" + "".join(VULGAR)
_TO_LAST_DIGIT = re.compile(f".*[{_DIGITS}]", re.DOTALL)
_RUNNING = _DIGITS + ".,:/'^- "
_TAIL = 200
"""Characters that are read for the last numerals of a text, and more if they begin inside a numeral."""
_FOREIGN = re.compile(f"[{''.join(_TRANSLATED)}]")
_FRACTION = re.compile(f"[{''.join(VULGAR)}]")
_SUPERSCRIPTS = {ord(sup): digit for sup, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True)}
_SUPER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_FRAC = re.compile(r"(?:(\d)\s{0,2})?\\[dtc]?frac\s?(?:\{\s?(\d+)\s?\}|(\d))\s?(?:\{\s?(\d+)\s?\}|(\d))", re.ASCII)
_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt)?|mathrm|mathbf|mathit|boldsymbol|mbox)"
_REPLACED: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (marks, re.compile(pattern, re.ASCII), by)
    for marks, pattern, by in (
        ("\\", r"\\(?:left|right|displaystyle|textstyle|[bB]igg?)(?![a-zA-Z])", ""),
        ("{", r"\{,\}", ","),
        ("\\~", r"\\[,;:! ]|~|\\q?quad(?![a-zA-Z])", " "),
        ("\\", r"\\(?:times|cdot|ast)(?![a-zA-Z])", "*"),
        ("\\", r"\\div(?![a-zA-Z])", "/"),
        ("\\", r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])", "≈"),
        ("\\", r"\\(?:to|implies|therefore|mapsto|leadsto|[lL]ong[rR]ightarrow|[rR]ightarrow)(?![a-zA-Z])", "→"),
        ("\\", r"\\(?:[hv]space|phantom|label|tag|color)\s?\{[^{}]*\}|\\(?:begin|end)\s?\{[a-z]*\*?\}", " "),
        ("\\", r"\\([$%#&_])", r"\1"),
        ("\\°", r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|°", " "),
        ("\\", rf"{_TEXT}\s?\{{([^{{}}]*)\}}(?=\^)", r" \1"),
        ("\\", rf"{_TEXT}\s?\{{([^{{}}]*)\}}", r" \1 "),
        ("^", r"\^\s?\{\s?([+-]?\d+)\s?\}|\^\s?\(\s?([+-]?\d+)\s?\)", r"^\1\2"),
        ("*", r"(?<=\d)\s?\*\*\s?(?=[+-]?\d)", "^"),
        ("*", r"\*(?:\*+|(?!\s?[-(\d])|(?<![\d)]\*)(?<![\d)]\s\*))", " "),
        ("_", r"_(?:(?<!\w_)_*|_*(?!\w))", " "),
        ("\\", r"\\[()\[\]]", " "),
        ("$", r"[$](?<![^\W\d_][$])", ""),
        ("`", r"`", ""),
        ("$", r"[$]", " "),
    )
)
"""Marks, a pattern whose every match contains one of them, and what replaces a match."""
_MARKED = re.compile(f"[{re.escape(''.join(marks for marks, _, _ in _REPLACED))}]")
_MULTIPLIERS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

_WHOLE = r"""(?>(?:[1-9]\d{0,2}+(?:(?:,\d{3})+|(?:[ ]\d{3})+|(?:'\d{3})+)|[1-9]\d?+(?:,\d\d)+,\d{3})(?!\d)|\d+)"""
_GLUED = r"""[.:,/'^_*+-]?\d | \^ | _\{ | \(\s?[-\d] | !(?=[\w(])
    | [.]?\s?\\(?:sqrt|pi|frac|log|ln|sin|cos|tan|infty|overline)
    | (?:[xyznkKMBie]|[^\W\d_]+\d)(?!\w)"""
r"""What makes a numeral part of something else when it follows at once: `:30`, `/3`, `x`, `\sqrt`."""
_TOKEN = re.compile(
    rf"""
    (?>[^0-9\\]*[ \n]|)                                        # to the last space before the next digit or command
    (?: [^0-9a-zA-Z\\+.-]
      | [^\W\d_]\w*(?:[\^/-]\{{?[-+]?\w+\}}?)*                 # m^2, m/s^2, GPT-4, x_1: words, whatever digits they hold
      | [+-](?!\.?\d) | \.(?!\d) | (?<=[\w.])\. | \\(?![a-zA-Z])
    )*+
    (?: (?P<command>\\[a-zA-Z]+[ ]?(?:\{{[^{{}}]*\}}|\d[\d.,]*)*)    # \sqrt{{2}}: not computed
      | (?P<numeral>
          (?P<sign>[-+])?
          (?: (?P<mixed>\d{{1,9}}+)[ ]{{1,2}}(?P<over>\d{{1,9}}+)[ ]?/[ ]?(?P<under>\d{{1,9}}+)(?![\d/])
            | (?P<european>[1-9]\d{{0,2}}+(?:(?:\.\d{{3}})+,\d+|(?:\.\d{{3}}){{2,}}))(?![\d.,]\d)
            | (?P<whole>{_WHOLE}|(?<![\w.])(?=\.\d))
              (?: [ ]?/[ ]?(?P<bottom>\d+)(?!/)
                | (?P<places>\.\d+)?
                  (?:[eE](?P<e>[+-]?\d{{1,6}})(?!\w)|[ ]?[*xX][ ]?10[ ]?\^[ ]?(?P<ten>[+-]?\d{{1,6}}))?
              )
          )
          (?:\^(?P<power>[+-]?\d{{1,6}}))?
          (?:[ -]?(?P<times>(?i:{"|".join(_MULTIPLIERS)}))\b)?
          (?P<percent>[ ]?%)?
        )
        (?: (?={_GLUED})(?P<glued>[\w.,:/'^*+\\{{}}-]*) | )
    )
    """,
    re.VERBOSE | re.ASCII,
)
r"""The next command or numeral, and all text before it that is neither: words, with their digits, and other characters.
`glued` is the rest of what a numeral is only the beginning of."""
_NEAR_SIGN = 16
"""Characters before a numeral that may deny it, or give it a sign."""
_NEGATED = re.compile(
    r"""(?:(?:\b(?:can)?not|n't|\bnever)(?:\s(?:be|equal|equal\sto))?|\bup\sto|\bthan|\bat\sleast|\bat\smost|\bneither|\bnor|≠|!=|≤|≥|\\n?[lg]eq?|\\neq?|\\[lg]t|<=|>=|<|(?<![-=\w"'/>])>|(?<![<\w/])[a-zA-Z]>|\\not\s?=?|\\pm|±)\s{0,3}$""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_CONTRASTED = re.compile(r"(?:[,;(]\s{0,2}not|rather than|instead of)\s{1,3}$", re.IGNORECASE)
_SIGNED = re.compile(r"(\S?)\s{0,2}(?:\b(?:minus|negative)\s{1,2}|-\s?[({]{1,2}\s?)$", re.IGNORECASE)
_ARGUMENT = re.compile(r"\b[a-zA-Z]\($")
_MINUS = re.compile(r"[=(]\s?-\s$")
_CUES = (
    *("not", "than", "of", "n't", "never", "be", "equal", "to", "least", "most", "neither", "nor", "us", "uſ", "ve"),
    *("≠", "≤", "≥", "±", "<", ">", "!=", "<=", ">=", "not=", *(f"not{space}=" for space in " \t\n\r\f\v")),
    *("\\le", "\\leq", "\\ge", "\\geq", "\\nle", "\\nleq", "\\nge", "\\ngeq", "\\ne", "\\neq", "\\lt", "\\gt", "\\pm"),
    *("(", "{", "-"),
)
"""With one of these, in lower case, ends what the five patterns above find, apart from white space."""
_DENIED = re.compile(r"\s?(?:is|was|are|isn't|wasn't)(?:\snot\b|\s(?:wrong|incorrect|false)\b|n't)", re.IGNORECASE)
_OPERATED = re.compile(r"[\w)\]}.%-]\Z", re.ASCII)


class Numeral(NamedTuple):
    """A numeral in a text: its position and its value; None for text that only begins like a number."""

    start: int
    end: int
    value: Fraction | None
    percent: bool = False


def tail_with_digits(text: str) -> str:
    """The end of a text with its last numerals, so that a long text is not read completely for one number."""
    last = _TO_LAST_DIGIT.match(text)
    end = last.end() if last else 0
    start = max(0, end - _TAIL)
    while start and end - start < _TAIL + 2 * LONGEST and text[start - 1] in _RUNNING:
        start -= 1
    tail = text[start : end + _TAIL]
    return tail.lstrip(_RUNNING) if start and text[start - 1] in _RUNNING else tail


def plain_numerals(text: str) -> str:
    """The text with its numbers in plain characters."""
    if not text.isascii():
        text = _SUPER.sub(lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
        text = _FRACTION.sub(_written_out, text)
        text = _FOREIGN.sub(lambda match: _TRANSLATED[match[0]], text)
    if "frac" in text:
        text = _FRAC.sub(
            lambda match: f"{match[1] + ' ' if match[1] else ''}{match[2] or match[3]}/{match[4] or match[5]}", text
        )
    if not _MARKED.search(text):
        return text
    for marks, pattern, by in _REPLACED:
        for mark in marks:
            if mark in text:
                text = pattern.sub(by, text)
                break
    return text


def _written_out(fraction: re.Match[str]) -> str:
    """`1/2` for `½`, with a space after the whole number of a mixed one."""
    at = fraction.start()
    return (" " if fraction.string[at - 1 : at].isdecimal() else "") + VULGAR[fraction[0]]


def numerals(text: str) -> Iterator[Numeral]:
    """The numerals of a text in plain characters, in order."""
    return (numeral for token in _tokens(text) if (numeral := _numeral(text, token)) is not None)


def last_two_numerals(text: str) -> tuple[Numeral | None, Numeral | None]:
    """The last two of `numerals`, None for what does not exist; only they are computed."""
    last: Numeral | None = None
    for token in reversed(list(_tokens(text))):
        numeral = _numeral(text, token)
        if numeral is not None and last is not None:
            return numeral, last
        last = last or numeral
    return None, last


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """The commands and numerals of a text, in order."""
    at = 0
    while token := _TOKEN.match(text, at):
        at = token.end()
        if token["glued"] and _is_contrasted(_before(text, token)):
            at = token.end("numeral")
        yield token


def _before(text: str, token: re.Match[str]) -> str:
    """The text shortly before a numeral."""
    start = token.start("numeral")
    return text[max(0, start - _NEAR_SIGN) : start]


def _is_contrasted(before: str) -> bool:
    """Whether the text rejects a numeral: `rather than 5`."""
    return _has_cue(before) and _CONTRASTED.search(before) is not None


def _has_cue(before: str) -> bool:
    """Whether the text before a numeral may change what it says; most texts do not."""
    return before.rstrip().lower().endswith(_CUES)


def _numeral(text: str, token: re.Match[str]) -> Numeral | None:
    """The numeral of a token; None for a command without digits, and for a numeral that the text rejects: `rather than
    5`."""
    if token["command"]:
        has_digits = any(character.isdigit() for character in token["command"]) and not _is_layout(token["command"])
        return Numeral(token.start("command"), token.end(), None) if has_digits else None
    before = _before(text, token)
    has_cue = _has_cue(before)
    if has_cue and _CONTRASTED.search(before):
        return None
    value: Fraction | None = None
    is_denied = (has_cue and _NEGATED.search(before)) or _DENIED.match(text, token.end())
    if token["glued"] is None and not is_denied and not (token["sign"] and _OPERATED.search(before)):
        value = _value(token)
        if value is not None and has_cue and not token["sign"]:
            value = _under_sign(value, before)
    return Numeral(token.start("numeral"), token.end(), value, token["percent"] is not None)


def _under_sign(value: Fraction, before: str) -> Fraction | None:
    """The value of an unsigned numeral, given the text before it: -5 for `minus 5`, `-(5)` and `= - 5`. None for the
    argument of a function, `f(5)`, and for a subtrahend, `9 minus 5`."""
    sign = _SIGNED.search(before)
    if sign:
        return None if sign[1] and _OPERATED.search(sign[1]) and sign[0].lower().find("negative") < 0 else -value
    if _ARGUMENT.search(before):
        return None
    return -value if _MINUS.search(before) else value


def read_number(text: str) -> Numeral | None:
    """The number if the whole text is one: only a currency or percent sign, brackets or a full stop may surround it."""
    if len(text) > 4 * LONGEST:
        return None
    plain = plain_numerals(text).strip()
    found = list(numerals(plain))
    if len(found) != 1 or found[0].value is None:
        return None
    before, after = plain[: found[0].start].strip(), plain[found[0].end :].strip().removesuffix(".").strip()
    return found[0] if (before, after) in (("", ""), ("(", ")"), ("{", "}")) else None


def _is_layout(command: str) -> bool:
    return bool(re.match(r"\\(?:ref|quad)", command))


def _value(token: re.Match[str]) -> Fraction | None:
    """The value of a numeral; None if it has none, or too many digits."""
    written = token["numeral"]
    if len(written) > LONGEST:
        return None
    if written.isdecimal():
        return Fraction(int(written))
    try:
        value = _unsigned(token)
    except ZeroDivisionError:
        return None
    if value is None:
        return None
    if token["power"]:
        if value.denominator != 1 or abs(int(token["power"])) * len(str(value)) > LONGEST or not value:
            return None
        value = value ** int(token["power"])
    if token["times"]:
        value *= _MULTIPLIERS[token["times"].lower()]
    return -value if token["sign"] == "-" else value


def _unsigned(token: re.Match[str]) -> Fraction | None:
    if token["mixed"]:
        over, under = int(token["over"]), int(token["under"])
        return int(token["mixed"]) + Fraction(over, under) if over < under else None
    if token["european"]:
        return Fraction(token["european"].replace(".", "").replace(",", "."))
    whole = token["whole"].replace(",", "").replace(" ", "").replace("'", "")
    if token["bottom"]:
        return Fraction(int(whole), int(token["bottom"]))
    exponent = int(token["e"] or token["ten"] or 0)
    if abs(exponent) > LONGEST:
        return None
    places = token["places"] or "."
    value = Fraction(int(whole + places[1:]), 10 ** (len(places) - 1))
    return value * Fraction(10) ** exponent if exponent else value
