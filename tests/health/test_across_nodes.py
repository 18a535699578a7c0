"""nccom-test over the nodes of a job: who is asked, and what is made of it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.core.stop import StopSignal
from pipeline.health.across_nodes import across_check, address_check, addresses
from pipeline.health.check import run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.instances import NeuronInstance
from pipeline.health.verdict import CheckResult, NodeReport, Verdict
from tests.health.fake_tools import fake_tool

TRN1 = NeuronInstance("trn1.32xlarge", bus_gib_s=39.0)
TABLE = """size(B) count(elems) type time(us) algbw(GB/s) busbw(GB/s)
8 2 fp32 520 0.00 0.00
8192 2048 fp32 881 0.00 0.00
8388608 2097152 fp32 1312 2.37 4.73
134217728 33554432 fp32 6279 19.91 {busbw}
"""


def reported(rank: int, address: str) -> NodeReport:
    check = address_check(lambda: address)
    return run_checks([check], HealthConfig(), node_rank=rank, host="h", stop=StopSignal())


def found(env: Mapping[str, str], **values: object) -> tuple[CheckResult, ...]:
    reports = [reported(1, "10.0.0.8"), reported(0, "10.0.0.7")]
    config = HealthConfig.model_validate(values)
    check = across_check(TRN1, config, reports, processes=32, env=env)
    return run_checks([check], config, node_rank=0, host="h", stop=StopSignal()).results


@pytest.mark.unit
def test_the_main_node_comes_first() -> None:
    assert addresses([reported(1, "b"), reported(0, "a")]) == ("a", "b")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("busbw", "least_gb_s", "verdict"), [(39.19, 0, Verdict.PASS), (12.0, 0, Verdict.WARN), (12.0, 20, Verdict.RETRY)]
)
def test_right_and_fast(tmp_path: Path, busbw: float, least_gb_s: float, verdict: Verdict) -> None:
    (tmp_path / "table").write_text(TABLE.format(busbw=busbw))
    fake_tool(tmp_path, "mpirun", "exit 0")
    fake_tool(tmp_path, "nccom-test", f'echo "$NEURON_RT_ROOT_COMM_ID $*" >> {tmp_path}/asked; cat {tmp_path}/table')
    right, fast = found({"PATH": f"{tmp_path}:/usr/bin:/bin"}, min_bus_gb_s=least_gb_s)
    assert (right.name, right.verdict) == ("nccom-test across nodes", Verdict.PASS)
    assert (fast.name, fast.verdict) == ("nccom-test across nodes bandwidth", verdict)
    checked, measured = (tmp_path / "asked").read_text().splitlines()
    everywhere = "10.0.0.7:45654 all_reduce -r 64 -N 2 --hosts 10.0.0.7 10.0.0.8"
    assert checked.startswith(f"{everywhere} -b 8 -e 8388608 -f 1024 ")
    assert "--check --report-to-json-file" in checked and checked.endswith("--non-interactive")
    assert measured.startswith(f"{everywhere} -b 134217728 -e 134217728 ") and "--check" not in measured


@pytest.mark.unit
@pytest.mark.parametrize(
    ("mpirun", "says", "verdict", "seen"),
    [
        (False, "", Verdict.FIX, "mpirun is not installed"),
        (True, "ssh: a@10.0.0.8: Permission denied (publickey).", Verdict.FIX, "Permission denied"),
        (True, "1 errors found - test failed", Verdict.RETRY, "1 errors found"),
        (True, "", Verdict.RETRY, "no result for 3 sizes"),
    ],
)
def test_what_is_missing(tmp_path: Path, mpirun: bool, says: str, verdict: Verdict, seen: str) -> None:
    if mpirun:
        fake_tool(tmp_path, "mpirun", "exit 0")
    fake_tool(tmp_path, "nccom-test", f"echo '{says}' >&2; exit 1")
    (result,) = found({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert result.verdict is verdict and seen in result.seen
    assert result.expected and result.next_command
