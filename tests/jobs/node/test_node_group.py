"""Several entries of one multi-node job, as processes."""

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.parallel.world import own_address, own_interface
from tests.jobs.node.entries import (
    PATIENT,
    READY,
    WAIT,
    EntryGroup,
    clean_env,
    entry,
    entry_group,
    job_env,
    post_mortem,
    python,
    read_until,
)
from tests.parallel.namespaces import MAIN_ADDRESS, ecs_tasks

pytestmark = pytest.mark.fault

STOPS = READY + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(100)"


def after(path: Path) -> str:
    """Code that waits for a file. A node that has not begun when it is told to stop ends with another code."""
    return READY + f"\nimport pathlib\nwhile not pathlib.Path({str(path)!r}).exists(): time.sleep(0.02)\n"


def all_ready(group: EntryGroup) -> None:
    for process in group.nodes.values():
        read_until(process, "ready")


def listening(group: EntryGroup) -> tuple[str, int]:
    """Where the main node listens, once it does."""
    address = (own_address(), group.port + 1)
    while True:
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return address


def test_the_main_node_waits_for_the_last_one(tmp_path: Path) -> None:
    """It comes late, and ends last; nothing starts before it is there."""
    marker = tmp_path / "last is done"
    with entry_group(tmp_path, 3) as group:
        for node in (2, 0):
            group.start(node, python(READY + f"open({str(tmp_path)!r} + '/started-{node}', 'w')"))
        early = socket.create_connection(listening(group))  # a stranger: no node
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
    told = [codes[failing] if node == failing else 143 for node in range(3)]
    assert [row["exit_code"] for row in main["nodes"]] == told


@pytest.mark.parametrize(("killed", "codes"), [(0, [75, 75]), (2, [75, 143])])
def test_a_node_that_is_killed_is_lost_at_once(tmp_path: Path, killed: int, codes: list[int]) -> None:
    with entry_group(tmp_path, 3) as group:
        for node in range(3):
            group.start(node, python(STOPS), TRNJOBS_LOST_AFTER_S="1000")
        all_ready(group)
        group.nodes[killed].kill()
        ended = group.codes()
        assert [code for node, code in enumerate(ended) if node != killed] == codes
    who = f"node {killed}" if killed else "the main node"
    # The kernel resets the connection of a process that had not read all it was sent.
    why = r"the connection (was closed|is broken \(Connection reset by peer\))"
    assert re.fullmatch(f"{who} is lost: {why}", post_mortem(tmp_path, node=0 if killed else 2)["reason"])


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


def test_a_signal_to_the_main_node_stops_all(tmp_path: Path) -> None:
    with entry_group(tmp_path, 2) as group:
        for node in range(2):
            group.start(node, python(STOPS), MASTER_ADDR="127.0.0.1")
        all_ready(group)
        group.nodes[0].send_signal(signal.SIGTERM)
        assert group.codes() == [143, 143]


NETWORK = READY + "print({name: os.environ[name] for name in os.environ if name[:5] in ('CCOM_', 'GLOO_')}, flush=True)"


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"GLOO_SOCKET_IFNAME": "given0"}, ["'GLOO_SOCKET_IFNAME': 'given0'", "'CCOM_SOCKET_IFNAME': 'OWN'"]),
        ({"MASTER_ADDR": "127.0.0.1"}, ["{}"]),  # on a machine without a network
    ],
)
def test_a_group_is_told_its_network(tmp_path: Path, env: dict[str, str], shown: list[str]) -> None:
    """What the job sets itself stays; and a node alone is told nothing."""
    with entry_group(tmp_path, 2) as group:
        for node in range(2):
            group.start(node, python(NETWORK), **env)
        said = [group.nodes[node].finish()[0] for node in range(2)]
        assert group.codes() == [0, 0]
    assert all(part.replace("OWN", own_interface().name) in text for text in said for part in shown)
    assert entry(*python(NETWORK), env=job_env(tmp_path)).finish()[0].splitlines() == ["ready", "{}"]


def test_nodes_that_never_come(tmp_path: Path) -> None:
    with entry_group(tmp_path, 3) as group:
        group.start(0, python(WAIT), TRNJOBS_GATHER_S="1")
        group.start(1, python(WAIT))
        out, err = group.nodes[0].finish()
        assert (out, group.codes()) == ("", [75, 75])  # neither has started its command
        assert re.search(r"node (1, )?2 of 3 has not connected within 1s", err)  # node 1 may be late as well


def test_a_node_of_an_earlier_try_is_turned_away(tmp_path: Path) -> None:
    with entry_group(tmp_path, 2) as group:
        group.start(0, python("pass"))
        listening(group)  # the stale one looks for it once at least, before it gives up
        stale = group.start(1, python(WAIT), AWS_BATCH_JOB_ATTEMPT="0", TRNJOBS_GATHER_S="1.5")
        assert any("wrong token" in line for line in group.nodes[0].stderr)
        group.start(1, python("pass"))
        assert group.codes() == [0, 0]
        assert (stale.finish()[0], stale.returncode) == ("", 75)


def test_nodes_meet_at_the_address_that_batch_tells_the_others(tmp_path: Path) -> None:
    """Each has a network of its own, as tasks of Amazon ECS have. The main node has no word for its own address; the
    link to the agent of ECS comes first in its list."""
    names = "import os; print(os.environ['CCOM_SOCKET_IFNAME'], os.environ['GLOO_SOCKET_IFNAME'], flush=True)"
    with ecs_tasks() as tasks:
        nodes = []
        for node, into in enumerate(tasks):
            batch = {"AWS_BATCH_JOB_ID": f"job-1#{node}", "AWS_BATCH_JOB_NUM_NODES": "2"}
            batch |= {"AWS_BATCH_JOB_NODE_INDEX": str(node), "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
            batch |= {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": MAIN_ADDRESS} if node else {}
            words = [*into, sys.executable, "-m", "jobs.node", "--", *python(names)]
            env = clean_env() | PATIENT | job_env(tmp_path) | batch
            nodes.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        told = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert [out for out, _ in told] == ["eth0 eth0\n", "eth0 eth0\n"]
