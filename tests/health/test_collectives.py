"""Collectives between real processes, with seeded faults: the verdict names the rank."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from pipeline.health.check import CheckResult, Verdict
from pipeline.health.ranks import bus_factor, contents
from tests.health.gang import SIZES_BYTES, collectives, gang, node

WORLD = 3


@pytest.mark.stage
@pytest.mark.parametrize(("fault", "num"), [("none", 2), ("device none", 2)])
def test_sound_ranks_pass_with_their_bandwidth(fault: str, num: int) -> None:
    with gang(collectives, WORLD, fault) as told:
        results: list[CheckResult] = [told(rank) for rank in range(WORLD)]
    assert [result.verdict for result in results] == [Verdict.PASS] * WORLD, results
    assert float(results[0].figures["all-reduce_4096_bytes_gb_s"]) > 0
    assert len(results[0].figures) == num * len(SIZES_BYTES)


SEEN = {
    "absent": {0: "rank 1 of 3 did not arrive at all-gather/8/0 within 5 s"},
    "hangs": {0: "rank 1 was lost in all-gather/8/0", 1: "rank 1 was lost in all-gather/8/0: not done within 5 s"},
    "dies": {2: "rank 1 was lost in all-gather/8/0"},
    "swapped": {
        0: "rank 1 of 3 has found a fault and does not come to all-gather/8/1",
        1: "rank 1 got 2 wrong numbers of 3 from all-gather/8/0, the first at 0 (from rank 0)",
    },
    "stale": {1: "from all-gather/8/1, the first at 0 (from rank 0)"},
    "device absent": {2: "rank 1 of 3 did not arrive at all-gather/8/0 within 5 s"},
    "device hangs": {0: "no rank came through all-gather/8/0: not done within 5 s"},  # nobody can say more
    "device dies": {2: "rank 1 was lost in all-gather/8/0"},
    "device swapped": {1: "rank 1 got 2 wrong numbers of 3 from all-gather/8/0"},
}


@pytest.fixture(scope="module")
def gangs() -> Iterator[dict[str, Callable[[int], CheckResult]]]:
    """All at once: most of their time is waiting."""
    with ExitStack() as stack:
        yield {fault: stack.enter_context(gang(collectives, WORLD, fault)) for fault in SEEN}


@pytest.mark.fault
@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_is_a_verdict_that_names_the_rank(gangs: dict[str, Callable[[int], CheckResult]], fault: str) -> None:
    for rank, text in SEEN[fault].items():
        result = gangs[fault](rank)
        assert result.verdict is Verdict.RETRY
        assert text in result.seen


@pytest.mark.stage
def test_within_nodes_then_across_then_on_the_device() -> None:
    with gang(node, 4, 2) as told:
        found: list[list[CheckResult]] = [told(rank) for rank in range(4)]
    names = ["collectives in the node", "collectives", "device collectives"]
    assert [[result.name for result in results] for results in found] == [names] * 4
    assert {result.verdict for results in found for result in results} == {Verdict.PASS}, found


def test_contents_tell_source_turn_and_place_apart_and_add_up_exactly() -> None:
    seen = {tuple(contents(*key, 4).tolist()) for key in [(0, 0), (1, 0), (0, 1)]}
    assert len(seen) == 3
    many = torch.stack([contents(source, 0, 1000) for source in range(512)])
    assert torch.equal(many.sum(0).double(), many.double().sum(0))
    mean = many.sum(0) * (1 / 512)
    assert torch.equal(torch.round(mean * 512), many.sum(0)), "what a device gives back as a mean"


def test_bus_factors() -> None:
    assert [bus_factor(name, 4) for name in ("all-reduce", "all-gather")] == [1.5, 0.75]
