"""Several entries of one multi-node job, as processes."""

import re
import signal
import socket
import time
from pathlib import Path

import pytest

from pipeline.parallel.world import own_address, own_interface
from tests.jobs.node.entries import (
    READY,
    WAIT,
    EntryGroup,
    entry,
    entry_group,
    job_env,
    post_mortem,
    python,
    read_until,
)

pytestmark = pytest.mark.fault

STOPS = READY + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(100)"


def after(path: Path) -> str:
    """Code that waits for a file. A node that has not begun when it is told to stop ends with another code."""
    return READY + f"\nimport pathlib\nwhile not pathlib.Path({str(path)!r}).exists(): time.sleep(0.02)\n"


def all_ready(group: EntryGroup) -> None:
    for process in group.nodes.values():
        read_until(process, "ready")


def test_the_main_node_waits_for_the_last_one(tmp_path: Path) -> None:
    """It comes late, and ends last; nothing starts before it is there."""
    marker = tmp_path / "last is done"
    with entry_group(tmp_path, 3) as group:
        for node in (2, 0):
            group.start(node, python(READY + f"open({str(tmp_path)!r} + '/started-{node}', 'w')"))
        early = socket.create_connection(_retry_address(group))  # a stranger: no node
        early.sendall(b'{"kind": "hello", "token": "wrong", "node": 1}\n')
        assert early.recv(100) == b""
        assert not list(tmp_path.glob("started-*"))
        group.start(1, python(after(tmp_path / "go") + f"open({str(marker)!r}, 'w')"))
        all_ready(group)
        assert group.nodes[0].poll() is None
        (tmp_path / "go").touch()
        assert group.codes() == [0, 0, 0]
        assert marker.exists()
    assert not (tmp_path / "cycles/2026-11-20/jobs/post-mortem").exists()


def _retry_address(group: EntryGroup) -> tuple[str, int]:
    """Where the main node listens, once it does."""
    address = (own_address(), group.port + 1)
    while True:
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return address


@pytest.mark.parametrize(
    ("failing", "how", "codes"),
    [
        (1, "sys.exit(65)", [65, 65, 143]),
        (0, "sys.exit(78)", [78, 143, 143]),
        (1, "os.kill(os.getpid(), 9)", [75, 75, 143]),
    ],
)
def test_a_node_whose_command_fails_decides(tmp_path: Path, failing: int, how: str, codes: list[int]) -> None:
    with entry_group(tmp_path, 3) as group:
        for node in range(3):
            fails = python(after(tmp_path / "go") + f"print('bad row', flush=True); {how}")
            group.start(node, fails if node == failing else python(STOPS))
        all_ready(group)
        (tmp_path / "go").touch()
        assert group.codes() == codes
    main, own = post_mortem(tmp_path, node=0), post_mortem(tmp_path, node=failing)
    assert own["log"] == ["ready", "bad row"]
    assert failing == 0 or main["reason"] == f"node 1 exited with {codes[1]}"
    assert [row["exit_code"] for row in main["nodes"]] == [
        143 if node != failing else codes[failing] for node in range(3)
    ]


def test_a_node_that_is_killed_is_lost_at_once(tmp_path: Path) -> None:
    with entry_group(tmp_path, 3) as group:
        for node in range(3):
            group.start(node, python(STOPS), TRNJOBS_LOST_AFTER_S="1000")
        all_ready(group)
        group.nodes[2].kill()
        assert group.codes()[:2] == [75, 143]
    main = post_mortem(tmp_path)
    lost = main["nodes"][2]["lost"]
    assert main["reason"] == f"node 2 is lost: {lost}"
    # The kernel resets the connection of a process that had not read all it was sent.
    assert lost in ("the connection was closed", "the connection is broken (Connection reset by peer)")


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_falls_silent_is_lost_after_a_while(tmp_path: Path, silent: int) -> None:
    """Stopped, it keeps its connection open but says nothing."""
    with entry_group(tmp_path, 2) as group:
        for node in range(2):
            group.start(node, python(STOPS), TRNJOBS_LOST_AFTER_S="1000" if node == silent else "1.5")
        read_until(group.nodes[1], "ready")  # else a busy machine has made it silent already
        group.nodes[silent].send_signal(signal.SIGSTOP)
        err = group.nodes[1 - silent].finish()[1]
        assert group.nodes[1 - silent].returncode == 75
        assert f"{'node 1' if silent else 'the main node'} is lost: no heartbeat for 1.5s" in err


def test_without_the_main_node_the_others_stop(tmp_path: Path) -> None:
    with entry_group(tmp_path, 3) as group:
        for node in range(3):
            group.start(node, python(STOPS))
        all_ready(group)
        group.nodes[0].kill()
        assert group.codes()[1:] == [75, 75]
    assert "the main node is lost" in post_mortem(tmp_path, node=2)["reason"]


def test_a_signal_to_the_main_node_stops_all(tmp_path: Path) -> None:
    with entry_group(tmp_path, 2) as group:
        for node in range(2):
            group.start(node, python(STOPS), MASTER_ADDR="127.0.0.1")
        all_ready(group)
        group.nodes[0].send_signal(signal.SIGTERM)
        assert group.codes() == [143, 143]


NETWORK = "print({name: os.environ[name] for name in os.environ if name[:5] in ('CCOM_', 'GLOO_')}, flush=True)"


def test_a_group_is_told_its_network_and_a_node_alone_is_not(tmp_path: Path) -> None:
    """What the job sets itself stays."""
    with entry_group(tmp_path, 2) as group:
        for node in range(2):
            group.start(node, python(READY + NETWORK), GLOO_SOCKET_IFNAME="given0")
        said = [group.nodes[node].finish()[0] for node in range(2)]
        assert group.codes() == [0, 0]
    for text in said:
        assert f"'CCOM_SOCKET_IFNAME': '{own_interface().name}'" in text and "'GLOO_SOCKET_IFNAME': 'given0'" in text
    alone = entry(*python(READY + NETWORK), env=job_env(tmp_path))
    assert alone.finish()[0].splitlines() == ["ready", "{}"]
    with entry_group(tmp_path, 2) as group:  # on a machine without a network
        for node in range(2):
            group.start(node, python(READY + NETWORK), MASTER_ADDR="127.0.0.1")
        assert [group.nodes[node].finish()[0].splitlines() for node in range(2)] == [["ready", "{}"]] * 2


def test_nodes_that_never_come(tmp_path: Path) -> None:
    with entry_group(tmp_path, 3) as group:
        group.start(0, python(WAIT), TRNJOBS_GATHER_S="1")
        group.start(1, python(WAIT))
        out, err = group.nodes[0].finish()
        assert (out, group.codes()) == ("", [75, 75])  # neither has started its command
        assert re.search(r"node (1, )?2 of 3 has not come within 1s", err)  # node 1 may be late as well


def test_a_node_of_an_earlier_try_is_turned_away(tmp_path: Path) -> None:
    with entry_group(tmp_path, 2) as group:
        group.start(0, python("pass"))
        _retry_address(group)  # the stale one looks for it once at least, before it gives up
        stale = group.start(1, python(WAIT), AWS_BATCH_JOB_ATTEMPT="0", TRNJOBS_GATHER_S="1.5")
        assert any("wrong token" in line for line in group.nodes[0].stderr)
        group.start(1, python("pass"))
        assert group.codes() == [0, 0]
        assert stale.finish()[0] == ""
        assert stale.returncode == 75
