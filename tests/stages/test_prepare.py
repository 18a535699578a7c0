"""The prepare stage as a user runs it, on a small synthetic catalogue."""

import json
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.context import StageResult, load_result
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.io.storage import open_storage
from pipeline.parallel.world import ARRAY_INDEX
from pipeline.stages.prepare import UNSPLIT

pytestmark = pytest.mark.stage

SMALL = ["--data.synthetic.num-queries=40", "--data.tokenizer.vocab-size=400", "--data.num-workers=1"]


def prepare(workspace: Path, *words: str) -> int:
    return cli.main(["prepare", "--workspace", str(workspace), "--cycle", "c1", *SMALL, *words])


def stored(workspace: Path) -> StageResult:
    result = load_result(open_storage(str(workspace)), "c1", "prepare")
    assert result is not None
    return result


def event_names(workspace: Path) -> list[str]:
    lines = (workspace / "cycles/c1/events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def test_the_second_run_finds_the_first_and_other_settings_add_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path) == 0
    first = stored(tmp_path)
    assert "1 partition(s) prepared, 0 reused" in capsys.readouterr().out
    assert (first.figures["partitions_prepared"], first.figures["rows"]) == (1, 40 * 12)
    for prefix in first.outputs.values():
        assert (tmp_path / prefix / "MANIFEST.json").is_file()
    assert [name for name in event_names(tmp_path) if name.startswith("stage")] == ["stage_started", "stage_finished"]

    assert prepare(tmp_path, "--train.seed=5") == 0
    assert stored(tmp_path) == first
    assert "0 partition(s) prepared, 1 reused" in capsys.readouterr().out
    assert event_names(tmp_path)[-2:] == ["partition_reused", "stage_skipped"]

    assert prepare(tmp_path, "--data.lexical=false") == 0
    third = stored(tmp_path)
    assert third.inputs != first.inputs
    assert third.settings_hash != first.settings_hash
    assert event_names(tmp_path)[-1] == "stage_finished"


def test_data_and_models_of_earlier_versions_keep_their_buckets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = "--data.buckets=16x16,16x32,64x64"  # the default of earlier versions
    assert prepare(tmp_path, old) == 0
    first = stored(tmp_path)
    assert prepare(tmp_path) == 0
    assert stored(tmp_path).outputs == first.outputs and not (tmp_path / "tokens/catalogue/buckets.json").exists()
    assert capsys.readouterr().out.count("| buckets 16x16 16x32 64x64\n") == 2

    # A model that was trained on it continues on another dataset.
    (parent := tmp_path / "checkpoints/c1/step-1").mkdir(parents=True)
    (parent / "tokenizer.json").write_bytes((tmp_path / first.outputs["tokenizer"] / "tokenizer.json").read_bytes())
    start, other = "--train.start=checkpoints/c1/step-1", ("--data.name=other", "--cycle=c2")
    assert prepare(tmp_path, start, *other) == 0
    assert "| buckets 16x16 16x32 64x64\n" in capsys.readouterr().out
    assert prepare(tmp_path, "--data.name=third") == 0
    assert "64x64" not in capsys.readouterr().out
    assert json.loads((tmp_path / "tokens/third/buckets.json").read_text())["buckets"]


def test_a_split_that_cannot_tell_small_differences_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(tmp_path, "--gate.min-queries=2", "--data.test-fraction=0.3", "--data.valid-fraction=0.3") == 0
    figures, out = stored(tmp_path).figures, capsys.readouterr().out
    for split in ("valid", "test"):
        queries = int(str(figures[f"queries_{split}"]))
        said = f"split {split} has {queries:,} queries that count, but about 2,500 are needed"
        assert said in out and f"nDCG differences below {0.5 / queries**0.5:.2g}" in out


def test_a_mistake_in_the_golden_queries_stops_it_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "golden.toml").write_text("[[golden]]\nmust = ['a product']\n")
    assert prepare(tmp_path, f"--evaluate.golden={tmp_path}/golden.toml") == DataError.exit_code
    assert not (tmp_path / "tokens").exists()


def test_a_bucket_beyond_the_model_stops_it_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(tmp_path, "--data.buckets=16x1000") == ConfigError.exit_code
    assert not (tmp_path / "tokens").exists()
    assert "the longest bucket has 1000 tokens" in capsys.readouterr().err


def test_a_broken_incumbent_stops_it_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "registry/relevance").mkdir(parents=True)
    (tmp_path / "registry/relevance/production.json").write_text("{}")
    assert prepare(tmp_path) == CheckpointError.exit_code
    assert not (tmp_path / "tokens").exists()
    assert event_names(tmp_path)[-1] == "stage_failed"


def test_what_costs_quality_is_on_the_console_and_in_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path) == 0
    quiet = stored(tmp_path).figures
    queries = {split: quiet[f"queries_{split}"] for split in ("train", "valid", "test")}
    assert sum(int(str(number)) for number in queries.values()) == 40
    assert f"split test has {queries['test']} queries that count" in str(quiet["few_queries"])
    assert f"warning: prepare: {quiet['few_queries']}" in capsys.readouterr().out
    assert prepare(tmp_path, f"--gate.min-queries={queries['valid']}", "--evaluate.split=valid") == 0
    assert "few_queries" not in stored(tmp_path).figures, "enough of these"
    assert quiet["warnings"] == 0 and quiet["queries_without_positive"] == 0
    assert isinstance(quiet["queries_train"], int) and 0 < quiet["queries_train"] <= 40

    short = "--data.buckets=3x5"
    assert prepare(tmp_path, short) == 0
    figures = stored(tmp_path).figures
    text = f"{figures['rows_truncated']:,} of 480 rows (100%) have a text that is truncated to the largest bucket 3x5"
    assert figures["warnings"] == 1 and str(figures["warning_1"]).startswith(text)
    assert f"warning: prepare: {text}" in capsys.readouterr().out

    assert prepare(tmp_path, short, "--train.loss.positive-gain=0") == 0  # the same shards, judged otherwise
    again = stored(tmp_path).figures
    assert (again["queries_without_negative"], again["warnings"]) == (quiet["queries_train"], 2)


def test_a_parent_that_does_not_split_digits_where_the_settings_do_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path) == 0
    (parent := tmp_path / "parent").mkdir()
    tokenizer = tmp_path / stored(tmp_path).outputs["tokenizer"] / "tokenizer.json"
    (parent / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    split, start = "--data.tokenizer.split-digits=true", f"--train.start={parent}"
    assert prepare(tmp_path, split, start) == 0
    assert stored(tmp_path).figures["warning_1"] == UNSPLIT
    assert f"warning: prepare: {UNSPLIT}" in capsys.readouterr().out
    for quiet in ((split,), (start,), (split, start, f"--data.tokenizer.path={tokenizer}")):
        assert prepare(tmp_path, *quiet) == 0
        assert stored(tmp_path).figures["warnings"] == 0


def test_a_worker_without_a_partition_leaves_the_work_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ARRAY_INDEX, "1")
    assert prepare(tmp_path, "--data.workers=2") == 0
    assert "1 partition(s) have not been prepared by other workers yet" in capsys.readouterr().out
    monkeypatch.setenv(ARRAY_INDEX, "0")
    assert prepare(tmp_path, "--data.workers=2") == 0
    assert stored(tmp_path).figures["rows"] == 40 * 12


def test_an_input_without_validation_rows_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"query {n % 30},title {n},{('no', 'yes')[n % 2]},{('train', 'test')[n % 30 > 20]}\n" for n in range(240)]
    (tmp_path / "a.csv").write_text("query,title,label,split\n" + "".join(rows))
    assert prepare(tmp_path, "--data.path", str(tmp_path / "a.csv"), "--data.valid-fraction=0.2") == 0
    assert "no row is in split valid" in capsys.readouterr().out


def test_a_split_column_that_divides_queries_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"query {n % 30},title {n},{('no', 'yes')[n % 2]},{('train', 'test')[n % 7 > 4]}\n" for n in range(240)]
    (tmp_path / "a.csv").write_text("query,title,label,split\n" + "".join(rows))
    file = ("--data.path", str(tmp_path / "a.csv"))
    assert prepare(tmp_path, *file) == DataError.exit_code
    assert load_result(open_storage(str(tmp_path)), "c1", "prepare") is None
    assert "30 of 30 queries of split test are also in split train" in capsys.readouterr().err
    assert prepare(tmp_path, *file, "--evaluate.leak=warn") == 0
    assert prepare(tmp_path, *file, "--data.columns.split=", "--cycle=c2") == 0


def test_what_an_input_holds_beside_its_rows_is_on_the_console_and_in_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in" / "market=us"
    folder.mkdir(parents=True)
    rows = [f"query {n % 30},title {n},{('no', 'yes')[n % 2]}\n" for n in range(240)]
    (folder / "a.csv").write_text("query,title,label\n" + "".join(rows))
    given = ("--data.path", str(tmp_path / "in"), "--data.valid-fraction=0")
    assert prepare(tmp_path, *given) == 0
    assert not [name for name in stored(tmp_path).figures if "not_read" in name]
    for name in ("_SUCCESS", ".a.csv.crc"):
        (folder / name).write_text("x")
    capsys.readouterr()
    assert prepare(tmp_path, *given) == 0
    figures, shown = stored(tmp_path).figures, capsys.readouterr().out
    assert (figures["files_not_read"], figures["not_read"]) == (2, "market=us/.a.csv.crc, market=us/_SUCCESS")
    assert f"prepare: 2 other file(s) were not read: {figures['not_read']}" in shown
    assert str(figures["warning_1"]).endswith("market=us")
