"""What is written down comes back, and nothing else is taken for it."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.core.errors import ConfigError, TransientError
from pipeline.io.storage import Storage
from pipeline.registry import records
from pipeline.registry.records import (
    Author,
    HistoryEntry,
    Pointer,
    Production,
    append,
    check_model,
    check_prefix,
    history_key,
    one_line,
    parse_entry,
    read_history,
)

DIGEST = "ab" * 32
PLACE = Production(checkpoint="checkpoints/c0/step-1", digest=DIGEST, generation=1)


def entry(**changes: Any) -> HistoryEntry:
    fields: dict[str, Any] = {
        "action": "promoted",
        "model": "relevance",
        "checkpoint": "checkpoints/c1/step-1",
        "digest": DIGEST,
        "cycle": "c1",
        "step": 1,
        "generation": 2,
        "replaced": PLACE,
        "previous": None,
        "reasons": ("größer",),
        "figures": {"ndcg": 0.1 + 0.2},
        "verdict": "",
        "author": Author(by="a@b"),
    } | changes
    return HistoryEntry(**fields) if fields["action"] == "refused" else Pointer(**fields)


@given(
    st.sampled_from(["promoted", "forced", "rolled_back", "refused"]),
    st.lists(st.text(max_size=20), max_size=3),
    st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
)
def test_a_line_comes_back_on_one_line(action: str, reasons: list[str], figures: dict[str, float]) -> None:
    written = entry(action=action, reasons=reasons, figures=figures)
    line = written.line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    back = parse_entry(line)
    assert back == written and type(back) is type(written) and back.line() == line


def test_the_name_is_of_what_was_decided_not_of_who_told_it_when() -> None:
    assert entry().id == entry(author=Author(by="someone else")).id
    others: list[dict[str, Any]] = [
        {"reasons": ("other",)},
        {"figures": {"ndcg": 0.3}},
        {"generation": 3},
        {"replaced": None},
        {"action": "forced"},
        {"author": Author(by="a@b", cycle="c1")},
        {"author": Author(by="a@b", settings_hash="h")},
    ]
    assert len({entry().id, *(entry(**other).id for other in others)}) == len(others) + 1


def test_an_altered_line_is_refused() -> None:
    line = entry().line()
    with pytest.raises(ValidationError, match="its id does not match"):
        parse_entry(line.replace(b"c1/step-1", b"c2/step-1"))
    with pytest.raises(ValidationError):
        parse_entry(line.replace(b'"generation":2', b'"generation":2,"more":1'))


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": "../x"},
        {"checkpoint": "/etc/passwd"},
        {"checkpoint": "checkpoints/c/\x1b[2J"},
        {"digest": "AB" * 32},
        {"digest": f"{DIGEST}\n"},
        {"model": "a/b"},
        {"generation": 0},
        {"step": -1},
        {"action": "deleted"},
        {"schema_version": 2},
    ],
)
def test_what_is_no_entry(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        entry(**changes)


@given(st.text(max_size=12))
def test_a_prefix_stays_inside(text: str) -> None:
    parts = text.split("/")
    harmless = bool(text) and text.isprintable() and "\\" not in text and not {"", ".", ".."} & set(parts)
    if harmless and not any(part.startswith(".trnpipe-tmp-") for part in parts):
        assert check_prefix(text) == text
    else:
        with pytest.raises(ConfigError):
            check_prefix(text)


@given(st.text(max_size=12))
def test_a_model_is_one_part_of_a_key(text: str) -> None:
    with suppress(ConfigError):
        name = check_model(text)
        assert name == text and name.isascii() and "/" not in name and not name.startswith(".")
        assert check_prefix(name) == name


@given(st.text())
def test_what_people_type_becomes_one_line(text: str) -> None:
    assert one_line(text).isprintable() and one_line(one_line(text)) == one_line(text)


class Losing:
    """A storage whose first conditional writes lose against another writer."""

    def __init__(self, storage: Storage, losses: int) -> None:
        self._storage, self.losses = storage, losses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        self.losses -= 1
        return self.losses < 0 and self._storage.write_if_match(key, data, etag)


def test_a_writer_that_loses_tries_again_until_its_deadline(
    workspace: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = entry(), entry(generation=3)
    append(workspace, "relevance", first)
    losing: Any = Losing(workspace, 2)
    assert append(losing, "relevance", second) == (first, second) == read_history(workspace, "relevance")
    assert losing.losses == -1
    monkeypatch.setattr(records, "APPEND_DEADLINE_S", -1.0)
    before, third = workspace.read_bytes(history_key("relevance")), entry(generation=4)
    with pytest.raises(TransientError, match="which other processes keep changing"):
        append(Losing(workspace, 1), "relevance", third)
    assert workspace.read_bytes(history_key("relevance")) == before
