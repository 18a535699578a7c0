"""`trnpipe judge`: logs that are read and refused, and judgements that `trnpipe prepare` takes."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from pipeline.core.errors import ConfigError, DataError
from tests.kit import clicks
from tests.kit.s3 import MotoServer, lead_to

PROPENSITIES = np.array([1.0, 0.6, 0.4, 0.25])
RATES = np.array([0.6, 0.3, 0.1, 0.01])
QUERIES, SEARCHES = 60, 150
LABELS = np.array([3, 2, 0, 0])
"""The mean rate of a clicked pair is 0.46: 0.3 is two thirds of it, 0.1 less than one third."""


@pytest.fixture(scope="module")
def log() -> pa.Table:
    pairs = clicks.queries(QUERIES, len(RATES))
    return clicks.searches(pairs, np.tile(RATES, QUERIES), PROPENSITIES, SEARCHES)


def judge(path: Path, *words: str) -> int:
    return cli.main(["judge", str(path), "--out", str(path.parent / "out" / "judged.parquet"), *words])


def judged(path: Path) -> pa.Table:
    return pq.read_table(path.parent / "out" / "judged.parquet")


def written(table: pa.Table, path: Path) -> Path:
    pa_csv.write_csv(table, path) if path.suffix == ".csv" else pq.write_table(table, path, row_group_size=10_000)
    return path


@pytest.mark.parametrize("name", ["log.parquet", "log.csv"])
def test_a_log_becomes_judgements(log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = written(log, tmp_path / name)
    assert judge(path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"judge: {len(log):,} rows | {len(log):,} used"
    printed, errors = np.array([line.split()[3:] for line in lines[2:6]], dtype=float).T
    assert printed == pytest.approx(PROPENSITIES, abs=3 * errors.max()) and errors.max() < 0.03
    table = judged(path).sort_by([("product_id", "ascending")])
    assert len(table) == QUERIES * len(RATES) and f"{len(table):,} judged | 0 unjudged" in lines[6]
    number = np.array([int(product[1:]) for product in table["product_id"].to_pylist()])
    assert table["query"].to_pylist() == [f"query {each // len(RATES)}" for each in number]
    assert table["title"].to_pylist() == [f"title {each}" for each in number]
    assert table["impressions"].to_pylist() == [SEARCHES] * len(table)
    assert pc.sum(table["clicks"]).as_py() == pc.sum(log["clicked"]).as_py()
    rate = table["click_rate"].to_numpy()
    for kind, true in enumerate(RATES):
        assert rate[number % len(RATES) == kind].mean() == pytest.approx(true, rel=0.05, abs=0.01)
    labels = table["label"].to_numpy(zero_copy_only=False).astype(int)
    assert (np.abs(labels - LABELS[number % len(RATES)]) <= 1).all()
    assert (labels == LABELS[number % len(RATES)]).mean() > 0.85


@pytest.mark.stage
def test_prepare_takes_the_output_of_the_printed_command(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(log, tmp_path / "log.parquet")
    assert judge(path) == 0
    program, *words = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ").split()
    space = tmp_path / "workspace"
    flags = [f"--workspace={space}", "--cycle=c1", "--data.tokenizer.vocab-size=300", "--data.num-workers=1"]
    assert (program, cli.main([*words, *flags])) == ("trnpipe", 0)
    result = json.loads((space / "cycles" / "c1" / "prepare" / "result.json").read_text())
    assert result["figures"]["rows"] == QUERIES * len(RATES) and result["figures"]["rows_bad"] == 0
    assert "labels 0 < 1 < 2 < 3" in capsys.readouterr().out


def test_columns_and_labels_of_the_settings_are_those_of_the_output(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["search", "sku", "name", "rank", "hit"]
    path = written(log.rename_columns(names), tmp_path / "log.parquet")
    flags = ["--data.columns.query=search", "--data.columns.title=name", "--data.columns.product-id=sku"]
    assert judge(path, *flags, "--position", "rank", "--clicked", "hit", "--data.labels=bad,good") == 0
    table = judged(path)
    assert capsys.readouterr().out.endswith(f"--data.labels bad,good {' '.join(flags).replace('=', ' ')}\n")
    assert {"search", "sku", "name", "label"} <= set(table.column_names)
    assert set(table["label"].to_pylist()) == {"bad", "good"}


def test_a_log_on_s3_becomes_judgements_on_s3(log: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(log.slice(0, 12_000), tmp_path / "log.parquet")
    assert judge(path) == 0
    with MotoServer("shop") as server:
        server.client.upload_file(str(path), "shop", "clicks/log.parquet")
        lead_to(server.url, monkeypatch)
        assert cli.main(["judge", "s3://shop/clicks", "--out", "s3://shop/judged/dt=2026-11-20/clicks.parquet"]) == 0
        body = server.client.get_object(Bucket="shop", Key="judged/dt=2026-11-20/clicks.parquet")["Body"].read()
    assert body == (tmp_path / "out" / "judged.parquet").read_bytes()


def test_pairs_with_few_impressions_stay_unjudged(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rare = log.slice(0, 4).set_column(0, "query", pa.array(["rare"] * 4))
    path = written(pa.concat_tables([log, rare]), tmp_path / "log.parquet")
    assert judge(path) == 0
    assert "4 unjudged" in capsys.readouterr().out
    assert "rare" not in judged(path)["query"].to_pylist()
    assert judge(path, "--max-width", "100") == 0
    assert judged(path)["query"].to_pylist().count("rare") == 4


def ubi(log: pa.Table) -> list[dict[str, object]]:
    """Return a log as UBI events (https://docs.opensearch.org/latest/search-plugins/ubi/schemas/), flattened."""
    rows = log.to_pylist()
    events = [("impression", number, row) for number, row in enumerate(rows)]
    events += [("click", number, row) for number, row in enumerate(rows) if row["clicked"]]
    return [
        {
            "action_name": action,
            "query_id": f"search-{number // len(RATES)}",
            "user_query": row["query"],
            "event_attributes.object.object_id": row["product_id"],
            "event_attributes.position.ordinal": row["position"],
        }
        for action, number, row in events
    ]


def test_ubi_events_and_a_catalogue_give_the_same_judgements(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(log, tmp_path / "log.parquet")
    assert judge(path) == 0
    expected = judged(path)
    events = ubi(log)
    first_click = next(event for event in events if event["action_name"] == "click")
    other = [
        first_click,  # clicked again
        {**first_click, "query_id": "never searched", "event_attributes.position.ordinal": 4, "user_query": "new"},
        {"action_name": "add_to_cart", "query_id": "search-1"},
    ]
    path = tmp_path / "ubi_events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in [*events, *other]))
    products = tmp_path / "products.csv"
    rows = [f"p{each},title {each},text {each}" for each in range(QUERIES * len(RATES))]
    products.write_text("\n".join(["sku,title,text", *rows, "p-other,no one searched for this,\n"]))
    capsys.readouterr()
    assert judge(path, "--products", str(products), "--embed.catalogue.id=sku") == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"judge: {len(events) + 3:,} rows | {len(events):,} used, ")
    last = len(events)
    for reason in (f"repeated click in the same search (first: {path.as_uri()}, line {last + 1})",
                   "1 click without an impression", "1 action other than impression and click"):  # fmt: skip
        assert reason in line
    table = judged(path)
    assert table["text"].to_pylist() == [f"text {product[1:]}" for product in table["product_id"].to_pylist()]
    assert table.select(expected.column_names).sort_by("product_id") == expected.sort_by("product_id")


def test_columns_of_ubi_events_may_have_other_names(log: pa.Table, tmp_path: Path) -> None:
    names = {"event_attributes.object.object_id": "object_id", "event_attributes.position.ordinal": "rank"}
    path, other = tmp_path / "ubi_events.jsonl", tmp_path / "other.jsonl"
    events = [{**event, "title": "title"} for event in ubi(log.slice(0, 4000))]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    renamed = [{names.get(name, name): value for name, value in event.items()} for event in events]
    other.write_text("".join(json.dumps(event) + "\n" for event in renamed))
    assert judge(path) == 0
    expected = judged(path)
    assert judge(other, "--data.columns.product_id=object_id", "--position=rank") == 0
    assert judged(other).drop_columns(["object_id"]).num_rows == expected.num_rows
    assert judged(other)["object_id"].to_pylist() == expected["product_id"].to_pylist()


def test_a_product_has_the_first_title_that_is_not_blank(log: pa.Table, tmp_path: Path) -> None:
    blank = pa.array(["" if row == 0 else title for row, title in enumerate(log["title"].to_pylist())])
    path = written(log.set_column(log.column_names.index("title"), "title", blank), tmp_path / "log.parquet")
    assert judge(path) == 0
    assert len(judged(path)) == QUERIES * len(RATES)


def test_products_that_the_catalogue_does_not_have_are_counted(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    products = tmp_path / "products.csv"
    products.write_text("product_id,title\np0,title 0\np1,\n")
    path = written(log.drop_columns(["title"]), tmp_path / "log.parquet")
    assert judge(path, "--products", str(products)) == 0
    assert f"and {len(RATES) * QUERIES - 1:,} because their product has no title" in capsys.readouterr().out
    assert judged(path)["product_id"].to_pylist() == ["p0"]
    products.write_text("product_id,title\nP0,title 0\n")
    assert judge(path, "--products", str(products)) == DataError.exit_code


def test_titles_identify_products_without_an_id_and_case_is_ignored(log: pa.Table, tmp_path: Path) -> None:
    half = len(log) // 2
    upper = pc.utf8_upper(log["title"].slice(half)).chunks
    table = log.drop_columns(["product_id"]).set_column(
        1, "title", pa.chunked_array([*log["title"].slice(0, half).chunks, *upper])
    )
    path = written(table, tmp_path / "log.parquet")
    assert judge(path) == 0
    assert len(judged(path)) == QUERIES * len(RATES)
    assert judged(path)["impressions"].to_pylist() == [SEARCHES] * QUERIES * len(RATES)


BAD_ROWS = {
    " ,p1,title,1,1": "empty query",
    "q,,title,1,1": "empty product id",
    "q,p1,title,0,1": "position is not a whole number from 1",
    "q,p1,title,1.5,1": "position is not a whole number from 1",
    "q,p1,title,,1": "position is not a whole number from 1",
    "q,p1,title,1,2": "clicked is neither 0 nor 1",
    "q,p1,title,1,": "clicked is neither 0 nor 1",
    "q,p1,title": "malformed row",
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.items())
def test_a_bad_row_is_named_and_left_out(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, reason: str
) -> None:
    log = log.slice(0, 6000)
    path = written(log, tmp_path / "log.csv")
    path.write_text(path.read_text() + row + "\n")
    assert judge(path) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"judge: {len(log) + 1:,} rows | {len(log):,} used, 1 {reason}")
    assert f"(first: {path.as_uri()}, line {len(log) + 2})" in line
    assert judge(path, "--data.max-bad-fraction=0") == DataError.exit_code
    error = capsys.readouterr().err
    assert f"1 of {len(log) + 1:,} rows are bad, 1 {reason}" in error and error.count("next: ") == 1


def test_a_file_without_a_good_row_is_read(log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").mkdir()
    written(log.slice(0, 6000), tmp_path / "log" / "a.csv")
    (tmp_path / "log" / "b.csv").write_text("query,product_id,title,position,clicked\n\na,b\n")
    assert judge(tmp_path / "log") == 0
    assert "6,000 used, 1 malformed row" in capsys.readouterr().out


def test_rows_that_are_not_used_are_named_before_the_log_is_refused(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    position = "event_attributes.position.ordinal"
    events = [event | ({position: None} if event["action_name"] == "click" else {}) for event in ubi(log)]
    path = tmp_path / "ubi_events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    products = ("--products", str(written(log, tmp_path / "log.parquet")), "--embed.catalogue.id=product_id")
    assert judge(path, *products, "--data.max-bad-fraction=0.9") == DataError.exit_code
    captured = capsys.readouterr()
    assert "judge: not used: " in captured.out and "position is not a whole number from 1 (first: " in captured.out
    assert "from 0 clicks" in captured.err


def test_a_text_may_be_the_title(log: pa.Table, tmp_path: Path) -> None:
    path = written(log, tmp_path / "log.parquet")
    products = ("--products", str(path), "--embed.catalogue.id=product_id")
    assert judge(path, *products, "--data.columns.text=title") == 0
    assert all(judged(path)["title"].to_pylist())


def test_a_log_that_cannot_be_judged_is_refused_with_one_error(
    log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, log = log, log.slice(0, 6000)
    nothing = pa.array(np.zeros(len(log), dtype=np.int8))
    first = pa.array(np.ones(len(log), dtype=np.int8))
    refused = {
        "'clicked' (for clicked)": log.drop_columns(["clicked"]),
        "'position' (for position)": log.drop_columns(["position"]),
        "'query' (for query)": log.drop_columns(["query"]),
        "'title' (for title)": log.drop_columns(["title"]),
        "from 0 clicks": log.set_column(4, "clicked", nothing),
        "at 1 position(s)": log.set_column(3, "position", first),
        "rows are bad": log.set_column(3, "position", nothing),
        "0 of 0 rows": log.slice(0, 0),
        "different positions": whole.set_column(3, "position", pa.array(np.arange(1, len(whole) + 1))),
    }
    for seen, table in refused.items():
        assert judge(written(table, tmp_path / "log.parquet")) == DataError.exit_code
        error = capsys.readouterr().err
        assert seen in error and error.count("expected: ") == error.count("next: ") == 1, error
        assert not (tmp_path / "out" / "judged.parquet").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--out", "judged.csv"], ConfigError),
        (["--max-width", "0"], ConfigError),
        (["--max-width", "wide"], ConfigError),
        (["--products", "none.csv"], DataError),
    ],
)
def test_a_wrong_option_is_refused(
    log: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: type[ConfigError]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert judge(written(log.drop_columns(["title"]), tmp_path / "log.parquet"), *words) == error.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["log.parquet"]


def test_many_merges_give_the_same_counts(log: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(log, tmp_path / "log.parquet")
    assert judge(path) == 0
    expected = judged(path)
    monkeypatch.setattr("pipeline.data.impressions._MERGE_ROWS", 10)
    monkeypatch.setattr("pipeline.data.impressions._BATCH_ROWS", 500)
    assert judge(path) == 0
    assert judged(path) == expected
