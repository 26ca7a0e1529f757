from __future__ import annotations

import pytest

from roll.config.suggest import did_you_mean, either, near


def test_the_likeliest_come_first_and_spelling_does_not_matter() -> None:
    assert near("Group-Siez", ["seed", "group_size", "groups"])[0] == "group_size"
    assert near("lr", ["learning_rate", "beta"]) == []
    assert len(near("aaaa", [f"aaaa{letter}" for letter in "bcdef"])) == 3


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ([], ""),
        (["zebra"], ""),
        (["score"], "; did you mean 'score'?"),
        (["score", "scored"], "; did you mean 'score' or 'scored'?"),
    ],
)
def test_what_is_near_is_asked_for(known: list[str], says: str) -> None:
    assert did_you_mean("scroe", known) == says


def test_lists_in_words() -> None:
    assert [either(list("abc"[:count])) for count in (1, 2, 3)] == ["a", "a or b", "a, b or c"]
