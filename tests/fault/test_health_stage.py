"""`trnpipe health` as real processes: alone, with ranks, on two nodes; seeded faults and their exit codes."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.health.report import FOLDER_VARIABLE
from tests.fault.harness import CYCLE, Place, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = (
    "--backend=cpu",
    "--health.burn-s=0.5",
    "--health.sweep-mib=64",
    "--health.min-open-files=64",
    "--health.collective-limit-s=10",
    "--health.min-free-cache-gib=0.1",
    "--health.min-free-checkpoint-gib=0.1",
    "--health.min-shm-gib=0",
)
RETRY, FIX = 75, 78


@pytest.fixture
def here(bare_place: Callable[..., Place]) -> Place:
    return bare_place("cpu", FLAGS)


def reports(place: Place) -> dict[int, dict[str, dict[str, object]]]:
    """Results by check, by node."""
    found = {}
    for path in sorted(Path(place.path, "cycles", CYCLE, "health").glob("*-*.json")):
        report = json.loads(path.read_text())
        found[int(report["node_rank"])] = {result["name"]: result for result in report["results"]}
    return found


def ranks_of(run: Run) -> dict[int, psutil.Process]:
    """The processes that check ranks, by rank."""
    found = {}
    for process in psutil.Process(run.process.pid).children(recursive=True):
        try:
            env = process.environ()
            if FOLDER_VARIABLE in env and "torch.distributed.run" not in " ".join(process.cmdline()) and "RANK" in env:
                found[int(env["RANK"])] = process
        except psutil.Error:
            continue
    return found


def started(run: Run) -> list[Path]:
    """What ranks have reported so far."""
    folders = {process.environ()[FOLDER_VARIABLE] for process in ranks_of(run).values()}
    return [path for folder in folders for path in Path(folder).glob("*-so-far.json")]


def assert_nobody_left(place: Place) -> None:
    for process in psutil.process_iter():
        try:
            assert str(place.workspace) not in " ".join(process.cmdline())
        except psutil.Error:
            continue


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sound_machine_passes(here: Place, processes: int) -> None:
    run = here.run("health", f"--launch.processes={processes}")
    results = reports(here)[0]
    assert results["operations"]["seen"] == f"{processes} x right"
    assert ("collectives" in results) == (processes > 1)
    assert not {"retry", "fix"} & {result["verdict"] for result in results.values()}
    assert "pass   operations" in run.out
    assert here.result("health")["figures"]["nodes"] == 1
    assert_nobody_left(here)


@pytest.mark.parametrize(
    ("flag", "code", "told"),
    [
        ("--health.min-free-checkpoint-gib=900000", FIX, "check disk"),
        ("--health.expected-instance=trn1.32xlarge", FIX, "neuron-ls is not installed"),
        ("--backend=cuda", FIX, "no CUDA device"),
    ],
)
def test_an_unfit_machine_is_refused_with_the_code_of_its_fault(here: Place, flag: str, code: int, told: str) -> None:
    run = here.run("health", flag, code=code)
    assert told in run.err
    assert "Traceback" not in run.err
    assert reports(here)[0], "the evidence is kept"
    assert_nobody_left(here)


@pytest.mark.fault
def test_a_rank_that_dies_is_named(here: Place) -> None:
    run = here.start("health", "--launch.processes=2", "--health.burn-s=20")
    assert run.until(lambda: len(started(run)) == 2, every_s=0.1)
    ranks_of(run)[1].kill()
    assert run.wait() == RETRY
    assert re.search(r"check ranks: rank 1 of this node ended without a word after check ", run.err)
    assert "rank 0 of this node" not in run.err
    assert_nobody_left(here)


@pytest.mark.fault
def test_sigterm_ends_it_and_leaves_nobody(here: Place) -> None:
    run = here.start("health", "--launch.processes=2", "--health.burn-s=60")
    assert run.until(lambda: len(ranks_of(run)) == 2, every_s=0.1)
    assert run.terminate() == 128 + signal.SIGTERM
    assert_nobody_left(here)


@pytest.mark.usefixtures("rendezvous_port")
def test_two_nodes_and_what_one_of_them_lacks(here: Place, tmp_path: Path) -> None:
    def start(node: int, *flags: str, attempt: int) -> Run:
        here.env = {
            "AWS_BATCH_JOB_ID": f"job#{node}",
            "AWS_BATCH_JOB_ATTEMPT": str(attempt),
            "AWS_BATCH_JOB_NUM_NODES": "2",
            "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return here.start("health", f"--scratch={tmp_path / str(node)}", *flags)

    both = [start(node, attempt=1) for node in range(2)]
    assert [run.wait() for run in both] == [0, 0], both[0].err + both[1].err
    assert reports(here)[1]["collectives"]["verdict"] == "pass"
    both = [start(node, *(["--health.min-free-cache-gib=900000"] * node), attempt=2) for node in range(2)]
    assert [run.wait() for run in both] == [FIX, FIX]
    assert all("node 1" in run.err and "check disk" in run.err for run in both)
