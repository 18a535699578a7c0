"""The event log on a file system and on S3, and after kills."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import TransientError
from pipeline.core.events import EventName
from pipeline.io.errors import DiskFull
from pipeline.io.storage import Storage, open_storage
from pipeline.telemetry.events import EventLog
from tests.s3 import MotoServer, lead_to

KEY = "cycles/c1/events.jsonl"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with MotoServer("events") as server:
        yield server.url


@pytest.fixture
def s3_storage(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    lead_to(endpoint, monkeypatch)
    return open_storage(f"s3://events/{tmp_path.name}")


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "file":
        return open_storage(str(tmp_path / "root"))
    storage: Storage = request.getfixturevalue("s3_storage")
    return storage


def names_in(storage: Storage) -> list[str]:
    return [json.loads(line)["event"] for line in storage.read_bytes(KEY).splitlines()]


def test_lines_are_json_with_utc_time(storage: Storage, tmp_path: Path) -> None:
    log = EventLog(storage, KEY, scratch=tmp_path / "scratch", clock=lambda: 1_767_225_600.25)
    log.emit(EventName.STAGE_STARTED, stage="train", loss=float("nan"), folder=Path("x"), parts=[1, float("inf")])
    log.close()
    log.close()
    (line,) = storage.read_bytes(KEY).splitlines()
    assert json.loads(line) == {
        "time": "2026-01-01T00:00:00.250+00:00",
        "event": "stage_started",
        "stage": "train",
        "loss": "nan",
        "folder": "x",
        "parts": [1, "inf"],
    }
    assert list(json.loads(line))[:2] == ["time", "event"]


def test_a_reserved_field_is_refused(storage: Storage, tmp_path: Path) -> None:
    log = EventLog(storage, KEY, scratch=tmp_path)
    with pytest.raises(ValueError, match="reserved"):
        log.emit(EventName.STAGE_STARTED, time=1)
    log.close()


def test_a_second_process_appends(storage: Storage, tmp_path: Path) -> None:
    for event in (EventName.STAGE_STARTED, EventName.STAGE_FINISHED):
        log = EventLog(storage, KEY, scratch=tmp_path / f"scratch-{event}")
        log.emit(event)
        log.close()
    assert names_in(storage) == ["stage_started", "stage_finished"]


def test_two_writers_lose_nothing(storage: Storage, tmp_path: Path) -> None:
    logs = [EventLog(storage, KEY, scratch=tmp_path / f"scratch{number}") for number in range(2)]
    for _ in range(3):
        for log in logs:
            log.emit(EventName.TRAIN_STEPS)
            log.flush(durable=True)
    for log in logs:
        log.close()
    assert len(names_in(storage)) == 6


def test_threads_do_not_mix_lines(storage: Storage, tmp_path: Path) -> None:
    log = EventLog(storage, KEY, scratch=tmp_path)

    def emit() -> None:
        for _ in range(20):
            log.emit(EventName.TRAIN_STEPS, text="x" * 5000)

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert names_in(storage) == ["train_steps"] * 80


def test_a_half_line_is_cut_off(storage: Storage, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    log = EventLog(storage, KEY, scratch=scratch)
    log.emit(EventName.STAGE_STARTED)
    # As kill -9 leaves it: no flush, no close, and half of the next line.
    path = storage.local_path(KEY) or next(scratch.iterdir())
    with path.open("ab") as file:
        file.write(b'{"time": "' + b"x" * 70_000)
    again = EventLog(storage, KEY, scratch=scratch)
    again.emit(EventName.STAGE_FINISHED)
    again.close()
    assert names_in(storage) == ["stage_started", "stage_finished"]


def test_s3_is_put_rarely_unless_durable(s3_storage: Storage, tmp_path: Path) -> None:
    storage = s3_storage
    now = [0.0]
    log = EventLog(storage, KEY, scratch=tmp_path, clock=lambda: now[0])
    log.emit(EventName.TRAIN_STEPS)
    log.flush()
    assert storage.requests.put == 0
    now[0] = 31.0
    log.flush()
    assert storage.requests.put == 1
    log.flush(durable=True)
    assert storage.requests.put == 1, "nothing new"
    log.emit(EventName.TRAIN_STEPS)
    log.flush(durable=True)
    assert storage.requests.put == 2
    # Killed after the put, before the journal was emptied: the line is not sent again.
    (journal,) = tmp_path.glob("events-*.jsonl")
    journal.write_bytes(storage.read_bytes(KEY).splitlines(keepends=True)[-1])
    again = EventLog(storage, KEY, scratch=tmp_path)
    again.close()
    assert len(names_in(storage)) == 2
    assert journal.read_bytes() == b""


def test_endless_conflicts_are_transient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path / "root"))
    monkeypatch.setattr(storage, "local_path", lambda _: None)
    monkeypatch.setattr(storage, "write_if_absent", lambda *_: False)
    monkeypatch.setattr(storage.stop, "wait", lambda _: False)
    monkeypatch.setattr(storage, "stat", lambda _: None)
    log = EventLog(storage, KEY, scratch=tmp_path)
    log.emit(EventName.TRAIN_STEPS)
    with pytest.raises(TransientError, match="conditional writes"):
        log.flush(durable=True)


def test_a_full_disk_takes_the_half_line_back_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path / "root"))
    log = EventLog(storage, KEY, scratch=tmp_path)
    log.emit(EventName.STAGE_STARTED)
    true_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: true_write(descriptor, data[: len(data) // 2]))
    log.emit(EventName.STAGE_FINISHED)
    with pytest.raises(DiskFull):
        log.flush(durable=True)
    assert names_in(storage) == ["stage_started"]
    monkeypatch.undo()
    log.emit(EventName.STAGE_FAILED)
    log.close()
    assert names_in(storage) == ["stage_started", "stage_finished", "stage_failed"]
