"""Network devices against the instance table."""

from pathlib import Path

import pytest

from pipeline.health.instances import neuron_instance
from pipeline.health.tools import check_efa, judge_efa, num_efa
from pipeline.health.verdict import Verdict

PASS, WARN, RETRY, FIX = Verdict.PASS, Verdict.WARN, Verdict.RETRY, Verdict.FIX
pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "count", "openable", "one_node", "gang"),
    [
        ("trn1.32xlarge", 8, 8, PASS, PASS),
        ("trn1.32xlarge", 7, 7, WARN, RETRY),
        ("trn1.32xlarge", 0, 0, WARN, FIX),
        ("trn1.32xlarge", 8, 0, WARN, FIX),
        ("trn1n.32xlarge", 16, 16, PASS, PASS),
        ("trn1n.32xlarge", 8, 8, WARN, RETRY),
        ("trn1.2xlarge", 0, 0, PASS, FIX),
        ("trn2.48xlarge", 16, 16, PASS, PASS),
        ("trn2.3xlarge", 1, 1, PASS, PASS),  # how many it has is not known
        ("trn2.3xlarge", 0, 0, PASS, FIX),
        ("trn9.48xlarge", 32, 32, PASS, PASS),
        ("", 0, 0, PASS, PASS),
    ],
)
def test_counts(name: str, count: int, openable: int, one_node: Verdict, gang: Verdict) -> None:
    instance = neuron_instance(name)
    assert judge_efa(count, openable, instance, num_nodes=1).verdict is one_node
    result = judge_efa(count, openable, instance, num_nodes=4)
    assert result.verdict is gang
    assert gang is PASS or (result.seen and result.expected and result.next_command)


def test_reading_them(tmp_path: Path) -> None:
    sysfs, dev = tmp_path / "infiniband", tmp_path / "dev"
    assert num_efa(sysfs) == 0
    for index in range(9):
        (sysfs / f"rdmap{index}s6" / "device").mkdir(parents=True)
        (dev / f"uverbs{index}").mkdir(parents=True)
        vendor = "0x15b3\n" if index == 8 else "0x1d0f\n"  # the last is of another make
        if index:
            (sysfs / f"rdmap{index}s6" / "device" / "vendor").write_text(vendor)
    assert num_efa(sysfs) == 8
    trn1 = neuron_instance("trn1.32xlarge")
    assert check_efa(trn1, num_nodes=2, infiniband=sysfs, dev=dev).verdict is PASS
    assert check_efa(trn1, num_nodes=2, infiniband=sysfs, dev=tmp_path / "none").verdict is FIX
    assert check_efa(None, num_nodes=1, infiniband=tmp_path / "none", dev=dev).seen.startswith("not a Neuron machine")
