"""Evaluation as real processes: stopped, killed, and finished by other ranks."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.evaluate.report import load_report
from pipeline.evaluate.score import ScoreSet, load_scores
from pipeline.io.storage import Storage
from pipeline.registry.records import read_pointer
from tests.fault.harness import Place, TooLate, again_when_late
from tests.stages.evaluate_case import FLAGS

pytestmark = [pytest.mark.stage, pytest.mark.fault, pytest.mark.slow]

SLOW = ("--train.micro-batch-size=2", "--evaluate.retrieval.max-queries=20")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    flags = (*FLAGS, *SLOW)
    for stage in ("prepare", "train"):
        assert main([stage, *FLAGS, f"--workspace={tmp_path}/whole", "--cycle=c1"]) == 0
    (tmp_path / "sitecustomize.py").write_text("from pipeline.evaluate import models\nmodels.SAVE_EVERY_S = 0.001\n")
    seeded = {"PYTHONPATH": str(tmp_path)}
    here = Place(str(tmp_path / "workspace"), tmp_path, flags, env=seeded, forked=False)
    yield here
    here.close()


def parts(storage: Storage) -> int:
    """Committed parts."""
    return sum("/done/" in stat.key for stat in storage.list("cycles/c1/evaluate/parts/"))


def scores_in(place: Place) -> ScoreSet:
    report = load_report(place.storage, "c1")
    assert report is not None
    return load_scores(place.storage, report.candidate.scores, place.folder / "cache")


@again_when_late
def test_stopped_and_killed_it_goes_on_with_other_ranks(place: Place) -> None:
    whole = place.folder / "whole"
    for left in (place.path, place.scratch):  # by an attempt that was too late
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(whole, place.path)

    run = place.start("evaluate")
    run.reach(lambda: parts(place.storage) > 1)
    assert run.terminate() == 143, run.err
    if "stopped by SIGTERM while scoring a holdout" not in run.err:
        raise TooLate(run.err)
    stopped_at = parts(place.storage)

    run = place.start("evaluate")
    run.reach(lambda: parts(place.storage) > stopped_at)
    run.kill()
    run.assert_not_late()
    assert read_pointer(place.storage, "relevance") is None

    refused, _ = place.run_ranks("evaluate", 2, "--gate.floors=accuracy=1.0", code=80)
    assert "2 x cpu" in refused.out and "is not promoted" in refused.err
    assert not parts(place.storage)
    assert main(["evaluate", *FLAGS, *SLOW, f"--workspace={place.path}", "--cycle=c1"]) == 0
    assert read_pointer(place.storage, "relevance") is not None

    alone = Place(str(whole), place.folder / "alone", place.flags)
    assert main(["evaluate", *FLAGS, f"--workspace={whole}", "--cycle=c1"]) == 0
    seen, expected = scores_in(place), scores_in(alone)
    np.testing.assert_array_equal(seen.arrays["sample_id"], expected.arrays["sample_id"])
    np.testing.assert_array_equal(seen.arrays["query_id"], expected.arrays["query_id"])
    np.testing.assert_allclose(seen.arrays["logits"], expected.arrays["logits"], atol=1e-5)
