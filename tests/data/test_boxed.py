"""The last box of a solution."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.boxed import last_boxed

INSIDE = st.recursive(
    st.text("ab1 ,.^_+-$", max_size=4) | st.sampled_from([r"\}", r"\{", r"\frac", r"\\"]),
    lambda inner: st.lists(inner, max_size=4).map("".join) | inner.map(lambda text: f"{{{text}}}"),
    max_leaves=12,
)


@given(inside=INSIDE, before=INSIDE, after=INSIDE, frame=st.sampled_from(["boxed", "fbox", "boxed "]))
def test_whatever_is_framed_is_found_whole(inside: str, before: str, after: str, frame: str) -> None:
    assert last_boxed(f"{before} \\boxed{{x}} {before} \\{frame}{{{inside}}} {after}") == inside.strip()


@given(st.text())
def test_no_text_breaks_the_search(text: str) -> None:
    assert last_boxed(text) is None or isinstance(last_boxed(text), str)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{a} and \boxed{b}", "b"),
        (r"\boxed{x = \boxed{3}}", r"x = \boxed{3}"),
        (r"\boxed 2", "2"),
        (r"$\boxed2$.", "2"),
        (r"\boxed\pi", r"\pi"),
        (r"\fbox{yes}", "yes"),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"Write \boxed{ to begin. Here \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"\boxedness{3}", None),
        ("no box {1}", None),
        ("", None),
    ],
)
def test_boxes(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


def test_long_texts_are_searched_in_bounded_time() -> None:
    for text in (r"\boxed{" * 50_000, "{" * 100_000, "\\" * 100_000, r"\boxed " * 50_000):
        last_boxed(text)
