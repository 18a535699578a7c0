"""`trnpipe mine`, and training with what it leaves: BM25 in the first cycle, the parent's vectors in the next."""

from pathlib import Path

import pytest

from pipeline.context import load_result
from pipeline.data.shards import text_hashes
from pipeline.data.token_sets import open_rows, read_token_sets
from pipeline.mine import run as mine_run
from pipeline.mine.run import NONE, ArrayParts, read_negatives
from pipeline.mine.store import Negatives, NegativeSet, find_negatives, open_negatives
from pipeline.parallel.world import ARRAY_INDEX
from tests.fault.harness import DATA, MODEL, TRAIN
from tests.stages.evaluate_case import Case
from tests.train.rows import every_row

pytestmark = [pytest.mark.stage, pytest.mark.timeout(300)]
FLAGS = (
    *DATA,
    *MODEL,
    *TRAIN,
    "--train.start=incumbent",
    "--backend=cpu",
    "--data.synthetic.num-days=2",
    "--train.max-steps=10",
    "--train.evaluate-every=0",
    "--gate.min-queries=2",
    "--gate.resamples=200",
    "--gate.drops=ndcg@10=0.9",
    "--evaluate.retrieval.enabled=false",
    "--evaluate.leak=off",
    "--mine.queries-per-part=16",
)
MINED = "--train.mined-per-query=3"


def mined(case: Case, cycle: str) -> tuple[NegativeSet, Negatives]:
    """What the cycle's result names. Judged pairs are checked to be left out."""
    result, prepared = load_result(case.storage, cycle, "mine"), load_result(case.storage, cycle, "prepare")
    assert result is not None and prepared is not None
    found = find_negatives(case.storage, result.outputs["negatives"])
    assert found is not None
    names = sorted(name for name in prepared.outputs if name.startswith("token_set_"))
    sets = read_token_sets(case.storage, [prepared.outputs[name] for name in names])
    rows = open_rows(case.storage, sets, "train", case.folder / "cache")
    negatives = open_negatives(case.storage, found, rows.sizes, case.folder / "cache")
    table = every_row(rows)
    text = text_hashes(table["product"], rows.pad_id)
    judged = set(zip(table["query_id"].tolist(), text.tolist(), strict=True))
    for query, row in zip(negatives.query_id.tolist(), negatives.product, strict=True):
        real = row[row != NONE]
        assert len(set(text[real].tolist())) == len(real)
        assert not judged & {(query, one) for one in text[real].tolist()}
    return found, negatives


def test_the_first_cycle_mines_by_bm25_and_the_next_by_the_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, capsys, FLAGS)
    case.run(stage="prepare")
    refused = case.run(MINED, stage="train", code=78)
    assert "none were mined for this cycle" in refused and "trnpipe mine" in refused
    said = case.run(stage="mine")
    assert "products, by BM25 | 0 of 6 parts done | worker 0 of 1" in said
    first, negatives = mined(case, "c1")
    assert first.info.source == "bm25" and len(negatives.query_id) == 92
    assert f"{first.info.figures['negatives']:,} negatives" in said
    assert "already done" in case.run(stage="mine")
    assert "and 3 mined negatives" in case.run(MINED, stage="train")
    assert "generation 1" in case.run(MINED)

    more = "--data.synthetic.num-days=3"
    case.run(more, stage="prepare", cycle="c2")
    said = case.run(more, stage="mine", cycle="c2")
    assert f"products, by vectors of {case.trained()} | 0 of 3 parts done" in said
    second, vectors = mined(case, "c2")
    assert case.pointer is not None and second.info.source == case.pointer.digest
    assert len(second.info.token_sets) == 3 and 0 < len(vectors.query_id) < 64  # those of the new day
    assert not set(vectors.query_id.tolist()) & set(negatives.query_id.tolist())
    assert not case.storage.list_dirs("cycles/c2/mine"), "the pieces are gone"
    case.run(more, MINED, stage="train", cycle="c2")
    everything = case.run(more, "--mine.partitions=all", stage="mine", cycle="c2")
    assert f"vectors of {case.trained()}" in everything
    _, every = mined(case, "c2")
    assert set(every.query_id.tolist()) > set(vectors.query_id.tolist())
    other = case.run(more, MINED, stage="train", cycle="c2", code=78)
    assert "different negatives" in other

    # The same by an array, each worker's share in a run of its own.
    case.storage.delete_prefix(second.prefix)
    for worker in (2, 0, 1):
        monkeypatch.setenv(ARRAY_INDEX, str(worker))
        said = case.run(more, "--mine.workers=3", stage="mine", cycle="c2")
        assert f"worker {worker} of 3" in said
    monkeypatch.delenv(ARRAY_INDEX)
    again, _ = mined(case, "c2")
    assert again.digest == second.digest

    # What another model ranks is another set; one that reads other tokens is refused.
    named = case.run(more, "--mine.source=bm25", stage="mine", cycle="c2")
    assert "by BM25" in named and mined(case, "c2")[0].prefix != second.prefix
    foreign = case.made("foreign", tokenizer_fingerprint="0" * 32)
    refused = case.run(more, f"--mine.source={foreign}", stage="mine", cycle="c2", code=78)
    assert "a model with the same tokenizer as the prepared data" in refused


def test_two_workers_that_are_last_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one commits, and deletes the parts, when this one has found all of them there."""
    case = Case(tmp_path, capsys, FLAGS)
    case.run(stage="prepare")
    said = []

    def too_late(parts: ArrayParts, most: int) -> object:
        monkeypatch.setattr(mine_run, "read_negatives", read_negatives)
        said.append(case.run(stage="mine"))
        return read_negatives(parts, most)

    monkeypatch.setattr(mine_run, "read_negatives", too_late)
    assert "100% of the slots" in case.run(stage="mine")
    assert "6 of 6 parts done" in said[0] and "100% of the slots" in said[0]
    mined(case, "c1")


def test_negatives_of_other_data_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path, capsys, FLAGS)
    case.run(stage="prepare")
    case.run(stage="mine")
    case.run("--data.synthetic.num-days=3", stage="prepare")
    refused = case.run("--data.synthetic.num-days=3", MINED, stage="train", code=65)
    assert "was mined from different data" in refused and "trnpipe mine" in refused


def test_a_query_without_room_for_negatives_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path, capsys, FLAGS)
    case.run(stage="prepare")
    said = case.run("--mine.relative-margin=1", stage="mine")
    assert "queries have no negative: lower mine.relative_margin" in said
    found, negatives = mined(case, "c1")
    assert found.info.figures["queries_without"] == int((negatives.product[:, 0] == NONE).sum()) > 0
