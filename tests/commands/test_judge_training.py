"""A model that was trained on simulated clicks alone, compared with one that was trained on the true judgements."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from pipeline.core.arrays import Float64s
from pipeline.core.fingerprint import hash63
from pipeline.data.config import SyntheticConfig
from pipeline.data.synthetic import GRADES, generate, partitions
from pipeline.evaluate.metrics.ranking import discounts
from tests.docs.markdown import ROOT
from tests.kit.clicks import STANDARD, searches

QUERIES, IMPRESSIONS, TEST_FRACTION = 1500, 20, 0.2


def trained(data: Path, labels: str, *stages: str) -> Path:
    """Train on a file, run further stages, and return the workspace."""
    space = data.with_suffix("")
    flags = [f"--config={ROOT}/configs/quickstart.toml", "--backend=cpu", f"--workspace={space}", "--cycle=c1"]
    flags += [f"--data.path={data}", f"--data.labels={labels}", f"--data.test-fraction={TEST_FRACTION}"]
    for stage in ("prepare", "train", *stages):
        assert cli.main([stage, *flags]) == 0
    return space


def ndcg(space: Path, pairs: Path, gains: Float64s, capsys: pytest.CaptureFixture[str]) -> float:
    """Return the mean nDCG@10 of the scores of the trained model, with `gains` [queries, products]."""
    result = json.loads((space / "cycles" / "c1" / "train" / "result.json").read_text())
    flags = ["--backend=cpu", f"--workspace={space}", "--checkpoint", result["outputs"]["checkpoint"]]
    capsys.readouterr()
    assert cli.main(["score", str(pairs), *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    scores = np.array([row["gain"] for row in rows]).reshape(gains.shape)
    ranked = np.take_along_axis(gains, np.argsort(-scores, axis=1, kind="stable"), axis=1)[:, :10]
    best = -np.sort(-gains, axis=1)[:, :10]
    useful = best[:, 0] > 0
    return float(((ranked @ discounts(10))[useful] / (best @ discounts(10))[useful]).mean())


@pytest.mark.stage
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_training_on_clicks_is_nearly_as_good_as_on_the_true_judgements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SyntheticConfig(num_queries=QUERIES)
    truth = pa.Table.from_batches(generate(config, partitions(config)[0]))
    truth = truth.drop_columns(["query_id"])  # `judge` does not write it, and queries are split by it
    rates = np.array([STANDARD[label] for label in truth["label"].to_pylist()])
    propensities = 1.0 / np.arange(1.0, len(GRADES) + 1)
    pairs = truth.select(["query", "product_id", "title"])
    pq.write_table(searches(pairs, rates, propensities, IMPRESSIONS), tmp_path / "log.parquet")
    pq.write_table(truth.select(["query", "product_id", "title", "label", "gain"]), tmp_path / "truth.parquet")
    assert cli.main(["judge", str(tmp_path / "log.parquet"), "--out", str(tmp_path / "clicks.parquet")]) == 0
    hashes = np.array([hash63(f"split|{hash63(query.lower())}") / 2**63 for query in truth["query"].to_pylist()])
    test = truth.filter(pa.array(hashes < TEST_FRACTION))
    gains = test["gain"].to_numpy().reshape(-1, len(GRADES))
    pa_csv.write_csv(test.select(["query", "title"]), tmp_path / "test.csv")
    spaces = {
        "clicks": trained(tmp_path / "clicks.parquet", "0,1,2,3", "evaluate"),
        "truth": trained(tmp_path / "truth.parquet", "irrelevant,complement,substitute,exact"),
    }
    assert (spaces["clicks"] / "registry" / "quickstart" / "production.json").exists()
    found = {name: ndcg(space, tmp_path / "test.csv", gains, capsys) for name, space in spaces.items()}
    assert found["truth"] - 0.03 < found["clicks"]
