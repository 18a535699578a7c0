"""Optuna's journal as this search uses it: the same proposals after any kill, whatever is left of the file."""

from pathlib import Path

import pytest

from pipeline.tune.config import Hyperband, Value, parse_range
from pipeline.tune.journal import Journal, TrialRecord

RANGES = {
    "a": parse_range("log 1e-5 1e-1"),
    "b": parse_range("one of x y z"),
    "c": parse_range("int 2 8"),
}
BAND = Hyperband(2, 8, 2)


def open_journal(folder: Path, seed: int = 1) -> Journal:
    return Journal(folder / "journal.log", "s", RANGES, {"a": 0.01, "b": "y"}, BAND, seed)


def reached(values: dict[str, Value], step: int) -> float:
    a, c = values["a"], values["c"]
    assert isinstance(a, float) and isinstance(c, int)
    return round(step * (1 - a) + c / 10 + (0.3 if values["b"] == "y" else 0.0), 6)


def go_on(folder: Path, trials: int, seed: int = 1) -> list[TrialRecord]:
    """A search whose trials take no time: continue what runs, then begin new ones."""
    journal = open_journal(folder, seed)
    while True:
        records = journal.records()
        running = [record.number for record in records if record.state == "running"]
        if not running and len(records) >= trials:
            return records
        opened = journal.resume(running[0]) if running else journal.begin()
        values = dict(opened.record.values)
        for step in BAND.rungs:
            opened.report(step, reached(values, step))
            if step == BAND.max_steps:
                opened.complete(reached(values, step))
            elif opened.is_pruned():
                opened.prune()
                break


@pytest.mark.unit
def test_a_search_is_a_function_of_its_seed(tmp_path: Path) -> None:
    tables = []
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        tables.append(go_on(tmp_path / name, 16, seed))
    one, again, other = tables
    assert one == again and [record.values for record in one[1:]] != [record.values for record in other[1:]]
    assert {record.state for record in one} == {"complete", "pruned"}
    assert (one[0].values["a"], one[0].values["b"]) == (0.01, "y"), "the first has the settings as they are"
    assert len({record.values["a"] for record in one}) == 16
    late = [reached(dict(record.values), 8) for record in one[12:]]
    assert sum(late) / 4 > sum(reached(dict(record.values), 8) for record in one[:10]) / 10, "it learns"


@pytest.mark.fault
def test_whatever_a_kill_left_of_the_journal_the_search_ends_the_same(tmp_path: Path) -> None:
    """Cut at ends of lines (a kill between two appends) and within them (a kill or a full disk in one)."""
    (tmp_path / "whole").mkdir()
    whole = go_on(tmp_path / "whole", 13)
    data = (tmp_path / "whole" / "journal.log").read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    assert len(ends) > 80
    # The last two trials, proposed by TPE from what went before, at every append.
    for cut in sorted({*ends[3:-17:6], *ends[-17:], *(end - 9 for end in ends[1::8])}):
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        (folder / "journal.log").write_bytes(data[:cut])
        assert go_on(folder, 13) == whole, f"cut at byte {cut}"


@pytest.mark.unit
def test_asked_again_the_verdict_on_a_trial_is_the_same(tmp_path: Path) -> None:
    """A kill between the verdict and its record: Optuna's own pruner would let the trial through."""
    asked = 0
    for number in range(12):
        journal = open_journal(tmp_path)
        opened = journal.begin()
        for step in BAND.rungs[:-1]:
            opened.report(step, float(-number))
            verdict = opened.is_pruned()
            again = open_journal(tmp_path).resume(number)
            again.report(step, float(-number))
            assert [again.is_pruned(), again.is_pruned()] == [verdict, verdict]
            if verdict:
                asked += 1
                again.prune()
                break
        else:
            opened.complete(float(-number))
    assert asked > 5
