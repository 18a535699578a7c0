"""`trnpipe health` as real processes: alone, with ranks, on two nodes; seeded faults, kills, and what stays of them."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.parallel.world import RANK_REPORTS
from pipeline.proc.tool import FOLDER_VARIABLE
from tests.fault.harness import CYCLE, ROOT, Place, Run
from tests.kit.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--backend=cpu", "--health.min-free-gib=0.1")
RETRY, FIX = 75, 78
SHM = Path("/dev/shm")


@pytest.fixture
def here(bare_place: Callable[..., Place], tmp_path: Path) -> Iterator[Place]:
    """A place in which nothing but reports and events may stay, whatever happens."""
    place = bare_place("cpu", FLAGS)
    place.forked = False  # found by its command line and environment
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    place.env = {"TMPDIR": str(temporary), "AWS_EC2_METADATA_DISABLED": "true"}
    yield place
    end = time.monotonic() + 60
    while (left := [*living(place), *temporary.iterdir()]) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []
    files = {path.name for path in place.path.rglob("*") if path.is_file()}
    assert not [name for name in files if name.startswith(("probe-", ".trnpipe-tmp-"))]


def seeded(place: Place, fault: str, **more: str) -> None:
    """Make ranks sick: `<fault>@<rank>`, separated by spaces; see seeded/sitecustomize.py."""
    path = f"{ROOT / 'tests' / 'fault' / 'seeded'}{os.pathsep}{ROOT}"
    place.env = {**place.env, "PYTHONPATH": path, "SEEDED_FAULT": fault, **more}


def living(place: Place) -> Iterator[int]:
    """Processes of the runs of a place: they write into it, or have the mark of one that does."""
    temporary = place.env["TMPDIR"]
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            ours = process.environ().get(FOLDER_VARIABLE, "").startswith(temporary)
            if (ours or place.workspace in words or temporary in words) and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
        except psutil.Error:
            continue


def results(place: Place, node: int) -> list[dict[str, str]]:
    """What the stored report of a node tells."""
    (path,) = Path(place.path, "cycles", CYCLE, "health").glob(f"{node}-*.json")
    found: list[dict[str, str]] = json.loads(path.read_text())["results"]
    return found


def verdicts(place: Place, node: int = 0) -> dict[str, str]:
    """By check."""
    return {result["name"]: result["verdict"] for result in results(place, node)}


def done(run: Run) -> list[list[str]]:
    """Names of the checks that each rank has behind it."""
    folders = set()
    for process in psutil.Process(run.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, KeyError):  # a short-lived child may end while it is read
            folders.add(process.environ()[RANK_REPORTS])
    paths = [path for folder in folders for path in Path(folder).glob("*-so-far.json")]
    return [[result["name"] for result in json.loads(path.read_text())["results"]] for path in paths]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_sound_machine_passes(here: Place, processes: int) -> None:
    run = here.run("health", f"--launch.processes={processes}")
    found = verdicts(here)
    assert ("collectives" in found) == (processes > 1)
    assert not {"retry", "fix"} & set(found.values())
    assert "pass   operations" in run.out and ("2 x passed" in run.out) == (processes > 1)
    assert here.result("health")["figures"]["nodes"] == 1


def test_every_sick_core_is_named_and_the_job_sent_elsewhere(here: Place) -> None:
    seeded(here, "swapped@0 matmul@1 nan@2 slow@3", SEEDED_DEVICES="real")
    run = here.run("health", "--launch.processes=4", "--health.only=cores,collectives", code=RETRY)
    told = {f"{one['name']} {one['verdict']}: {one['seen']}" for one in results(here, 0) if one["verdict"] != "pass"}
    for expected in (
        "collectives retry: rank 0: 8 of 16 numbers are wrong in all-gather of 8 bytes, the first at 0 (from rank 0)",
        "operations retry: rank 1: matmul fp32: relative error ",
        "operations retry: rank 2: matmul fp32: a value is not finite",
        "slow core retry: rank 3 is ",
    ):
        (found,) = (text for text in told if text.startswith(expected))
        told.remove(found)
    assert all(text.startswith("slow core") for text in told), "no other rank is left waiting; machines may be loaded"
    assert "node 0 (" in run.err and "check operations: rank 1: matmul fp32: relative error" in run.err


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        pytest.param("cores", signal.SIGKILL, marks=pytest.mark.thorough),
        ("collectives", signal.SIGTERM),
        pytest.param("cores", signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param("collectives", signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)
def test_ended_in_the_middle_it_leaves_nobody_and_nothing(here: Place, moment: str, how: signal.Signals) -> None:
    """Only the process that was started is told; the fixture looks for the others and for files."""
    ranks = 2 if moment == "collectives" else 1
    seeded(here, "absent@1" if ranks == 2 else "", SEEDED_DEVICES="real")
    run = here.start("health", f"--launch.processes={ranks}", f"--health.only={moment}")
    before = ["device"] if moment == "collectives" else ["device", "operations", "device memory"]
    assert run.until(lambda: done(run) == [before] * ranks, every_s=0.05), run.err
    family = {process.pid for process in psutil.Process(run.process.pid).children(recursive=True)}
    assert len(family) > ranks, "torchrun, too"
    if how is signal.SIGKILL:
        run.process.kill()
        assert run.wait() == -signal.SIGKILL
    else:
        assert run.terminate() == 128 + signal.SIGTERM
    if how is signal.SIGKILL or "not stopped within" in run.err:  # on a busy machine, the end may be forced
        here.run("health", "--health.only=host")  # the next start ends and deletes what a killed one left
    end = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in family) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in family if psutil.pid_exists(pid)]
    assert not [path for path in SHM.iterdir() for pid in family if str(pid) in re.findall(r"\d+", path.name)]


def on_node(place: Place, node: int, folder: Path, attempt: int, *flags: str) -> Run:
    place.env = {
        **place.env,
        "TRNJOBS_JOB_ID": "job",
        "TRNJOBS_ATTEMPT": str(attempt),
        "TRNJOBS_NODES": "2",
        "TRNJOBS_NODE": str(node),
        "TRNJOBS_MAIN": "127.0.0.1",
    }
    return place.start("health", f"--scratch={folder / str(node)}", *flags)


@pytest.mark.thorough
def test_two_nodes_and_what_one_of_them_lacks(here: Place, tmp_path: Path) -> None:
    port = free_port()
    here.env = {**here.env, "MASTER_PORT": str(port)}
    both = [on_node(here, node, tmp_path, 1, "--health.only=collectives") for node in range(2)]
    assert [run.wait() for run in both] == [0, 0], both[0].err + both[1].err
    found = verdicts(here, 1)
    assert found["collectives"] == "pass"

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(1)
        both = [on_node(here, node, tmp_path, 2) for node in range(2)]
        assert [run.wait() for run in both] == [RETRY, RETRY]
    holder = f"port {port} (MASTER_PORT) is not free"
    assert all("node 0 (" in run.err and holder in run.err for run in both)
