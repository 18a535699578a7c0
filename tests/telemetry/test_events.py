"""The event log on a file system and on S3, and after kills."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from pipeline.io.storage import DiskFull, Storage, open_storage
from pipeline.telemetry.events import SEGMENT_BYTES, EventLog, EventName, read_events
from tests.kit.counted import counted
from tests.kit.killing import FORK, killed_at

KEY = "cycles/c1/events.jsonl"


@pytest.fixture
def s3_storage(s3_uri: str) -> Storage:
    return open_storage(s3_uri)


def names_in(storage: Storage) -> list[str]:
    return [event["event"] for event in read_events(storage, KEY)]


def test_lines_are_json_with_utc_time(storage: Storage, tmp_path: Path) -> None:
    log = EventLog(storage, KEY, clock=lambda: 1_767_225_600.25)
    log.emit(EventName.STAGE_STARTED, stage="train", loss=float("nan"), folder=Path("x"), parts=[1, float("inf")])
    log.close()
    log.close()
    (event,) = read_events(storage, KEY)
    assert event == {
        "time": "2026-01-01T00:00:00.250+00:00",
        "event": "stage_started",
        "stage": "train",
        "loss": "nan",
        "folder": "x",
        "parts": [1, "inf"],
    }
    assert list(event)[:2] == ["time", "event"]


def test_threads_do_not_mix_lines(storage: Storage, tmp_path: Path) -> None:
    log = EventLog(storage, KEY)

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


def test_s3_is_put_rarely_unless_durable(s3_storage: Storage, tmp_path: Path) -> None:
    storage = s3_storage
    now = [0.0]
    with counted(storage) as counts:
        log = EventLog(storage, KEY, clock=lambda: now[0])
        log.emit(EventName.TRAIN_STEPS)
        log.flush()
        assert counts["put"] == 0
        now[0] = 31.0
        log.flush()
        assert counts["put"] == 1
        log.flush(durable=True)
        assert counts["put"] == 1, "nothing new"
        log.emit(EventName.TRAIN_STEPS)
        log.flush(durable=True)
        log.close()
    assert counts == {"put": 2}, "a writer reads nothing back"


def bytes_put(storage: Storage, num_events: int) -> int:
    """Of a log of events of 8 KiB, each flushed."""
    put: list[int] = []
    write = storage.write_bytes
    with pytest.MonkeyPatch.context() as patch:

        def counted(key: str, data: bytes) -> None:
            put.append(len(data))
            write(key, data)

        patch.setattr(storage, "write_bytes", counted)
        log = EventLog(storage, f"cycles/{num_events}/events.jsonl")
        for number in range(num_events):
            log.emit(EventName.TRAIN_STEPS, step=number, text="x" * 8192)
            log.flush(durable=True)
        log.close()
    found = read_events(storage, f"cycles/{num_events}/events.jsonl")
    assert [event["step"] for event in found] == list(range(num_events))
    assert max(put) <= SEGMENT_BYTES + 9000
    return sum(put)


def test_what_is_put_grows_with_the_events_and_not_with_their_square(s3_storage: Storage, tmp_path: Path) -> None:
    short, long = (bytes_put(s3_storage, number) for number in (30, 90))
    assert 0 < long <= 3.3 * short
    segments = list(s3_storage.list("cycles/90/events"))
    assert len(segments) <= 90 * 8300 / SEGMENT_BYTES + 1
    with counted(s3_storage) as counts:
        read_events(s3_storage, "cycles/90/events.jsonl")
    assert (counts["list"], counts["get"]) == (1, len(segments))


def killed_writer(storage: Storage, before_the_kill: Callable[[EventLog], object]) -> None:
    """Emits a and puts it, emits b, and is killed."""

    def work() -> None:
        log = EventLog(open_storage(storage.root), KEY)
        log.emit(EventName.STAGE_STARTED, stage="a")
        log.flush(durable=True)
        log.emit(EventName.STAGE_STARTED, stage="b")
        before_the_kill(log)
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def stages_in(storage: Storage) -> list[str]:
    return [event["stage"] for event in read_events(storage, KEY)]


@pytest.mark.fault
def test_kill_9_loses_nothing_that_was_flushed(storage: Storage) -> None:
    killed_writer(storage, lambda log: None)
    killed_writer(storage, lambda log: log.flush(durable=True))
    unflushed = ["b"] if storage.local_path(KEY) else []  # a file has every line at once
    assert stages_in(storage) == ["a", *unflushed, "a", "b"]


@pytest.mark.fault
def test_a_half_line_spoils_no_other(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "root"))

    def half_a_line(log: EventLog) -> None:
        with (tmp_path / "root" / KEY).open("ab") as file:
            file.write(b'{"time": "' + b"x" * 70_000)

    killed_writer(storage, half_a_line)
    again = EventLog(storage, KEY)
    again.emit(EventName.STAGE_STARTED, stage="c")
    again.close()
    assert stages_in(storage) == ["a", "b", "c"]


@pytest.mark.fault
def test_killed_at_any_change_of_a_file_no_line_that_was_put_is_lost_or_doubled(tmp_path: Path) -> None:
    """Also while one object follows another. A folder stands for S3, so that a put is killed half way too."""
    storage, put = open_storage(str(tmp_path / "root")), tmp_path / "put"

    def work(key: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "local_path", lambda _: None)
            log, done = EventLog(storage, key), os.open(put, os.O_WRONLY)
        for number in range(3):
            log.emit(EventName.TRAIN_STEPS, step=number, text="x" * SEGMENT_BYTES)
            log.flush(durable=True)
            os.write(done, b"x")
        log.close()

    seen = set[int]()
    for number in count(1):
        key = f"cycles/{number}/events.jsonl"
        put.write_bytes(b"")
        code = killed_at(number, partial(work, key))
        at_least = len(put.read_bytes())
        steps = [event["step"] for event in read_events(storage, key)]
        assert steps in (list(range(at_least)), list(range(at_least + 1))), number
        seen.add(len(steps))
        if code != -signal.SIGKILL:
            break
    assert (code, seen) == (0, {0, 1, 2, 3})


@pytest.mark.fault
def test_writers_at_once_never_share_an_object(storage: Storage) -> None:
    """As the stages of one machine: each goes on while another one starts, flushes and is killed."""
    first = EventLog(storage, KEY, writer="prepare-1")
    first.emit(EventName.STAGE_STARTED, stage="first")
    killed_writer(storage, lambda log: None)

    def work(name: str) -> None:
        log = EventLog(open_storage(storage.root), KEY, writer=name)
        for number in range(10):
            log.emit(EventName.TRAIN_STEPS, stage=name, step=number)
            log.flush(durable=True)
        log.close()

    processes = [FORK.Process(target=work, args=(f"health-{number}",)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    first.emit(EventName.STAGE_FINISHED, stage="first")
    first.close()
    found = read_events(storage, KEY)
    for name in ("health-0", "health-1"):
        assert [event["step"] for event in found if event["stage"] == name] == list(range(10))
    assert [event["event"] for event in found if event["stage"] == "first"] == ["stage_started", "stage_finished"]


def test_a_log_that_an_earlier_version_wrote_as_one_object_is_read_with_the_rest(
    s3_storage: Storage, tmp_path: Path
) -> None:
    lines = [f'{{"time": "2026-01-01T00:00:0{second}.000+00:00", "event": "stage_started"}}' for second in (1, 3)]
    s3_storage.write_bytes(KEY, "\n".join([*lines, "[1]", lines[0][:30]]).encode())
    log = EventLog(s3_storage, KEY, clock=lambda: 1_767_225_602.0)
    log.emit(EventName.STAGE_FINISHED)
    log.close()
    assert names_in(s3_storage) == ["stage_started", "stage_finished", "stage_started"]
    assert lines[0].encode() in s3_storage.read_bytes(KEY), "it stays as it is"


def test_the_newest_events_alone(storage: Storage, tmp_path: Path) -> None:
    log = EventLog(storage, KEY)
    for number in range(20):
        log.emit(EventName.TRAIN_STEPS, step=number, text="x" * 20_000)
        log.flush(durable=True)
    log.close()
    found = read_events(storage, KEY, last_bytes=90_000)
    assert [event["step"] for event in found] == list(range(20 - len(found), 20))
    assert 4 <= len(found) <= 12


def test_a_full_disk_keeps_the_cut_lines_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path / "root"))
    log = EventLog(storage, KEY)
    log.emit(EventName.STAGE_STARTED)
    true_write, room = os.write, [0]
    monkeypatch.setattr(os, "write", lambda descriptor, data: true_write(descriptor, data[: room[0]]))
    for event in (EventName.STAGE_SKIPPED, EventName.STAGE_STOPPED, EventName.STAGE_FINISHED):
        log.emit(event)
    assert names_in(storage) == ["stage_started"]
    room[0] = 110  # more than one line, fewer than two
    with pytest.raises(DiskFull):
        log.flush(durable=True)
    assert names_in(storage) == ["stage_started", "stage_skipped"]
    monkeypatch.undo()
    log.emit(EventName.STAGE_FAILED)
    log.close()
    assert names_in(storage) == ["stage_started", "stage_skipped", "stage_stopped", "stage_finished", "stage_failed"]
