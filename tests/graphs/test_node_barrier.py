"""Nodes wait for each other, and hear of each other's failures; on a disk and on S3."""

import itertools
import threading
from collections.abc import Callable

import pytest

from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.graphs import node_barrier
from pipeline.graphs.node_barrier import all_nodes, report_failure, wait_for_nodes
from pipeline.io.storage import Storage


@pytest.fixture(autouse=True)
def _poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_barrier, "FIRST_POLL_S", 0.01)
    monkeypatch.setattr(node_barrier, "MAX_POLL_S", 0.02)


class Node(threading.Thread):
    """A node in a thread; keeps what it ended with."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException | None:
        self.join(30)
        assert not self.is_alive()
        return self.error


def test_alone_nothing_is_written(storage: Storage) -> None:
    wait_for_nodes(storage, "barrier", 0, 1, "job-1", 1.0, StopSignal())
    with all_nodes(storage, "barrier", 0, 1, "job-1", 1.0, StopSignal()):
        pass
    assert list(storage.list("")) == []


def test_all_leave_after_the_last_has_come(storage: Storage) -> None:
    order: list[str] = []
    last_may_come = threading.Event()

    def node(rank: int) -> None:
        if rank == 2:
            assert last_may_come.wait(30)
            order.append("last came")
        wait_for_nodes(storage, "b", rank, 3, "job-1", 60.0, StopSignal())
        order.append(f"{rank} left")

    nodes = [Node(lambda rank=rank: node(rank)) for rank in range(3)]  # type: ignore[misc]
    nodes[0].join(0.2)
    assert order == []
    last_may_come.set()
    assert [node.ended() for node in nodes] == [None] * 3
    assert order[0] == "last came"
    assert sorted(order[1:]) == ["0 left", "1 left", "2 left"]


def test_a_failed_node_ends_the_wait_of_the_others(storage: Storage) -> None:
    def failing() -> None:
        with all_nodes(storage, "b", 1, 3, "job-1", 60.0, StopSignal()):
            raise ConfigError("graph 7 was refused", expected="another one")

    healthy = [
        Node(lambda rank=rank: wait_for_nodes(storage, "b", rank, 3, "job-1", 60.0, StopSignal()))  # type: ignore[misc]
        for rank in (0, 2)
    ]
    assert isinstance(Node(failing).ended(), ConfigError)
    for node in healthy:
        error = node.ended()
        assert isinstance(error, TransientError)
        assert "node 1 failed" in str(error) and "graph 7 was refused" in str(error)


def test_a_failure_before_the_wait_is_seen_too(storage: Storage) -> None:
    report_failure(storage, "b", 0, "job-1", RuntimeError("gone"))
    with pytest.raises(TransientError, match="node 0 failed: RuntimeError: gone"):
        wait_for_nodes(storage, "b", 1, 2, "job-1", 60.0, StopSignal())


def test_markers_of_another_attempt_do_not_count(storage: Storage) -> None:
    report_failure(storage, "b", 0, "job-1", RuntimeError("gone"))
    storage.write_bytes("b/job-2/node-0.ok", b"")
    with pytest.raises(TransientError, match="node 0 of 2 not ready"):
        wait_for_nodes(storage, "b", 1, 2, "job-3", 0.05, StopSignal())
    wait_for_nodes(storage, "b", 1, 2, "job-2", 60.0, StopSignal())


def test_a_node_that_does_not_come_is_named(storage: Storage) -> None:
    clock = itertools.count(0.0, 10.0)
    storage.write_bytes("b/job-1/node-2.ok", b"")
    with pytest.raises(TransientError, match=r"node 1, 3 of 4 not ready after 25s"):
        wait_for_nodes(storage, "b", 0, 4, "job-1", 25.0, StopSignal(), clock=lambda: next(clock))


def test_who_is_stopped_tells_the_others(storage: Storage) -> None:
    stop = StopSignal()
    stopped = Node(lambda: wait_for_nodes(storage, "b", 0, 3, "job-1", 60.0, stop))
    other = Node(lambda: wait_for_nodes(storage, "b", 1, 3, "job-1", 60.0, StopSignal()))
    stop.set("SIGTERM")
    assert isinstance(stopped.ended(), Preempted)
    error = other.ended()
    assert isinstance(error, TransientError) and "node 0 failed" in str(error) and "SIGTERM" in str(error)


def test_the_error_of_the_block_wins_over_one_of_telling_it() -> None:
    class Broken:
        def write_bytes(self, key: str, data: bytes) -> None:
            raise TransientError("storage is gone")

    with (
        pytest.raises(ValueError, match="mine") as caught,
        all_nodes(Broken(), "b", 0, 2, "job-1", 1.0, StopSignal()),  # type: ignore[arg-type]
    ):
        raise ValueError("mine")
    assert any("storage is gone" in note for note in caught.value.__notes__)
