from __future__ import annotations

from roll.run import RunFolder
from roll.run.history import History


def test_events_are_kept_in_order(folder: RunFolder) -> None:
    history = History(folder)
    assert history.newest_saved() is None
    history.add("began", 0)
    history.add("saved", 20)
    history.add("changed", 20, key="train.lr", before=1e-6, after=None)
    found = History(folder).read()
    assert [(event["event"], event["step"]) for event in found] == [("began", 0), ("saved", 20), ("changed", 20)]
    assert found[2]["before"] == 1e-6
    assert history.newest_saved() == 20


def test_what_a_kill_left_half_written_costs_nothing_else(folder: RunFolder) -> None:
    history = History(folder)
    history.add("saved", 1)
    whole = history.path.read_bytes()
    for cut in range(1, len(whole)):
        history.path.write_bytes(whole + whole[:cut].rstrip(b"\n"))
        history.add("saved", 2)
        assert [event["step"] for event in history.read()] in ([1, 2], [1, 1, 2])
