"""Messages over a socket pair."""

import socket
from collections.abc import Iterator

import pytest

from jobs.node.gang import MAX_LINE_BYTES, Channel, Message, PeerGone


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    channel = Channel(near)
    yield channel, far
    channel.socket.close()
    far.close()


def wait(channel: Channel) -> list[Message]:
    """What comes next; the time-out of the test is the limit."""
    while not (found := channel.receive()):
        continue
    return found


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, socket.socket]) -> None:
    near, far = pair
    sent = [Message(kind="hello", token="t" * 64, node=3), Message(kind="beat"), Message(kind="done", code=65)]
    other = Channel(far)
    for one in sent:
        other.send(one)
    found: list[Message] = []
    while len(found) < 3:
        found += near.receive()
    assert found == sent


def test_a_message_may_come_in_pieces(pair: tuple[Channel, socket.socket]) -> None:
    near, far = pair
    far.sendall(b'{"kind": "be')
    assert near.receive() == []
    far.sendall(b'at"}\n{"kind"')
    assert wait(near) == [Message(kind="beat")]


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n",
        b'{"kind": "beat", "more": 1}\n',
        b'{"kind": "done", "code": 256}\n',
        b"x" * (MAX_LINE_BYTES + 1),
        b'{"kind": "stop", "text": "' + b"x" * MAX_LINE_BYTES + b'"}\n',
        b"\xff\xfe\n",
        b"[" * 3000 + b"\n",
    ],
)
def test_other_languages_are_refused(pair: tuple[Channel, socket.socket], words: bytes) -> None:
    near, far = pair
    far.sendall(words)
    with pytest.raises(PeerGone):
        wait(near)


def test_last_words_are_heard_before_the_end(pair: tuple[Channel, socket.socket]) -> None:
    near, far = pair
    far.sendall(b'{"kind": "done"}\n')
    far.close()
    assert wait(near) == [Message(kind="done")]
    with pytest.raises(PeerGone, match="closed"):
        wait(near)


def test_a_peer_that_reads_nothing_is_given_up(pair: tuple[Channel, socket.socket]) -> None:
    near, _ = pair
    near.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with pytest.raises(PeerGone, match="reads nothing"):
        for _ in range(100_000):
            near.send(Message(kind="stop", text="x" * 1000))
