"""What the main node concludes from what it hears, and what it hears over a socket."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.node.environment import NodeIdentity, Timing
from jobs.node.group import MAX_LINE_BYTES, Connection, NodeGone, NodeGroup, NodeMessage

RETRY = 75


class Group(NodeGroup):
    """The main node, with a clock of its own; other nodes are `here` without a connection. It listens nowhere."""

    def __init__(self, num_nodes: int = 3, here: tuple[int, ...] | None = None) -> None:
        place = NodeIdentity("", "", "train", "job-1", 1, 0, num_nodes, "127.0.0.1", port=0)
        self.now = 0.0
        super().__init__(place, Timing(lost_after_s=30.0), lambda line: None, lambda: self.now)
        self.close(0.0)
        self._listener = None
        self._connect_at = float("inf")
        for node in range(1, num_nodes) if here is None else here:
            self._nodes[node].heard = 0.0

    def at(self, now: float) -> str:
        self.now = now
        self.poll()
        return self.failure

    def code(self) -> int:
        return self.exit_code(0, stopped=False)


def test_all_well() -> None:
    one = Group()
    assert (one.ready, one.at(1.0), one.ready) == (False, "", True)
    for node in (1, 0, 2):
        assert not one.settled
        one.report(0, node)
    assert one.at(1000.0) == ""  # a node that has reported may fall silent
    assert (one.settled, one.code()) == (True, 0)


@pytest.mark.parametrize("code", [65, 70, 74, 78, 80])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_code_that_must_not_be_retried_goes_before_all(node: int, code: int) -> None:
    one = Group()
    one.mark_lost(1 if node == 2 else 2, "gone")
    for other in range(3):
        one.report(code if other == node else RETRY, other)
    assert one.code() == code


def test_a_bug_counts_when_it_came_first_and_after_trouble_latecomers_are_not_waited_for() -> None:
    first, after, late = Group(2), Group(2), Group(3, (1,))
    first.report(1, 1)
    first.report(RETRY, 0)
    assert (first.failure, first.code()) == ("node 1 exited with 1", 1)
    after.mark_lost(1, "gone")
    after.report(1, 0)  # it fails because its peer has vanished
    assert after.code() == RETRY
    late.report(78, 1)
    late.report(RETRY, 0)
    assert (late.settled, late.code()) == (True, 78)


@pytest.mark.parametrize(
    ("codes", "expected"), [((143, 143), 143), ((0, 143), 143), ((143, 75), RETRY), ((143,), RETRY)]
)
def test_a_node_that_is_preempted_makes_it_a_preemption(codes: tuple[int, ...], expected: int) -> None:
    one = Group(2)
    for node, code in enumerate(codes):
        one.report(code, node)
    if len(codes) == 1:
        one.mark_lost(1, "gone")
    assert one.code() == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from([0, 1, 65, 75, 143]))))
def test_zero_means_that_every_node_reported_zero(history: list[tuple[bool, int, int]]) -> None:
    one, last = Group(4), dict[int, int]()
    for reports, node, code in history:
        if reports:
            one.report(code, node)
            last[node] = code
        elif node:
            one.mark_lost(node, "gone")
    assert (one.code() == 0) == (len(last) == 4 and not any(last.values()))


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near = server.accept()[0]
        yield Connection(near, 0.0), far
        near.close()


def wait(connection: Connection) -> list[NodeMessage]:
    while not (found := connection.receive(0.0)):
        continue
    return found


def test_messages_arrive_whole_and_in_order_and_a_heartbeat_is_none(pair: tuple[Connection, socket.socket]) -> None:
    near, far = pair
    hello = NodeMessage(kind="hello", token="t" * 64, node=3)
    for one in (hello, None):
        near.send(one)
    far.sendall(far.recv(4096) + b'{"kind": "en')
    assert wait(near) == [hello]
    far.sendall(b'd", "code": 65}\n')
    far.close()
    assert wait(near) == [NodeMessage(kind="end", code=65)]
    with pytest.raises(NodeGone, match="closed"):
        wait(near)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n",
        b'{"kind": "end", "more": 1}\n',
        b'{"kind": "end", "code": 256}\n',
        b"x" * (MAX_LINE_BYTES + 1),
        b"\xff\xfe\n",
        b"[" * 3000 + b"\n",
    ],
)
def test_other_languages_are_refused(pair: tuple[Connection, socket.socket], words: bytes) -> None:
    near, far = pair
    far.sendall(words)
    with pytest.raises(NodeGone):
        wait(near)


def test_a_node_that_reads_nothing_is_given_up(pair: tuple[Connection, socket.socket]) -> None:
    near, _ = pair
    with pytest.raises(NodeGone, match="is not reading"):
        for _ in range(100_000):
            near.send(NodeMessage(kind="stop", text="x" * 1000))
