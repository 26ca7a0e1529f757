"""Secrets are known by their names, their forms and their values, and come back from the environment."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.config import Config, RunError, UserError, changed_keys, dump_config, load_config
from roll.config.load import redacted_config_yaml
from roll.config.secrets import REDACTED, Secrets, is_secret_name, redacted, resolved, secrets_in

VALUE = "Zq7-a/tok+en9"
PASSWORD = "pW0rd-of-mine"


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "proxy-authorization",
        "api_key",
        "apiKey",
        "X-API-Key",
        "token",
        "hf_token",
        "HF_TOKEN",
        "access_token",
        "accessToken",
        "password",
        "DB_PASSWORD",
        "passwd",
        "secret",
        "client_secret",
        "AWS_SECRET_ACCESS_KEY",
        "Cookie",
        "Set-Cookie",
        "credentials",
        "private_key",
        "X-Auth",
        "auth",
        "bearer",
        "OPENAI_API_KEY",
        "WANDB_API_KEY",
        "passphrase",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "token_env",
        "tokens",
        "tokenizer",
        "eos_token",
        "key",
        "answer_key",
        "secret_word",
        "author",
        "question",
        "max_new_tokens",
        "kv_cache_tokens",
        "password_file",
        "token_type",
        "id",
        "monkey",
        "keyboard",
        "Content-Type",
        "prompt",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"Authorization": f"Bearer {VALUE}"}},
        {"headers": {"X-Functions-Key": VALUE}},
        {"cookies": {"session": VALUE}},
        {"api_key": VALUE},
        {"deep": [{"er": {"password": VALUE}}]},
        {"auth": ["someone", VALUE]},
        {"url": f"https://someone:{VALUE.replace('/', '%2F')}@host/x"},
        {"url": f"https://someone:p@{PASSWORD}@host/x"},
        {"url": f"postgresql://{PASSWORD}@host/x"},
        {"url": f"https://host/x?n=1&api_key={PASSWORD}"},
        {"url": f"https://host/x?key={PASSWORD}#top"},
        {"text": f"ask https://a:{PASSWORD}@host/ nicely"},
        {"headers": f"Content-Type: json\nX-Api-Key: {VALUE}"},
        {"headers": ["Content-Type: json", f"Authorization: {PASSWORD}"]},
        {"args": ["-H", f"X-Thing: Bearer {VALUE}"]},
        {"pin": "sk-abcdefghijklmnop1234"},
        {"password": 12345678},
    ],
)
def test_configurations_are_saved_and_shown_without_secrets(options: dict[str, Any]) -> None:
    config = load_config({"reward": {"name": "x:y", "options": options}})
    for text in (dump_config(config), repr(config), str(config), repr(config.reward)):
        for part in (
            VALUE,
            PASSWORD,
            VALUE.replace("/", "%2F"),
            "sk-abc",
            "12345678",
            base64.b64encode(VALUE.encode()).decode(),
        ):
            assert part not in text
        assert REDACTED in text
    assert config.reward.options == options


def test_other_settings_are_saved_as_they_are() -> None:
    options = {
        "url": "https://host/x?n=1",
        "headers": {"Content-Type": "json"},
        "max_tokens": 5,
        "prompt": "basic token limits",
    }
    options |= {"header": "Note: 10 columns", "more": {"headers": ["question: long", "answer"]}}
    options |= {"token_env": "MY_TOKEN", "stop_token": "<eos>", "api_key": "", "text": "the token a1 of", "when": "a@b.c"}
    assert redacted(options) == options


def test_references_stay_and_are_read_when_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {
        "url": "https://me:${IN_TEST_PW}@host",
        "headers": {"Authorization": "Bearer ${IN_TEST_TOKEN}", "X-Team": "${IN_TEST_TEAM}"},
        "prompt": "write ${HOME}",
    }
    config = load_config({"reward": {"name": "x:y", "options": options}})
    (tmp_path / "x.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "x.yaml").reward.options == options
    with pytest.raises(
        UserError, match=r"reward.options.url refers to the environment variable IN_TEST_PW, which is not"
    ):
        resolved(options, "reward.options")
    for name in ("PW", "TOKEN", "TEAM"):
        monkeypatch.setenv(f"IN_TEST_{name}", f"value-{name}")
    found = resolved(options, "reward.options")
    assert found["url"] == "https://me:value-PW@host"
    assert found["headers"] == {"Authorization": "Bearer value-TOKEN", "X-Team": "value-TEAM"}
    assert found["prompt"] == "write ${HOME}"


def test_what_was_left_out_is_asked_for_by_name() -> None:
    saved = {"headers": {"Authorization": REDACTED}, "url": f"https://{REDACTED}@host"}
    with pytest.raises(UserError, match=r"reward.options.headers.Authorization is <redacted-secret>.*\$\{NAME\}"):
        resolved(saved, "reward.options")
    with pytest.raises(UserError, match=r"tasks.options.url is https://<redacted-secret>@host"):
        resolved({"url": saved["url"]}, "tasks.options")


def test_another_secret_is_no_change_of_a_setting() -> None:
    def of(token: str, url: str = "http://a:b@h/") -> Config:
        parts = {"a": {"name": "http", "options": {"url": url, "headers": {"Authorization": token, "X-Team": "x"}}}}
        return load_config({"reward": {"parts": parts}})

    assert changed_keys(of("Bearer one111"), of("Bearer two222")) == []
    assert changed_keys(of("Bearer one111"), of("${NAME}")) == []
    assert changed_keys(of("Bearer one111"), of(REDACTED, "http://c:d@h/")) == []
    assert changed_keys(of("x"), of("x", "http://a:b@other/")) == ["reward.parts"]


def test_saved_configurations_of_older_versions_lose_their_secrets() -> None:
    old = f"reward:\n  name: http\n  options:\n    headers: {{Authorization: Bearer {VALUE}}}\nseed: 3\n"
    new = redacted_config_yaml(old)
    assert VALUE not in new
    assert "seed: 3" in new
    assert redacted_config_yaml(new) == new


def test_messages_have_no_secrets() -> None:
    wrong = [f"reward.options.headers.Authorization=Bearer {VALUE}", "train.lr=x"]
    assert VALUE not in _complaint({}, wrong)
    assert VALUE not in _complaint({}, [f"reward.api_key={VALUE}"])
    assert "abc" not in _complaint({}, ["reward.api_key=abc"])
    assert VALUE not in _complaint({"reward": {"options": [{"password": VALUE}]}}, [])
    assert PASSWORD not in _complaint({"reward": {"workers": f"http://a:{PASSWORD}@h"}}, [])
    load_config({"reward": {"name": "x:y", "options": {"token": VALUE}}})
    assert VALUE not in str(UserError(f"the server said {VALUE}"))
    assert VALUE not in str(RunError(f"the server said {VALUE}"))


def _complaint(source: Any, overrides: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def test_a_config_that_arrives_in_another_process_makes_its_secrets_known(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"reward": {"name": "x:y", "options": {"token": VALUE}}})
    elsewhere = Secrets()
    monkeypatch.setattr("roll.config.section.KNOWN", elsewhere)
    assert elsewhere.without(VALUE) == VALUE
    assert pickle.loads(pickle.dumps(config)) == config
    assert elsewhere.without(VALUE) == REDACTED


def test_variables_of_the_environment_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "value-of-some-key")
    monkeypatch.setenv("NAMED", "value-of-named")
    known = Secrets()
    known.learn_environment()
    assert known.without("a value-of-some-key b") == f"a {REDACTED} b"
    known.learn({"token_env": "NAMED"})
    assert known.without("value-of-named") == REDACTED


@given(
    secret=st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=6, max_size=20),
    around=st.text(max_size=5),
)
@settings(max_examples=examples(60), deadline=None)
@example(secret="a\"b\\c'd", around="x")
def test_a_value_is_found_in_every_form(secret: str, around: str) -> None:
    known = Secrets()
    known.learn({"password": secret})
    data = secret.encode()
    forms = [secret, quote(secret), quote(secret, safe=""), json.dumps(secret), json.dumps(secret, ensure_ascii=False)]
    forms += [json.dumps(json.dumps(secret)), repr(secret), data.hex(), f"Bearer {secret}"]
    for form in forms:
        said = known.without(f"{around}{form}{around}")
        assert secret not in said or secret in REDACTED or secret in around
        assert REDACTED in said
    for before in (b"", b"x", b"ab", b"user:"):
        assert REDACTED in known.without(base64.b64encode(before + data + b"rest").decode())


@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(max_size=10),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["token", "a", "headers", "url"]), inner)
        ),
        max_leaves=8,
    )
)
@settings(max_examples=examples(60), deadline=None)
def test_redacting_twice_is_redacting_once(value: Any) -> None:
    once = redacted(value)
    assert redacted(once) == once
    assert secrets_in(once) == []


@pytest.mark.parametrize(
    "written",
    [
        repr("a pä7-of'mine".encode()),
        ascii("pä7-of'mine"),
        repr(repr("pä7-of'mine")),
        "p%c3%a47-of%27mine",
        "pä7-of'mine".encode().decode("latin-1"),
    ],
    ids=["bytes", "ascii", "quoted twice", "lower-case percents", "a header read as Latin-1"],
)
def test_a_value_is_found_as_messages_write_it(written: str) -> None:
    known = Secrets()
    known.add(["pä7-of'mine"])
    assert REDACTED in known.without(f"refused: {written}")


@pytest.mark.parametrize("word", ["a-", "a.", "eyJ-", "eyJaaaaaaaa.", "sk-", "token "])
def test_a_long_text_is_redacted_in_linear_time(word: str) -> None:
    """A model may write such a text; where time is quadratic, this takes hours."""
    assert Secrets().redact(word * (600_000 // len(word)) + "://")
