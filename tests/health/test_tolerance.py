"""Errors beyond a tolerance: one core's own are a defect, those of all cores are not."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.check import CheckResult, NodeReport, Verdict, gang_error
from pipeline.health.config import HealthConfig, OperationName
from pipeline.health.device import OPERATIONS, check_operations
from pipeline.health.nodes import beyond_tolerance, results_of, with_shared_errors, write_rank_report
from pipeline.settings import resolve
from tests.health.test_device import Faulty

WARN, RETRY, FIX = Verdict.WARN, Verdict.RETRY, Verdict.FIX
SOUND = CheckResult("operations", Verdict.PASS, figures={"softmax_error": 1e-6})
BURN = CheckResult("burn", Verdict.PASS)


def beyond(**errors: float) -> CheckResult:
    return beyond_tolerance(errors, dict.fromkeys(errors, 1e-4))


def judged(folder: Path, *ranks: CheckResult, per_node: int = 2) -> tuple[NodeReport, ...]:
    """What the nodes make of it, as the stage does: each reads the reports of its ranks, then all are compared."""
    reports = []
    for first in range(0, len(ranks), per_node):
        node = folder / str(first)
        node.mkdir()
        numbers = range(first, first + per_node)
        for rank in numbers:
            write_rank_report(node, NodeReport(rank, f"rank {rank}", (ranks[rank], BURN)), is_finished=True)
        reports.append(NodeReport(first // per_node, "h", results_of(node, numbers)))
    return with_shared_errors(reports, len(ranks))


def test_the_same_error_on_all_ranks_is_a_tolerance(tmp_path: Path) -> None:
    both = beyond(softmax=2.1e-3, gelu=4e-3)
    first, second = judged(tmp_path, *[both] * 4)
    for report in (first, second):
        (result, burn) = report.results
        assert (result.verdict, burn.name) == (WARN, "burn")
        assert result.seen == (
            "softmax: relative error 0.0021; gelu: relative error 0.004; the same on all 4 ranks: "
            "a tolerance, not a defect"
        )
        assert result.next_command.startswith("--health.tolerances 'softmax=0.004,gelu=0.008'")
    assert gang_error([first, second]) is None


@pytest.mark.parametrize(
    "ranks",
    [
        [beyond(softmax=2e-3), beyond(softmax=2e-3), beyond(softmax=2e-3), beyond(softmax=2.1e-3)],
        [beyond(softmax=2e-3), beyond(softmax=2e-3), beyond(softmax=2e-3), beyond(softmax=2e-3, gelu=2e-3)],
        [beyond(softmax=2e-3), beyond(softmax=2e-3), beyond(softmax=2e-3), SOUND],
        [CheckResult("operations", RETRY, "gelu: a value that is not finite")] * 4,
    ],
    ids=["another figure", "another operation", "one sound rank", "not finite"],
)
def test_anything_else_is_a_defect(tmp_path: Path, ranks: list[CheckResult]) -> None:
    assert isinstance(gang_error(judged(tmp_path, *ranks)), TransientError)


def test_one_rank_cannot_tell_and_says_how_to_go_on(tmp_path: Path) -> None:
    (report,) = judged(tmp_path, beyond(softmax=2e-3), per_node=1)
    assert report.verdict is RETRY
    assert "--health.tolerances 'softmax=0.004'" in report.results[0].next_command


def test_what_no_rounding_explains_is_wrong_on_every_machine(tmp_path: Path) -> None:
    (report,) = judged(tmp_path, beyond(softmax=0.7), beyond(softmax=0.7))
    assert isinstance(gang_error([report]), ConfigError)


def test_every_operation_is_looked_at_whatever_the_first_says() -> None:
    """A core that rounds to eight bits of mantissa is far from fp32, and within what bf16 allows."""
    coarse = Faulty(lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype))
    result = check_operations(coarse, seed=3, repeats=2, stop=StopSignal())
    told = str(result.figures["beyond_tolerance"]).split(", ")
    assert result.verdict is RETRY and told[0] == "matmul fp32" and told[-1] == "optimizer step"
    assert "matmul bf16" not in told and len(result.figures) == len(OPERATIONS) + 1
    again = check_operations(coarse, seed=3, repeats=2, stop=StopSignal())
    assert again == result, "equal inputs, equal cores, equal figures"


def test_tolerances_are_a_setting() -> None:
    text = ",".join(f"{name}=0.05" for name in get_args(OperationName))
    config = resolve([], {}, [("--health.tolerances", text)]).settings.health
    coarse = Faulty(lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype))
    result = check_operations(coarse, seed=3, repeats=2, stop=StopSignal(), tolerances=config.tolerances)
    assert result.verdict is Verdict.PASS, result
    assert {operation.name for operation in OPERATIONS} == set(get_args(OperationName))
    with pytest.raises(ConfigError, match="sofmax"):
        resolve([], {}, [("--health.tolerances", "sofmax=0.1")])
    with pytest.raises(ValueError, match=r"tolerances"):
        HealthConfig.model_validate({"tolerances": {"softmax": 0.0}})


def test_products_are_made_in_full_precision_whatever_the_process_asks_for() -> None:
    seen: set[str] = set()

    class Recording(CpuBackend):
        def step_boundary(self, computed: object) -> None:
            seen.add(torch.get_float32_matmul_precision())

    torch.set_float32_matmul_precision("high")
    try:
        check_operations(Recording(), seed=1, repeats=1, stop=StopSignal())
        assert (seen, torch.get_float32_matmul_precision()) == ({"highest"}, "high")
    finally:
        torch.set_float32_matmul_precision("highest")
