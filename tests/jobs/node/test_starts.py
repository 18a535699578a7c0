"""A job that the platform starts again by itself: every start has a name of its own, the same on all its nodes."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from jobs.node.environment import Start, count_start
from pipeline.context import attempt_name
from pipeline.core.errors import TransientError
from pipeline.io.storage import open_storage
from tests.jobs.node.entries import Entry, entry, ml_root, python, read_until
from tests.jobs.targets.faults import Faults, Killed, faulty
from tests.kit.ports import free_port

ROOT = Path(__file__).parents[3]
HOSTS, STEPS = ["127.0.0.1", "127.0.0.2"], 12
COUNTED = {"TRNJOBS_STARTS": "train-r1", "TRNPIPE_CYCLE": "2026-11-20", "TRNJOBS_JOB": "train"}


def counted(folder: Path, job_id: str, **more: str) -> Start:
    return count_start(open_storage(str(folder)), "c", {"TRNJOBS_STARTS": "train-r1", "TRNJOBS_JOB_ID": job_id, **more})


def test_each_id_is_a_try_and_each_start_of_it_has_a_name(tmp_path: Path) -> None:
    made = [counted(tmp_path, name) for name in ("a", "a", "b", "b", "b", "c")]
    assert made == [
        Start("a", 1),
        Start("a-start2", 1),
        Start("b", 2),
        Start("b-start2", 2),
        Start("b-start3", 2),
        Start("c", 3),
    ]
    assert len({attempt_name(start.words) for start in made}) == len(made)


def test_no_two_starts_share_a_name_though_they_count_at_once_or_die_of_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = [start.job_id for start in pool.map(lambda _: counted(tmp_path, "a"), range(16))]
    assert len(set(names)) == 16
    for calls in (1, 2, 17, 33, 60):
        storage = faulty(open_storage(str(tmp_path)), Faults(kill_after=calls))
        try:
            names.append(count_start(storage, "c", {"TRNJOBS_STARTS": "train-r1", "TRNJOBS_JOB_ID": "a"}).job_id)
        except Killed:
            names.append(counted(tmp_path, "a").job_id)
    assert len(set(names)) == len(names)


@pytest.mark.fault
@pytest.mark.parametrize("failing", [0, 1])
def test_both_nodes_of_a_group_leave_sagemaker_the_same_line(tmp_path: Path, failing: int) -> None:
    """The main node is at a loopback address; the other one fails, or it does."""
    code = f"import os, sys, time; sys.exit(65) if os.environ['TRNJOBS_NODE'] == '{failing}' else time.sleep(100)"
    port, nodes = str(free_port()), list[Entry]()
    for own in HOSTS:
        nodes.append(entry(*python(code), env=ml_root(tmp_path / own, own, HOSTS, "lo") | {"MASTER_PORT": port}))
    for node in nodes:
        node.finish()
    (line,) = {(tmp_path / own / "output" / "failure").read_text() for own in HOSTS}
    assert (nodes[0].returncode, line.startswith("exit 65 DataError")) == (65, True)


SAY = "import os; print(os.environ['TRNJOBS_JOB_ID'], os.environ['TRNJOBS_ATTEMPT'], flush=True)"


@pytest.mark.fault
@pytest.mark.parametrize("attempt", ["", "2"])
def test_a_group_on_spot_capacity_meets_nothing_of_its_first_start(tmp_path: Path, attempt: str) -> None:
    """Twice the same training job; the nodes of a start agree on its name, which is no other's."""
    told, workspace = [], {"TRNPIPE_WORKSPACE": str(tmp_path / "workspace")}
    for start in ("first", "second"):
        port, nodes = str(free_port()), []
        for own in HOSTS:
            env = ml_root(tmp_path / start / own, own, HOSTS, "lo") | COUNTED | workspace | {"MASTER_PORT": port}
            env |= {"TRNJOBS_ATTEMPT": attempt} if attempt else {}
            nodes.append(entry(*python(SAY), env=env))
        said = [node.finish() for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
        (line,) = {out for out, _ in said}
        told.append(line.split())
    name = "relevance-train-r1a2-0badcafe"
    assert told == [[name, attempt or "1"], [f"{name}-start2", attempt or "1"]]


@pytest.mark.fault
def test_a_start_that_cannot_be_counted_ends_all_nodes_as_transient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Start:
        raise TransientError("the workspace does not answer")

    monkeypatch.setattr("jobs.node.run.count_start", refuse)  # the entries are forks of this process
    port, nodes = str(free_port()), list[Entry]()
    for own in HOSTS:
        env = ml_root(tmp_path / own, own, HOSTS, "lo") | COUNTED | {"TRNPIPE_WORKSPACE": str(tmp_path / "w")}
        nodes.append(entry(*python(SAY), env=env | {"MASTER_PORT": port}))
    said = [node.finish() for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], said
    assert [out for out, _ in said] == ["", ""]


def _start(tmp_path: Path, name: str, start: int, step_s: float) -> list[Entry]:
    """Two nodes with a rank each of examples/ddp_script.py, as one start of the training job `name`."""
    words = ["-m", "pipeline", "launch", "--launch.processes", "1", "--", str(ROOT / "examples" / "ddp_script.py")]
    words += ["--steps", str(STEPS), "--every", "1", "--step-s", str(step_s)]
    port, nodes = str(free_port()), []
    for own in HOSTS:
        env = ml_root(tmp_path / name / str(start) / own, own, HOSTS, "lo") | {"TRAINING_JOB_NAME": name}
        env |= {"TRNPIPE_WORKSPACE": str(tmp_path / "workspace"), "TRNPIPE_CYCLE": f"run-{name}", "TRNJOBS_JOB": "ddp"}
        env |= {"TRNJOBS_STARTS": "ddp-r1", "TRNJOBS_CHECKPOINT_URI": (tmp_path / name / "checkpoints").as_uri()}
        env |= {"TRNJOBS_GATHER_S": "60", "TRNJOBS_LOST_AFTER_S": "30", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONPATH": str(ROOT), "HOME": os.environ.get("HOME", "/")}
        nodes.append(entry(sys.executable, *words, env=env))
    return nodes


def _weights(tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True)["model"]
    return found


@pytest.mark.fault
@pytest.mark.thorough  # 40 s of processor time
def test_a_group_whose_spot_capacity_is_taken_away_ends_with_the_weights_of_one_left_alone(tmp_path: Path) -> None:
    """SageMaker says SIGTERM to all nodes, takes them away, and starts the same training job again on others."""
    alone = _start(tmp_path, "alone", 1, 0.0)
    said = [node.finish() for node in alone]
    assert [node.returncode for node in alone] == [0, 0], said
    for start in (1, 2):
        nodes = _start(tmp_path, "taken", start, 0.5)
        read_until(nodes[0], f"step {3 * start} ")
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            if start == 2:
                node.kill()
            node.finish()
    last = _start(tmp_path, "taken", 3, 0.0)
    said = [node.finish() for node in last]
    assert [node.returncode for node in last] == [0, 0], said
    assert "continuing at step" in said[0][0]
    starts = tmp_path / "workspace" / "cycles" / "run-taken" / "jobs" / "starts" / "ddp-r1"
    assert {path.name for path in starts.iterdir()} == {"1", "2", "3"}
    expected = _weights(tmp_path, "alone")
    assert all(torch.equal(expected[name], found) for name, found in _weights(tmp_path, "taken").items())
