"""What a node makes of its ranks' reports."""

from pathlib import Path

import pytest

from pipeline.core.errors import TransientError
from pipeline.health.check import CheckResult, NodeReport, Verdict, gang_error
from pipeline.health.nodes import results_of, with_slow_ranks, write_rank_report


def report(folder: Path, rank: int, *results: CheckResult, is_finished: bool = True) -> None:
    write_rank_report(folder, NodeReport(rank, f"rank {rank}", results), is_finished=is_finished)


def burned(seconds: float) -> CheckResult:
    return CheckResult("burn", Verdict.PASS, figures={"fastest_round_s": seconds})


def test_a_rank_that_failed_is_told_apart_and_one_without_a_word_is_named(tmp_path: Path) -> None:
    report(tmp_path, 4, burned(1.0))
    report(tmp_path, 5, CheckResult("operations", Verdict.RETRY, "matmul fp32: relative error 0.5"))
    (tmp_path / "rank-6.json").write_text('{"half')
    report(tmp_path, 7, burned(1.0), is_finished=False)
    merged = {result.name: result for result in results_of(tmp_path, range(4, 7))}
    assert merged["ranks"].seen == "rank 6 of this node ended without a word"
    late, before = results_of(tmp_path, [7])
    assert late.seen == "rank 7 of this node ended without a word after check burn"
    assert before.name == "burn", "what it did before is told, too"
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
            report(folder, rank, device, burned(5.0 if rank == 3 else 1.0))
        reports.append(NodeReport(node, f"host-{node}", results_of(folder, (2 * node, 2 * node + 1))))
    first, second = with_slow_ranks(reports, ratio=1.5)
    assert first.verdict is Verdict.PASS
    assert second.results[-1].verdict is verdict
    assert second.results[-1].seen.startswith("rank 3 takes 5.0 times as long")
    assert isinstance(gang_error([first, second]), TransientError if verdict is Verdict.RETRY else type(None))


def test_what_one_rank_alone_tells_is_not_counted(tmp_path: Path) -> None:
    report(tmp_path, 0, burned(1.0), CheckResult("address", Verdict.PASS, "10.0.0.7"))
    report(tmp_path, 1, burned(1.0))
    assert [result.seen for result in results_of(tmp_path, range(2))] == ["2 x right", "10.0.0.7"]


@pytest.mark.parametrize("text", [b"", b"\xff\x00", b"null", b"[" * 100_000, b'{"schema_version": 1}', b"9" * 10_000])
def test_rubbish_is_no_report(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "rank-0.json").write_bytes(text)
    (tmp_path / "rank-0-so-far.json").write_bytes(text)
    (result,) = results_of(tmp_path, [0])
    assert result.seen == "rank 0 of this node ended without a word"
