"""The short version of `python -m bench.chaos`: one cycle under faults of our choice."""

import random
from pathlib import Path

import pytest

from bench.chaos.faults import Fault
from bench.chaos.lane import STAGES, Lane
from bench.chaos.processes import Watch

FAULTS = [
    Fault("kill_process", "prepare", 1.0),
    Fault("corrupt_checkpoint", "train", 0.0),
    Fault("kill_engine", "evaluate", 0.5),
    Fault("kill_node", "embed", 1.5),
]


@pytest.mark.thorough
@pytest.mark.fault
@pytest.mark.slow
def test_a_cycle_ends_well_whatever_happens_to_it(tmp_path: Path) -> None:
    with Watch(f"file://{tmp_path}/") as watch:
        lane = Lane("lane", tmp_path, watch, random.Random(1))
        result = lane.run(0, (1, 1), FAULTS)
    log = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert sorted(hit.kind for hit in result.hits) == sorted(fault.kind for fault in FAULTS), log
    assert result.succeeded and result.jobs_finished == len(STAGES), f"{result}\n{log}"
    assert (result.wrong_models, result.wrong_vectors, result.run_twice) == ((), (), ())
    assert result.runs == 2, "the engine was killed once"
    assert result.attempts >= len(STAGES) + 1 + 3, "a retry for each fault of a job"
