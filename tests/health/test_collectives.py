"""Collectives between real processes, with seeded faults: the verdict names the rank."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipeline.core.health import Verdict
from pipeline.health.collectives import agent_store, bus_factor, contents

WORLD = 3
RANK = "tests.health.rank"


@pytest.fixture
def gang() -> Iterator[Callable[[str], dict[int, Any]]]:
    """gang(fault) -> verdict of each rank that came to one."""
    started: list[subprocess.Popen[str]] = []
    store = agent_store("127.0.0.1", 0, is_agent=True)

    def run(fault: str) -> dict[int, Any]:
        for rank in range(WORLD):
            words = [sys.executable, "-m", RANK, str(rank), str(WORLD), str(store.port), fault]
            started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        told = {}
        for rank, process in enumerate(started):
            if not (rank == 1 and fault in ("absent", "hangs", "dies")):
                out, _ = process.communicate(timeout=90)
                told[rank] = json.loads(out.splitlines()[-1])
        return told

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.stage
def test_sound_ranks_pass_with_their_bandwidth(gang: Callable[[str], dict[int, Any]]) -> None:
    told = gang("none")
    assert [result["verdict"] for result in told.values()] == [Verdict.PASS] * WORLD
    assert told[0]["figures"]["all-reduce_4096_bytes_gb_s"] > 0
    assert len(told[0]["figures"]) == 5 * 2


@pytest.mark.fault
@pytest.mark.parametrize(
    ("fault", "rank", "seen"),
    [
        ("absent", 0, "rank 1 of 3 did not arrive at all-gather/8/0 within 4 s"),
        ("hangs", 0, "rank 1 was lost in all-gather/8/0"),
        ("dies", 2, "rank 1 was lost in all-gather/8/0"),
        ("swapped", 1, "rank 1 got 4 wrong numbers of 6 from all-gather/8/0, the first at 0 (from rank 0)"),
        ("stale", 1, "from all-gather/8/1, the first at 0 (from rank 0)"),
    ],
)
def test_a_fault_is_a_verdict_that_names_the_rank(
    gang: Callable[[str], dict[int, Any]], fault: str, rank: int, seen: str
) -> None:
    result = gang(fault)[rank]
    assert result["verdict"] == Verdict.RETRY
    assert seen in result["seen"]


def test_contents_tell_source_target_turn_and_place_apart_and_add_up_exactly() -> None:
    seen = {tuple(contents(*key, 4).tolist()) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(seen) == 4
    many = torch.stack([contents(source, 0, 0, 1000) for source in range(512)])
    assert torch.equal(many.sum(0).double(), many.double().sum(0))


def test_bus_factors() -> None:
    assert [bus_factor(name, 4) for name in ("all-reduce", "all-gather", "broadcast")] == [1.5, 3.0, 1.0]
