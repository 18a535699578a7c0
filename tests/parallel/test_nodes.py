"""Nodes wait for each other, and hear of each other's failures; on a disk and on S3."""

import itertools
import threading
from collections.abc import Callable
from typing import cast

import pytest

from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage
from pipeline.parallel import world
from pipeline.parallel.world import Nodes


@pytest.fixture(autouse=True)
def _poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "FIRST_POLL_S", 0.01)
    monkeypatch.setattr(world, "MAX_POLL_S", 0.02)


class Node(threading.Thread):
    """A node in a thread; keeps what it returned or raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.work, self.outcome = work, cast(object, None)
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.work()
        except BaseException as error:
            self.outcome = error

    def ended(self) -> object:
        self.join(120)
        assert not self.is_alive()
        return self.outcome


def nodes(storage: Storage, rank: int, num_nodes: int, job: str = "job-1", timeout_s: float = 60.0) -> Nodes:
    return Nodes(storage, f"b/{job}", rank, num_nodes, timeout_s, StopSignal())


def test_alone_nothing_is_written(storage: Storage) -> None:
    alone = nodes(storage, 0, 1)
    alone.wait("done")
    assert (alone.any("cold", True), alone.any("cold", False)) == (True, False)
    with pytest.raises(ValueError, match="mine"), alone.report_failure():
        raise ValueError("mine")
    assert list(storage.list("")) == []


@pytest.mark.parametrize(("answers", "expected"), [((False, False), False), ((False, True), True)])
def test_all_nodes_hear_the_same_answer(storage: Storage, answers: tuple[bool, ...], expected: bool) -> None:
    """Phase after phase, the answers of one not disturbing the next."""

    def node(rank: int) -> list[bool]:
        me = nodes(storage, rank, 2)
        return [me.any("look", answers[rank]), me.any("again", not answers[rank]), me.any("last", False)]

    first = Node(lambda: node(0))
    first.join(0.2)
    assert first.is_alive(), "all leave after the last has come"
    second = Node(lambda: node(1))
    assert first.ended() == second.ended() == [expected, True, False]


def test_a_failed_node_ends_the_wait_of_the_others(storage: Storage) -> None:
    """In whatever phase they are, and whatever the failed one had come to."""

    def failing() -> None:
        me = nodes(storage, 1, 3)
        with me.report_failure():
            me.any("look", True)
            raise ConfigError("graph 7 was refused", expected="another one")

    def healthy(rank: int) -> None:
        me = nodes(storage, rank, 3)
        me.any("look", True)
        me.wait("done")

    healthy_ones = [Node(lambda rank=rank: healthy(rank)) for rank in (0, 2)]  # type: ignore[misc]
    assert isinstance(Node(failing).ended(), ConfigError)
    for node in healthy_ones:
        error = node.ended()
        assert isinstance(error, TransientError)
        assert "node 1 failed" in str(error) and "graph 7 was refused" in str(error)


def test_a_failure_before_the_first_wait_is_seen_by_this_attempt_alone(storage: Storage) -> None:
    with pytest.raises(RuntimeError), nodes(storage, 0, 2).report_failure():
        raise RuntimeError("gone")
    with pytest.raises(TransientError, match="node 0 failed: RuntimeError: gone"):
        nodes(storage, 1, 2).wait("done")
    with pytest.raises(TransientError, match="node 0 of 2 not ready"):
        nodes(storage, 1, 2, job="job-2", timeout_s=0.05).wait("done")


def test_a_node_that_does_not_come_is_named(storage: Storage) -> None:
    clock = itertools.count(0.0, 10.0)
    storage.write_bytes("b/job-1/done/node-2.no", b"")
    me = Nodes(storage, "b/job-1", 0, 4, 25.0, StopSignal(), clock=lambda: next(clock))
    with pytest.raises(TransientError, match=r"node 1, 3 of 4 not ready after 25s"):
        me.wait("done")
    with pytest.raises(TransientError, match=r"not ready after 15s"):
        me.any("cold", True, timeout_s=15.0)


def test_who_is_stopped_tells_the_others(storage: Storage) -> None:
    me = nodes(storage, 0, 3)

    def waiting() -> None:
        with me.report_failure():
            me.wait("done")

    stopped = Node(waiting)
    other = Node(lambda: nodes(storage, 1, 3).wait("done"))
    me.stop.set("SIGTERM")
    assert isinstance(stopped.ended(), Preempted)
    error = other.ended()
    assert isinstance(error, TransientError) and "node 0 failed" in str(error) and "SIGTERM" in str(error)


def test_the_error_of_the_block_wins_over_one_of_telling_it() -> None:
    class Broken:
        def write_bytes(self, key: str, data: bytes) -> None:
            raise TransientError("storage is gone")

    me = Nodes(Broken(), "b", 0, 2, 1.0, StopSignal())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mine") as caught, me.report_failure():
        raise ValueError("mine")
    assert any("storage is gone" in note for note in caught.value.__notes__)
