"""Who may start on a machine, and who never could."""

import pytest

from jobs.cycle.job_states import Leaf
from jobs.targets.local.target import Slots, check_fits, startable_jobs
from pipeline.core.errors import ConfigError
from tests.jobs.cycle.cases import job

MACHINE = Slots(vcpus=4, memory_mib=16_384, groups=1)  # jobs of the cases take 2 vCPU and 4,096 MiB a node


@pytest.mark.parametrize(
    ("queue", "active", "expected"),
    [
        ("abc", "", "ab"),
        ("abc", "d", "a"),
        ("abc", "de", ""),
        ("Gab", "d", ""),  # nobody overtakes a gang that waits for room
        ("aGb", "", "a"),
        ("Gab", "", "G"),
    ],
)
def test_first_in_first_out(queue: str, active: str, expected: str) -> None:
    leaves = {name: Leaf(job(name, num_nodes=2 if name.isupper() else 0)) for name in "abcdeG"}
    found = startable_jobs([leaves[name] for name in queue], [leaves[name] for name in active], MACHINE)
    assert "".join(leaf.name for leaf in found) == expected


def test_gangs_run_one_at_a_time() -> None:
    gangs = [Leaf(job(name, num_nodes=1)) for name in "ab"]
    assert [leaf.name for leaf in startable_jobs(gangs, [], MACHINE)] == ["a"]
    two = MACHINE.model_copy(update={"groups": 2})
    assert [leaf.name for leaf in startable_jobs(gangs, [], two)] == ["a", "b"]


def test_what_can_never_run_is_refused_by_name() -> None:
    check_fits([job("a"), job("g", num_nodes=2), job("e", array_size=100)], MACHINE)
    with pytest.raises(
        ConfigError, match=r"2 jobs need more(.|\n)*g: 6 vCPU, 12,288 MiB, 1 node group\n(.|\n)*h: "
    ) as error:
        check_fits([job("a"), job("g", num_nodes=3), job("h", num_nodes=9)], MACHINE)
    assert "at most 4 vCPU, 16,384 MiB" in str(error.value)
