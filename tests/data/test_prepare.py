"""Real small runs of prepare()."""

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.progress import use_display
from pipeline.core.stop import StopSignal
from pipeline.data import prepare as prepare_module
from pipeline.data.config import CategoricalFeature, DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.lexical import LEXICAL_NAMES
from pipeline.data.shards import EXTRA
from pipeline.data.sources import open_source
from pipeline.data.synthetic import generate, partitions
from pipeline.data.token_sets import SPLITS, TokenSetInfo, open_rows, read_token_sets, spec_of
from pipeline.data.tokenizer import TextTokenizer
from pipeline.data.validate import to_codes
from pipeline.io.commit import read_manifest, verify_dir
from pipeline.io.storage import open_storage
from pipeline.proc import pool
from pipeline.stages.prepare import summary
from pipeline.telemetry.events import EventName
from tests.kit.s3 import MotoServer, lead_to
from tests.kit.shown import Shown

Make = Callable[[str], Any]
START = pool._start
SYNTHETIC = SyntheticConfig(num_queries=40, num_days=2)
CONFIG = DataConfig(
    synthetic=SYNTHETIC,
    rows_per_chunk=250,
    num_workers=2,
    numeric=("price",),
    categorical=(CategoricalFeature(column="brand", num_ids=64),),
    tokenizer=TokenizerConfig(vocab_size=600),
)


def write_days(folder: Path, *, days: int = 2, config: SyntheticConfig = SYNTHETIC) -> Path:
    for name in partitions(config)[:days]:
        (folder / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_batches(generate(config, name)), folder / name / "part-0.parquet")
    return folder


@pytest.mark.stage
def test_shards_say_what_their_manifest_says(workplace: Make) -> None:
    place, shown = workplace("one"), Shown()
    with use_display(shown.display):
        result = place.prepare(CONFIG)
    assert {"reading labels and texts", "tokenising"} <= {name for name, _ in shown.works}
    shown.check_complete()
    assert (result.rows, result.labels) == (80 * 12, ("irrelevant", "complement", "substitute", "exact"))
    assert place.names() == [EventName.TOKENIZER_TRAINED, EventName.PARTITION_PREPARED, EventName.PARTITION_PREPARED]
    tokenizer = TextTokenizer(place.storage.read_bytes(f"{result.tokenizer_prefix}/tokenizer.json"))
    sample_ids: list[int] = []
    for prefix, info in zip(result.token_set_prefixes, result.infos, strict=True):
        manifest = read_manifest(place.storage, prefix)
        assert manifest and TokenSetInfo.model_validate(manifest.fields) == info
        verify_dir(place.storage, prefix, deep=True)
        assert info.label_gains == (0.0, 0.01, 0.1, 1.0)
        assert info.numeric == ("price", *LEXICAL_NAMES)
        assert info.watermark == info.partition.removeprefix("dt=")
        num_tokens = 0
        for shard in (shard for shards in info.splits.values() for shard in shards):
            arrays = load_file(place.folder / "workspace" / prefix / shard.file)
            for index, (bucket, rows) in enumerate(zip(map(Bucket.parse, info.buckets), shard.rows, strict=True)):
                found = {name.partition(".")[2]: values for name, values in arrays.items() if name[:3] == f"b{index}."}
                if not rows:
                    assert not found
                    continue
                query, product = found["query"], found["product"]
                assert (query.shape, product.shape) == ((rows, bucket.query_tokens), (rows, bucket.product_tokens))
                assert query.dtype == product.dtype == np.uint16
                assert (query[:, 0] == tokenizer.cls_id).all()
                assert (np.sum(query == tokenizer.sep_id, axis=1) == 1).all()
                assert found["numeric"].shape == (rows, len(info.numeric)) and found["categorical"].shape == (rows, 1)
                gains = np.array(info.label_gains, dtype=np.float32)[found["label"]]
                assert np.array_equal(gains, found["gain"])
                num_tokens += int((query != info.pad_id).sum() + (product != info.pad_id).sum())
                sample_ids += found["sample_id"].tolist()
        assert num_tokens == info.tokens
    assert len(sample_ids) == len(set(sample_ids)) == 960


def texts_of(folder: Path, **settings: Any) -> DataConfig:
    """200 rows with the labels a and b in a file."""
    path = folder / "rows.jsonl"
    kinds = [None, "x", "y"]
    rows = [{"query": f"shoe {i}", "title": f"red {i}", "label": "ab"[i % 2], "kind": kinds[i % 3]} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(
        path=str(path), num_workers=1, labels=("a", "b"), tokenizer=TokenizerConfig(vocab_size=600), **settings
    )


@pytest.mark.stage
def test_missing_numbers_are_counted_and_stored_as_nan(workplace: Make, tmp_path: Path) -> None:
    place, config = workplace("one"), texts_of(tmp_path, numeric=("price",))
    rows = [json.loads(line) for line in Path(str(config.path)).read_text().splitlines()]
    lines = (json.dumps({**row, **({"price": 2} if i % 4 else {})}) + "\n" for i, row in enumerate(rows))
    Path(str(config.path)).write_text("".join(lines))
    done = place.prepare(config)
    assert (done.rows, done.rows_bad, done.infos[0].without_number) == (200, 0, {"price": 50})
    assert ", 50 without price |" in summary(done)
    (one,) = read_token_sets(place.storage, done.token_set_prefixes)
    assert spec_of(one.info).missing == ("price",)
    numeric = np.concatenate(
        [
            found.read(np.full(len(numbers), bucket), numbers, bucket, ("numeric",))["numeric"]
            for split in SPLITS
            for found in [open_rows(place.storage, [one], split, tmp_path)]
            for bucket, numbers in found.blocks()
        ]
    )
    assert np.isnan(numeric).sum(axis=0).tolist() == [50, *[0] * len(LEXICAL_NAMES)]
    with pytest.raises(DataError, match="feature price is not a finite number") as error:
        Path(str(config.path)).write_text("".join(json.dumps({**row, "price": "cheap"}) + "\n" for row in rows))
        place.prepare(config)
    assert "a number or nothing" in str(error.value.next_command)


@pytest.mark.stage
def test_slices_go_with_the_rows(workplace: Make, tmp_path: Path) -> None:
    place = workplace("one")
    done = place.prepare(texts_of(tmp_path, slices=("label", "kind")))
    missing = place.prepare(texts_of(tmp_path, categorical=(CategoricalFeature(column="kind", num_ids=8),)))
    assert missing.infos[0].without_category == {"kind": 67}
    (one,) = read_token_sets(place.storage, done.token_set_prefixes)
    assert [(info.column, info.names) for info in one.info.slices] == [("label", ("a", "b")), ("kind", ("x", "y"))]
    seen = Counter[int]()
    for split in SPLITS:
        found = open_rows(place.storage, [one], split, tmp_path, EXTRA)
        for bucket, rows in found.blocks():
            arrays = found.read(np.full(len(rows), bucket), rows, bucket)
            assert np.array_equal(to_codes(arrays["slice"][:, 0], ("a", "b")), arrays["label"])
            seen.update(to_codes(arrays["slice"][:, 1], ("x", "y")).tolist())
            assert not arrays["partition"].any()
    assert seen == {-1: 67, 0: 67, 1: 66}
    with pytest.raises(DataError, match=r"no column 'none' \(for slice\.none\)[\s\S]*--data\.slices"):
        place.prepare(texts_of(tmp_path, slices=("none",)))


@pytest.mark.stage
def test_prefixes_stand_before_the_texts(workplace: Make, tmp_path: Path) -> None:
    place = workplace("one")
    without = place.prepare(texts_of(tmp_path))
    done = place.prepare(texts_of(tmp_path, query_prefix="red ", product_prefix="shoe "))
    (one,) = read_token_sets(place.storage, done.token_set_prefixes)
    assert (spec_of(one.info).query_prefix, spec_of(one.info).product_prefix) == ("red ", "shoe ")
    tokenizer = TextTokenizer(place.storage.read_bytes(f"{done.tokenizer_prefix}/tokenizer.json"))
    red, shoe = (tokenizer.encode([word]).ids[1] for word in ("red", "shoe"))
    found = open_rows(place.storage, [one], "train", tmp_path / "cache")
    for bucket, ids in found.blocks():
        batch = found.read(np.full(len(ids), bucket), ids, bucket)
        assert (batch["query"][:, 1] == red).all() and (batch["product"][:, 1] == shoe).all()
    with pytest.raises(ConfigError, match="query_prefix"):
        read_token_sets(place.storage, [*without.token_set_prefixes, *done.token_set_prefixes])


@pytest.mark.stage
def test_workers_do_not_change_the_bytes(workplace: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters of their own, so with other hash seeds."""
    monkeypatch.setattr(pool, "_start", START)
    one, three = workplace("one"), workplace("three")
    first = one.prepare(CONFIG.model_copy(update={"num_workers": 1}))
    second = three.prepare(CONFIG.model_copy(update={"num_workers": 3}))
    assert first == second
    for prefix in [*first.token_set_prefixes, first.tokenizer_prefix]:
        assert one.bytes_of(prefix) == three.bytes_of(prefix)


@pytest.mark.stage
@pytest.mark.parametrize("workers", [2, 5])
def test_workers_of_an_array_prepare_whole_partitions_to_the_same_bytes(
    workplace: Make, tmp_path: Path, workers: int
) -> None:
    data = write_days(tmp_path / "data", days=3, config=SYNTHETIC.model_copy(update={"num_days": 3}))
    config = CONFIG.model_copy(update={"path": str(data), "num_workers": 1})
    alone, array = workplace("alone"), workplace("array")
    expected = alone.prepare(config)
    shared = config.model_copy(update={"workers": workers})
    results = [array.prepare(shared, worker=worker) for worker in reversed(range(workers))]
    assert all(result.missing for result in results[:-1]) and not results[-1].missing
    assert sum(result.prepared for result in results) == 3
    assert results[-1].infos == expected.infos
    for prefix in [*expected.token_set_prefixes, expected.tokenizer_prefix]:
        assert array.bytes_of(prefix) == alone.bytes_of(prefix)


@pytest.mark.stage
def test_a_day_that_comes_while_a_worker_is_at_work_makes_it_try_again(
    workplace: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, data = workplace("one"), write_days(tmp_path / "data")
    config = CONFIG.model_copy(update={"path": str(data), "num_workers": 1, "workers": 2})
    encode = prepare_module._encode_all

    def day_comes(*arguments: Any) -> Any:
        (data / "dt=2026-01-03").mkdir()
        shutil.copy(data / "dt=2026-01-02" / "part-0.parquet", data / "dt=2026-01-03")
        return encode(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_encode_all", day_comes)
        with pytest.raises(TransientError, match="has changed since worker 0 of 2"):
            place.prepare(config, worker=0)
    assert [place.prepare(config, worker=worker).missing for worker in (0, 1)] == [1, 0]


@pytest.mark.stage
def test_only_what_changed_is_prepared(workplace: Make, tmp_path: Path) -> None:
    place, data = workplace("one"), write_days(tmp_path / "data", days=1)
    config = CONFIG.model_copy(update={"path": str(data), "num_workers": 1, "rows_per_chunk": 5000})
    first = place.prepare(config)
    assert (first.prepared, first.reused) == (1, 0)
    write_days(data)  # a day is added: the tokenizer stays, the first day too
    second = place.prepare(config)
    assert (second.prepared, second.reused) == (1, 1)
    assert second.tokenizer_prefix == first.tokenizer_prefix
    assert place.names() == [EventName.PARTITION_REUSED, EventName.PARTITION_PREPARED]
    third = place.prepare(config)
    assert third.token_set_prefixes == second.token_set_prefixes
    assert place.names() == [EventName.PARTITION_REUSED] * 2
    given = place.storage.read_bytes(f"{third.tokenizer_prefix}/tokenizer.json")
    other = place.prepare(config.model_copy(update={"buckets": ("16x32",)}), tokenizer=given)
    assert (other.prepared, other.reused) == (2, 0)
    changed = data / "dt=2026-01-02" / "part-0.parquet"
    pq.write_table(pq.read_table(changed).slice(1), changed)
    fourth = place.prepare(config, tokenizer=given)
    assert (fourth.prepared, fourth.reused) == (1, 1)


@pytest.mark.stage
def test_bad_rows_are_quarantined_then_refused(workplace: Make, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"query": f"q{i}", "title": f"t{i}", "label": "yes" if i % 2 else "no"} for i in range(100)]
    rows[3]["query"], rows[5]["title"], rows[7]["label"] = "", " ", "perhaps"
    path.write_text("{broken\n" + "".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), labels=("no", "yes"), num_workers=1, tokenizer=TokenizerConfig(vocab_size=256))
    place = workplace("one")
    result = place.prepare(config)
    assert (result.rows, result.rows_bad) == (97, 4)
    expected = {0: "malformed row: not a JSON object", 4: "empty query", 6: "empty title", 8: "unknown label"}
    assert result.infos[0].reasons == {reason: 1 for reason in sorted(expected.values())}
    assert result.infos[0].label_gains == (0.0, 1.0)
    lines = [json.loads(line) for line in place.bytes_of(result.token_set_prefixes[0])["quarantine.jsonl"].splitlines()]
    assert {row["row"]: row["reason"] for row in lines} == expected
    assert lines[3]["content"] == {"query": "q7", "title": "t7", "label": "perhaps"}
    assert "97 rows, 4 quarantined: 1 empty query, 1 empty title" in summary(result)
    strict = config.model_copy(update={"max_bad_fraction": 0.01})
    for where in (place, workplace("fresh")):  # reused and prepared sets are judged alike
        with pytest.raises(DataError, match=r"4 of 101 rows are bad \(4\.0%\).*empty title \(1\)"):
            where.prepare(strict)


@pytest.mark.stage
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "/no/such/folder"}, "does not exist"),
        ({"path": "empty"}, "no input file"),
        ({"path": "mixed"}, "has dt= folders, and also"),
        ({"path": "nodays"}, "folder dt=2026-13-01, which is not a valid date"),
        ({"path": "norows", "numeric": (), "categorical": ()}, "no usable rows"),
        ({"filter": {"brand": "Nobody"}}, "no row of .* has brand=Nobody"),
        ({"numeric": ("weight",)}, "no column 'weight'"),
        ({"tokenizer": TokenizerConfig(path="none.json")}, "does not exist"),
    ],
)
def test_unusable_input_is_one_clear_error(
    workplace: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("norows").mkdir()
    Path("norows/a.csv").write_text("query,title,label\n")
    write_days(Path("mixed"), days=1)
    Path("mixed/more.csv").write_text("query,title,label\n")
    write_days(Path("nodays"), days=2)
    Path("nodays/dt=2026-01-02").rename("nodays/dt=2026-13-01")
    with pytest.raises((DataError, ConfigError), match=words) as caught:
        workplace("one").prepare(CONFIG.model_copy(update=change))
    assert caught.value.expected
    assert caught.value.next_command


def table_as(name: str, rows: int) -> bytes:
    if name == "a.csv":
        return b"query,title,label\n" + b"q,t,yes\n" * rows
    if name == "a.jsonl":
        return b'{"query": "q", "title": "t", "label": "yes"}\n' * rows
    sink = io.BytesIO()
    pq.write_table(pa.table({"query": ["q"] * rows, "title": ["t"] * rows, "label": ["yes"] * rows}), sink)
    return sink.getvalue()


@pytest.mark.stage
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "s3"])
def test_a_file_changed_while_it_is_read_is_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From the batch on that was read after the change: nothing of it is encoded under the name of the old content."""
    with MotoServer("data-tests") as server:
        lead_to(server.url, monkeypatch)
        root, name = ("s3://data-tests/in", "a.csv") if name == "s3" else (str(tmp_path), name)
        storage = open_storage(root)
        storage.write_bytes(name, table_as(name, 300))
        source = open_source(DataConfig(path=f"{root}/{name}", rows_per_chunk=100), scratch=tmp_path, stop=StopSignal())
        (file,) = source.partitions[0].files
        assert sum(batch.num_rows for batch in source.read(file)) == 300
        batches = source.read(file)
        assert next(batches).num_rows == 100
        for content in (table_as(name, 301), b"PAR1"):
            storage.write_bytes(name, content)
            with pytest.raises(TransientError, match=f"{name} changed while it was being read"):
                list(batches if root == str(tmp_path) and content != b"PAR1" else source.read(file))
        storage.delete([name])
        with pytest.raises(TransientError, match="was deleted after it was listed"):
            list(source.read(file))


@pytest.mark.stage
def test_a_file_changed_after_it_was_named_is_prepared_by_the_next_run(
    workplace: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, path = workplace("one"), tmp_path / "a.csv"
    config = DataConfig(path=str(path), labels=("no", "yes"), num_workers=1, tokenizer=TokenizerConfig(vocab_size=256))
    old = b"query,title,label\n" + b"q,t,yes\n" * 40
    path.write_bytes(old)
    decide = prepare_module._surveyed

    def changes_it(*arguments: Any) -> Any:
        path.write_bytes(old + b"q,t,no\n" * 20)
        return decide(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_surveyed", changes_it)
        with pytest.raises(TransientError):
            place.prepare(config)
    assert place.prepare(config).rows == 60
    path.write_bytes(old)
    assert place.prepare(config).rows == 40


@pytest.mark.stage
def test_token_sets_on_s3_are_those_of_local_disk_and_found_again(
    workplace: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_days(tmp_path / "in")
    config = CONFIG.model_copy(update={"path": str(data), "num_workers": 1})
    place, stop = workplace("local"), StopSignal()
    local = place.prepare(config)
    with MotoServer("data-tests") as server:
        lead_to(server.url, monkeypatch)
        for file in data.rglob("*.parquet"):
            server.client.upload_file(str(file), "data-tests", f"in/{file.relative_to(data)}")
        storage = open_storage("s3://data-tests/workspace", stop=stop)
        config = config.model_copy(update={"path": "s3://data-tests/in"})
        first, again = (
            prepare_module.prepare(config, storage, scratch=tmp_path, events=lambda _, /, **__: None, stop=stop)
            for _ in range(2)
        )
        assert [(one.prepared, one.reused, one.rows) for one in (first, again)] == [(2, 0, 960), (0, 2, 960)]
        for remote, prefix in zip(first.token_set_prefixes, local.token_set_prefixes, strict=True):
            verify_dir(storage, remote, deep=True)
            shards = {key: data for key, data in place.bytes_of(prefix).items() if key.endswith(".safetensors")}
            assert {key: storage.read_bytes(f"{remote}/{key}") for key in shards} == shards
