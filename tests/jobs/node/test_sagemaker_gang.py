"""A gang of twelve hosts as SageMaker describes them, on the loopback addresses of this machine."""

import sys
from pathlib import Path

import pytest
import torch

from tests.jobs.node.entries import entry, free_port
from tests.jobs.node.gang_of_twelve import train
from tests.jobs.node.test_sagemaker import ml_root

HOSTS = [f"127.0.0.{number}" for number in range(1, 13)]
SCRIPT = Path(__file__).with_name("gang_of_twelve.py")


@pytest.mark.fault
@pytest.mark.timeout(180)
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
