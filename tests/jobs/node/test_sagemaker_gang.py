"""A gang of twelve hosts as SageMaker describes them, on the loopback addresses of this machine."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.jobs.node.entries import Entry, entry, read_until
from tests.jobs.node.gang_of_twelve import train
from tests.jobs.node.test_sagemaker import ml_root
from tests.ports import free_port

HOSTS = [f"127.0.0.{number}" for number in range(1, 13)]
SCRIPT = Path(__file__).with_name("gang_of_twelve.py")
ROOT = Path(__file__).parents[3]
STEPS = 12


@pytest.mark.fault
def test_twelve_hosts_meet_two_train_and_all_tell_why_the_job_failed(tmp_path: Path) -> None:
    """Two nodes train over the interface and the address that the files of SageMaker name, as one process would."""
    results, port = tmp_path / "results", str(free_port())
    results.mkdir()
    nodes = []
    for own in HOSTS:
        env = ml_root(tmp_path / own, own, HOSTS, "lo") | {"MASTER_PORT": port}
        env |= {"TRNJOBS_GATHER_S": "90", "TRNJOBS_LOST_AFTER_S": "30", "OMP_NUM_THREADS": "1"}
        nodes.append(entry(sys.executable, str(SCRIPT), str(results), env=env))
    said = [node.finish() for node in nodes]
    assert nodes[0].returncode == 65, said
    assert {path.name for path in results.glob("here-*")} == {f"here-{node}" for node in range(12)}
    weights = [torch.load(results / f"weights-{node}.pt", weights_only=True) for node in (0, 1)]
    alone = train(0, 1, lambda gradient: None)
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(alone, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), rtol=0, atol=1e-3)
    lines = {(tmp_path / own / "output" / "failure").read_text() for own in HOSTS}
    (line,) = lines
    assert line.startswith("exit 65 DataError: ")


def _start(tmp_path: Path, name: str, start: int, step_s: float) -> list[Entry]:
    """Two nodes with a rank each of examples/ddp_script.py, as one start of the training job `name`."""
    words = ["-m", "pipeline", "launch", "--launch.processes", "1", "--", str(ROOT / "examples" / "ddp_script.py")]
    words += ["--steps", str(STEPS), "--every", "1", "--step-s", str(step_s)]
    port, nodes = str(free_port()), []
    for own in HOSTS[:2]:
        env = ml_root(tmp_path / name / str(start) / own, own, HOSTS[:2], "lo") | {"TRAINING_JOB_NAME": name}
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
def test_a_gang_whose_spot_capacity_is_taken_away_ends_with_the_weights_of_one_left_alone(tmp_path: Path) -> None:
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
