"""Secrets: which settings hold some, how they are left out of everything that ROLL writes, and how they come back.

A setting holds a secret if its name says so (`Authorization`, `api_key`, `password`, `HF_TOKEN`), if it is a URL with a
password or with a secret in its query, or if it has the form of a known kind of token (`Bearer …`, `hf_…`, `sk-…`).

What always holds:

- Where a configuration is saved or shown, `<redacted-secret>` stands in place of a secret; `${NAME}`, which names an
  environment variable, stays. What is compared on resume is never a secret.
- A secret that a process has met, in a configuration, in options, or in its environment, is left out by its value of all
  texts that ROLL writes there: also where a server sent it back, quoted, escaped, in hex or in base64. Texts of fewer
  than 6 characters are not looked for: they would be found everywhere.

Importing this module loads little: processes that start often use it.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, quote_plus, unquote

from roll.config.errors import UserError

REDACTED = "<redacted-secret>"
_SHORTEST = 6
_SHORTEST_OF_ENVIRONMENT = 8


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALWAYS = _words(
    "authorization password passwd passphrase credential credentials cookie cookies apikey accesskey secretkey "
    "privatekey accesstoken authtoken bearertoken bearer jwt"
)
_LAST = frozenset(["auth", "pwd", "secret", "secrets"])
_KEYS = _words("api access private secret signing subscription account auth encryption service master ssh x app client")
"""What stands before `key` where that is a secret."""
_PLAIN_TOKENS = _words(
    "eos bos pad unk sep cls mask stop start end begin special image video audio tool think thinking per max min num "
    "prompt new next first last extra"
)
"""What stands before `token` where that is one of a text."""
_ABOUT = _words(
    "env name names file files path paths dir folder var variable column field id type kind mode count limit length "
    "url uri chars tokens header prefix pattern"
)
"""What a name ends with that says something about a secret, and is none."""
_IN_QUERIES = frozenset({"key", "code", "sig", "signature"})
_HEADERS = frozenset({"headers", "header", "cookies"})
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Where a pattern could begin at many places of one long word, what it looks ahead is bounded: else the time is quadratic.
_URL_USER = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,30}://)([^\s/?#\"'<>]+)@")
_QUERY_PART = re.compile(r"(?<=[?&;#])([A-Za-z0-9_.\-\[\]%]{1,64})=([^&;#\s\"'<>]+)")
_BEARER = re.compile(r"(?i)\b(bearer|basic|token|apikey|digest)(\s+)([A-Za-z0-9._~+/=:-]{6,})")
_KNOWN_KINDS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|"
    r"glpat-[A-Za-z0-9_-]{16,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30,}|"
    r"eyJ[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
)
_HEADER_LINE = re.compile(r"(?m)^(\s*)([A-Za-z0-9_-]+)(\s*:\s*)(\S.*)$")
_ONLY_REFERENCE = re.compile(r"(?i)(?:(?:bearer|basic|token|apikey|digest)\s+|[^:${}]*:|\$\{\w+\}:)?\$\{\w+\}")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether what stands under this name is a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in _PLAIN_TOKENS
    if words[-1] == "key":
        return before in _KEYS or words[0] == "header"
    return words[-1] in _LAST or not _ALWAYS.isdisjoint(words)


def redacted(value: Any, name: str = "") -> Any:
    """A value of a setting of that name with `<redacted-secret>` in place of every secret in it; references stay."""
    return _mapped(value, name, _unless_reference)


def redacted_with_references(value: Any, name: str = "") -> Any:
    """The same with references too: what two configurations that differ in their secrets alone have in common."""
    return _mapped(value, name, lambda secret: REDACTED)


def secrets_in(value: Any, name: str = "") -> list[str]:
    """Every secret of a value, as it is written there; references to the environment are none."""
    found: list[str] = []

    def note(secret: str) -> str:
        found.append(secret)
        return secret

    _mapped(value, name, note)
    return [secret for secret in found if not _ONLY_REFERENCE.fullmatch(secret.strip()) and REDACTED not in secret]


def name_at(path: Iterable[str | int]) -> str:
    """The name that says what stands at a path of keys and positions."""
    return next((part for part in reversed(list(path)) if isinstance(part, str)), "")


def resolved(value: Any, where: str) -> Any:
    """Options with the environment variables that their secrets refer to; `where` is the setting's dotted name.

    `${NAME}` is a reference where a secret may stand: under the name of one, in `headers`, and in a URL. Elsewhere it is
    a text like any other. `UserError` where a variable is not set, or where `<redacted-secret>` stands for what nobody
    knows."""
    return _resolved(value, where, where.rpartition(".")[2], False)


def _resolved(value: Any, where: str, name: str, headers: bool) -> Any:
    if isinstance(value, Mapping):
        inside = headers or name.lower() == "headers"
        return {key: _resolved(item, f"{where}.{key}", str(key), inside) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_resolved(item, f"{where}[{n}]", name, headers) for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, str):
        return value
    if REDACTED in value:
        raise UserError(
            f"{where} is {value}: what a run saves has no secrets in it. Write {where}=… again, as ${{NAME}} to have it "
            "read from the environment variable NAME each time"
        )
    if not headers and not is_secret_name(name) and "://" not in value:
        return value

    def read(reference: re.Match[str]) -> str:
        if not (found := os.environ.get(reference[1])):
            raise UserError(
                f"{where} refers to the environment variable {reference[1]}, which is not set: `export {reference[1]}=…`"
            )
        KNOWN.add([found])
        return found

    return _REFERENCE.sub(read, value)


def _unless_reference(secret: str) -> str:
    """`${NAME}`, `Bearer ${NAME}` and `user:${NAME}` stay as they are; a secret with more in it goes."""
    return secret if _ONLY_REFERENCE.fullmatch(secret.strip()) else REDACTED


def _mapped(value: Any, name: str, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every secret in it changed."""
    if isinstance(value, Mapping):
        kind = f"{name.lower().removesuffix('s')}-" if name.lower() in _HEADERS else ""
        return {key: _mapped(item, f"{kind}{key}", change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(item, name, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if is_secret_name(name):
        if isinstance(value, str):
            return change(value) if value else value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_SHORTEST:
            return change(str(value))
        return value
    if isinstance(value, str) and name.lower() in _HEADERS:
        value = _HEADER_LINE.sub(lambda found: _header(found, change), value)
    return _in_text(value, change) if isinstance(value, str) else value


def _header(line: re.Match[str], change: Callable[[str], str]) -> str:
    """A header that is written as one text, `X-Api-Key: …`, as `curl` takes it."""
    return f"{line[1]}{line[2]}{line[3]}{change(line[4])}" if is_secret_name(f"header-{line[2]}") else line[0]


def _in_text(text: str, change: Callable[[str], str]) -> str:
    """A text with the secrets of its URLs, and those whose form says what they are, changed."""
    if "://" in text:
        text = _URL_USER.sub(lambda found: f"{found[1]}{change(found[2])}@", text)
        text = _QUERY_PART.sub(
            lambda found: f"{found[1]}={change(found[2])}" if _is_secret_part(found[1]) else found[0], text
        )
    if " " in text:
        text = _BEARER.sub(lambda found: f"{found[1]}{found[2]}{_token(found[3], change)}", text)
    return _KNOWN_KINDS.sub(lambda found: change(found[0]), text)


def _token(text: str, change: Callable[[str], str]) -> str:
    """What comes after `Bearer`; `token limit` and `basic arithmetic` are words, and words have no digits in them."""
    return change(text) if re.search(r"[0-9]", text) and re.search(r"[A-Za-z]", text) else text


def _is_secret_part(name: str) -> bool:
    name = unquote(name)
    return name.lower() in _IN_QUERIES or is_secret_name(name)


class Secrets:
    """The secrets that a process has met. There is one, `KNOWN`: whatever writes, wherever it is, leaves them out."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._forms: tuple[str, ...] = ()
        self._encoded: tuple[bytes, ...] = ()
        self._pattern: re.Pattern[str] | None = None

    def learn(self, value: Any, name: str = "") -> None:
        """Meets the secrets of a setting, and what the environment has under the names that it refers to."""
        self.add(_secret_parts(secrets_in(value, name)))
        self.add(os.environ[variable] for variable in _references(value) if os.environ.get(variable))

    def learn_environment(self) -> None:
        """Meets the environment variables whose names say that they are secret."""
        named = (value for name, value in os.environ.items() if is_secret_name(name))
        self.add(value for value in named if len(value) >= _SHORTEST_OF_ENVIRONMENT and not value.startswith("/"))

    def add(self, values: Iterable[str]) -> None:
        added = {value.strip() for value in values} - self._values - {REDACTED}
        added = {value for value in added if len(value) >= _SHORTEST}
        if added:
            self._values = self._values | added
            forms = {form for value in self._values for form in _forms_of(value)}
            self._forms = tuple(sorted(forms, key=lambda form: (-len(form), form)))
            self._encoded = tuple(form.encode() for form in self._forms)
            self._pattern = re.compile("|".join(map(re.escape, self._forms)))

    def redact(self, text: str) -> str:
        """A text for people without the secrets: by their values, and by their forms."""
        return _in_text(self.without(text), _unless_reference)

    def without(self, text: str) -> str:
        """A text without the values that are known."""
        if self._pattern is None or not self.within(text):
            return text
        return self._pattern.sub(REDACTED, text)

    def __bool__(self) -> bool:
        """Whether any secret is known."""
        return bool(self._forms)

    def within(self, text: str) -> bool:
        return any(form in text for form in self._forms)

    def within_bytes(self, data: bytes) -> bool:
        return any(form in data for form in self._encoded)

    def cleared(self, value: Any) -> Any:
        """Plain data without the values that are known, its keys too."""
        if isinstance(value, str):
            return self.without(value)
        if isinstance(value, Mapping):
            return {self.without(key) if isinstance(key, str) else key: self.cleared(v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.cleared(item) for item in value]
        return value


def _secret_parts(secrets: Iterable[str]) -> Iterator[str]:
    """A secret, and what of it is one by itself: `Bearer x` is sent back as `x`, `user:x` of a URL too."""
    for secret in secrets:
        for form in dict.fromkeys((secret, unquote(secret))):
            bare = _REFERENCE.sub(" ", form).strip()
            yield bare
            kind, _, rest = bare.partition(" ")
            if rest and kind.isalpha():
                yield rest
            user, colon, password = bare.partition(":")
            if colon and user and password:
                yield password


def _references(value: Any) -> Iterator[str]:
    """The variables that settings name: `${NAME}`, and under `token_env`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and key.endswith("_env") and isinstance(item, str) and is_secret_name(key[:-4]):
                yield item
            yield from _references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)
    elif isinstance(value, str):
        yield from _REFERENCE.findall(value)


def _forms_of(value: str) -> set[str]:
    """The ways in which a text may write a secret."""
    data = value.encode("utf-8", "surrogatepass")
    forms = {
        value,
        quote(data),
        quote(data, safe=""),
        quote_plus(data),
        html.escape(value),
        data.hex(),
        data.hex().upper(),
    }
    forms |= {re.sub("%..", lambda code: code[0].lower(), form) for form in (quote(data), quote(data, safe=""))}
    forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    forms |= {repr(value)[1:-1], ascii(value)[1:-1], repr(data)[2:-1], data.decode("latin-1")}
    forms |= {form.replace("'", "\\'") for form in list(forms)}  # a text with both kinds of quotes in it
    forms |= {written for form in list(forms) for written in (json.dumps(form)[1:-1], repr(form)[1:-1])}
    for before in range(3):  # base64 writes three bytes at a time: what it makes of a text depends on where that begins
        encoded = base64.b64encode(b"\0" * before + data).decode().rstrip("=")
        inner = encoded[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
        forms |= {inner, inner.replace("+", "-").replace("/", "_")}
    return {form for form in forms if len(form) >= _SHORTEST}


class RedactedStream:
    """A text stream that leaves the secrets that are known out of what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(KNOWN.redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_no_secrets() -> None:
    """From now on, what Python prints in this process has no secrets that are known in it; the environment's are."""
    KNOWN.learn_environment()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, RedactedStream):
            setattr(sys, name, RedactedStream(stream))


KNOWN = Secrets()
