"""Baselines in the evaluate stage: scored once for the same data, reported beside the models, known to the gate."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.evaluate import baselines as work
from pipeline.evaluate import score
from pipeline.evaluate.report import BaselineReport
from pipeline.io.commit import commit_dir
from tests.stages.evaluate_case import FLAGS, Case, last_wins, noisy

pytestmark = pytest.mark.stage

OFF = "--no-evaluate.baselines.boosting"
ON = (*(flag for flag in FLAGS if flag != OFF), "--gate.first-baselines=refuse", "--data.valid-fraction=0.2")
WARN = "--gate.first-baselines=warn"


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    """A workspace in which cycle c1 is prepared and trained."""
    folder = Path(mkdtemp(prefix="trnpipe-baselines-"))
    for stage in ("prepare", "train"):
        assert main([stage, *last_wins((*ON, f"--workspace={folder}/workspace", "--cycle=c1"))]) == 0
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def case(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    shutil.copytree(trained / "workspace", tmp_path / "workspace")
    capsys.readouterr()
    return Case(tmp_path, capsys, ON)


def kept(case: Case) -> list[str]:
    return sorted(name.partition("-")[0] for name in case.storage.list_dirs("baselines/tiny/"))


def baselines(case: Case, cycle: str = "c1") -> dict[str, BaselineReport]:
    return {one.name: one for one in case.report(cycle).baselines}


def forbid_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(work, "lexical_search", lambda *args: pytest.fail("searched again"))
    patch.setattr(work, "fit", lambda *args: pytest.fail("fitted again"))


def test_a_first_model_worse_than_the_baselines_is_refused_with_a_sentence(case: Case) -> None:
    bad = case.made("bad", noisy(1.0))
    told = case.run(f"--evaluate.candidate={bad}", code=80)
    assert "is not promoted: " in told and "and is not beaten by a baseline" in told
    assert case.pointer is None and case.history == [("refused", bad)]
    reasons = case.report().verdict.reasons
    assert any(reason.startswith("BM25 is better on retrieval_ndcg@10: 0.") for reason in reasons), reasons
    assert any(reason.startswith("boosting is better on macro_f1: 0.") for reason in reasons), reasons
    assert "generation 1" in case.run(f"--evaluate.candidate={bad}", WARN)
    later = case.run()
    assert "warn" in later and "retrieval_ndcg@10" in later


def test_ranks_that_the_gate_names_are_judged_whatever_is_reported(case: Case) -> None:
    flags = (f"--evaluate.candidate={case.made('bad', noisy(1.0))}", OFF, "--evaluate.metrics.retrieval-at=1,5")
    floors = "--gate.floors=retrieval_recall@20=0.99"
    assert "BM25 is better on retrieval_ndcg@10: 0." in case.run(*flags, code=80)
    assert "retrieval_recall@20: 0." in case.run(*flags, WARN, floors, code=80)
    off = ("--gate.first-baselines=off", "--gate.baselines=off", "--gate.first-without-comparison")
    case.run(*flags, *off, "--no-evaluate.promote")
    found = case.report().candidate.retrieval
    assert found is not None and "retrieval_ndcg@10" not in found.values, "nothing judges it"


def test_figures_of_baselines_and_hybrids_stand_beside_the_models(case: Case) -> None:
    told = case.run(WARN)
    report, found = case.report(), baselines(case)
    bm25, boosted = found["bm25"], found["boosting"]
    assert report.candidate.retrieval is not None and bm25.retrieval is not None and boosted.metrics is not None
    assert bm25.retrieval.values.keys() == report.candidate.retrieval.values.keys()
    assert bm25.retrieval.num_queries == report.holdout.retrieval_queries
    assert boosted.metrics.values.keys() == report.candidate.metrics.values.keys()
    assert boosted.metrics.values["accuracy"] > 0.55, "it knows the words that both sides share"
    assert boosted.metrics.num_rows == report.holdout.rows
    ranked, weighted = report.candidate.hybrids
    assert ranked.retrieval is not None and weighted.retrieval is not None and weighted.weight is not None
    assert 0 <= weighted.weight <= 1 and weighted.valid_queries > 0
    assert ranked.retrieval.values.keys() == bm25.retrieval.values.keys()
    lines = told.splitlines()
    assert any(line.split()[:1] == ["metric"] and "bm25" in line and "boosting" in line for line in lines)
    assert "hybrid search: each model fused with BM25" in told
    result = case.result()
    assert result is not None
    assert result.figures["bm25_retrieval_ndcg@10"] == bm25.retrieval.values["retrieval_ndcg@10"]
    assert result.figures["boosting_macro_f1"] == boosted.metrics.values["macro_f1"]
    assert result.figures["hybrid_rrf_retrieval_mrr"] == ranked.retrieval.values["retrieval_mrr"]
    assert {"bm25", "boosting"} <= report.seconds.keys()


def test_they_are_scored_once_for_the_same_data(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.run(WARN)
    first = baselines(case)
    assert kept(case) == ["bm25", "boosting"]
    case.run(stage="prepare", cycle="c2")
    with monkeypatch.context() as patch:
        forbid_work(patch)
        case.run(f"--evaluate.candidate={case.made('other', noisy(0.01))}", "--no-evaluate.promote", cycle="c2")
    assert baselines(case, "c2") == first, "another candidate, in another cycle"
    case.run(WARN, "--evaluate.max-rows=300", f"--evaluate.candidate={case.made('third')}")
    assert kept(case) == ["bm25", "bm25", "boosting", "boosting"], "another holdout has its own"


@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_killed_while_they_are_saved_it_goes_on(case: Case, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The figures of models are saved before: 1 is BM25, 2 boosting."""
    calls = 0

    def killed(*args: Any, **kwargs: Any) -> object:
        nonlocal calls
        calls += args[2].startswith("baselines/")
        if args[2].startswith("baselines/") and calls == nth:
            # As a writer leaves it: no marker.
            shutil.copy(args[1] / score.ARRAYS_FILE, Path(args[0].local_path("")) / "half")
            raise KeyboardInterrupt
        return commit_dir(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(score, "commit_dir", killed)
        case.run(WARN, code=143)
    assert case.pointer is None and calls == nth and len(kept(case)) == nth - 1
    case.run(WARN)
    assert kept(case) == ["bm25", "boosting"] and case.pointer is not None


def test_they_can_be_switched_off(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        forbid_work(patch)
        none = ("--no-evaluate.baselines.bm25", OFF)
        told = case.run(*none, code=80)
        assert "nothing to compare with: no production model, no gate.floors, no baseline was scored" in told
        assert "--gate.first-without-comparison" in told and case.pointer is None
        told = case.run(*none, "--gate.first-without-comparison")
    assert "promoted WITHOUT a comparison, generation 1" in told
    result = case.result()
    assert result is not None and result.figures["without_comparison"] is True
    assert case.report().verdict.without_comparison
    assert any(reason.startswith("promoted WITHOUT a comparison") for reason in case.entries[-1].reasons)
    assert case.report().baselines == () and case.report().candidate.hybrids == () and "hybrid" not in told
    assert kept(case) == []
