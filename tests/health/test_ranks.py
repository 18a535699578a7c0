"""What a node makes of its ranks' reports."""

from pathlib import Path

import pytest

from pipeline.core.errors import Preempted, TransientError
from pipeline.core.health import CheckResult, NodeReport, Verdict, gang_error
from pipeline.core.stop import StopSignal
from pipeline.health.config import HealthConfig
from pipeline.health.ranks import RankChecks, report_rank, results_of, with_slow_ranks
from pipeline.health.report import to_json
from pipeline.parallel.world import World

QUICK = HealthConfig(burn_s=0.2, sweep_mib=64)


def leave(folder: Path, rank: int, *results: CheckResult) -> None:
    (folder / f"rank-{rank}.json").write_text(to_json(NodeReport(rank, f"rank {rank}", results)))


def burned(seconds: float) -> CheckResult:
    return CheckResult("burn", Verdict.PASS, figures={"fastest_round_s": seconds})


def test_a_sound_rank_reports_every_check_and_the_node_sums_up(tmp_path: Path) -> None:
    for rank in range(2):
        checks = RankChecks("cpu", World(), QUICK, {}, seed=1)
        report = report_rank(checks, tmp_path, StopSignal())
        assert [result.name for result in report.results] == ["device", "operations", "device memory", "burn"]
        (tmp_path / "rank-0.json").rename(tmp_path / f"kept-{rank}.json")
    for rank in range(2):
        (tmp_path / f"kept-{rank}.json").rename(tmp_path / f"rank-{rank}.json")
    merged = results_of(tmp_path, range(2))
    assert {result.verdict for result in merged} == {Verdict.PASS}
    assert merged[0].seen == "2 x cpu"
    assert {"rank_0_fastest_round_s", "rank_1_fastest_round_s"} <= merged[3].figures.keys()


def test_a_rank_that_failed_is_told_apart_and_one_without_a_word_is_named(tmp_path: Path) -> None:
    leave(tmp_path, 4, burned(1.0))
    leave(tmp_path, 5, CheckResult("operations", Verdict.RETRY, "matmul fp32: relative error 0.5"))
    (tmp_path / "rank-6.json").write_text('{"half')
    leave(tmp_path, 7, burned(1.0))
    (tmp_path / "rank-7.json").rename(tmp_path / "rank-7-so-far.json")
    merged = {result.name: result for result in results_of(tmp_path, range(4, 7))}
    assert merged["ranks"].seen == "rank 6 of this node ended without a word"
    (late, *_) = results_of(tmp_path, [7])
    assert late.seen == "rank 7 of this node ended without a word after check burn"
    assert merged["operations"].seen == "rank 5: matmul fp32: relative error 0.5"
    assert merged["burn"].verdict is Verdict.PASS


@pytest.mark.parametrize(("shared", "verdict"), [(0, Verdict.RETRY), (1, Verdict.WARN)])
def test_a_slow_core_is_named_among_all_nodes(tmp_path: Path, shared: int, verdict: Verdict) -> None:
    reports = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        for rank in (2 * node, 2 * node + 1):
            device = CheckResult("device", Verdict.PASS, "xla:NEURON", figures={"shares_host_cpu": shared})
            leave(folder, rank, device, burned(5.0 if rank == 3 else 1.0))
        reports.append(NodeReport(node, f"host-{node}", results_of(folder, (2 * node, 2 * node + 1))))
    first, second = with_slow_ranks(reports, ratio=1.5)
    assert first.verdict is Verdict.PASS
    assert second.results[-1].verdict is verdict
    assert second.results[-1].seen.startswith("rank 3 takes 5.0 times as long")
    assert isinstance(gang_error([first, second]), TransientError if verdict is Verdict.RETRY else type(None))


def test_a_rank_that_is_stopped_leaves_what_it_has(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted):
        report_rank(RankChecks("cpu", World(), QUICK, {}, seed=1), tmp_path, stop)
    assert results_of(tmp_path, [0]) == ()


def test_a_backend_that_cannot_be_opened_is_a_verdict(tmp_path: Path) -> None:
    report = report_rank(RankChecks("cuda", World(), QUICK, {}, seed=1), tmp_path, StopSignal())
    assert report.verdict is Verdict.FIX
    assert "no CUDA device" in report.results[0].seen
