"""The embed stage as a user runs it, on the CPU with a model of a few weights."""

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from pipeline.backends import cpu
from pipeline.context import StageResult, load_result
from pipeline.embed.digest import VerifyDigest, digest_key
from pipeline.embed.plan import pinned_plan
from pipeline.embed.vectors import VectorSet, find_vectors
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.world import ARRAY_INDEX
from pipeline.registry.model import read_pair
from tests.embed.catalogues import KINDS, MAX_TOKENS, products, rows_of, write_catalogue
from tests.embed.checkpoints import make_checkpoint

pytestmark = pytest.mark.stage

SMALL = ("--backend=cpu", "--data.num-workers=1", "--embed.output.rows-per-part=45")


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    """With a promoted model, and a catalogue of p0 to p99 beside it."""
    storage = open_storage(str(tmp_path / "workspace"))
    make_checkpoint(storage, tmp_path)
    write_catalogue(tmp_path / "in", [products(range(60)), products(range(60, 100))])
    return storage


def embed(workspace: Storage, *words: str, cycle: str = "c1", action: str = "", catalogue: str = "in") -> int:
    root = workspace.local_path("")
    assert root is not None
    flags = [f"--workspace={root}", f"--cycle={cycle}", f"--embed.catalogue.path={root.parent / catalogue}", *SMALL]
    return cli.main(["embed", *([action] if action else []), *flags, *words])


def vectors_of(workspace: Storage, cycle: str = "c1") -> VectorSet:
    return find_vectors(workspace, cycle)


def result_of(workspace: Storage, cycle: str = "c1") -> StageResult:
    result = load_result(workspace, cycle, "embed")
    assert result is not None
    return result


def events_of(workspace: Storage, cycle: str = "c1") -> list[dict[str, Any]]:
    return [json.loads(line) for line in workspace.read_bytes(f"cycles/{cycle}/events.jsonl").splitlines()]


def digest_of(workspace: Storage, cycle: str = "c1") -> VerifyDigest:
    return VerifyDigest.model_validate_json(workspace.read_bytes(digest_key(cycle)))


def test_embed_verify_and_embed_again(workspace: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(workspace) == 0
    out = capsys.readouterr().out
    assert "100 rows in 3 parts, 0 done | worker 0 of 1: 3 to do" in out
    assert "embed: 100 vectors of 16 x fp16 in 3 parts" in out and "idle" in out
    vectors, result = vectors_of(workspace), result_of(workspace)
    assert rows_of(vectors).keys() == {f"p{n}" for n in range(100)}
    assert result.outputs == {"embeddings": "embeddings/c1"}
    assert result.inputs["checkpoint"] == vectors.info.model.digest
    assert (result.figures["rows"], result.figures["rows_embedded"], result.figures["parts"]) == (100, 100, 3)
    told = [event["event"] for event in events_of(workspace)]
    assert told == ["stage_started", "embed_started", *["part_embedded"] * 3, "stage_finished"]
    metadata = {name.decode() for name in vectors.schema(0).metadata}
    wanted = {"model", "checkpoint", "checkpoint_digest", "tokenizer", "pooling", "dtype", "dim", "max_tokens"}
    assert {f"trnpipe.{name}" for name in wanted} <= metadata

    assert embed(workspace, action="verify") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["pass", "files"],
        ["pass", "numbers"],
        ["pass", "unique"],
        ["pass", "catalogue"],
        ["pass", "sample"],
        ["verify:", "serving.json:"],
    ]
    served, verified = read_pair(workspace, "relevance"), load_result(workspace, "c1", "verify")
    assert served is not None and verified is not None
    assert served[0].digests == (vectors.info.model.digest, vectors.manifest.digest)
    assert (served[0].vectors.rows, served[0].vectors.dim) == (100, 16)
    digest = digest_of(workspace)
    assert verified.inputs["vectors"] == digest.vectors_digest == vectors.manifest.digest
    assert verified.figures["rows"] == 100 and verified.figures["checks_skipped"] == ""
    assert digest.passed and digest.recompute_min_cosine == verified.figures["sample_min_cosine"]
    assert digest.counts.model_dump() == {"embedded": 100, "carried": 0, "new": None, "gone": None}
    assert [check.name for check in digest.checks if check.outcome == "pass"][-1] == "sample"
    assert embed(workspace) == 0
    assert "already done, 100 vectors" in capsys.readouterr().out
    workspace.delete(["cycles/c1/embed/result.json"])
    workspace.write_bytes("embeddings/c1/part-00000-old.parquet", b"left by an attempt that was killed")
    assert embed(workspace) == 0
    assert result_of(workspace).figures["rows"] == 100
    assert workspace.stat("embeddings/c1/part-00000-old.parquet") is None


def test_long_texts_in_chunks(workspace: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted, verified, made anew when the setting changes; without it a plan says nothing of chunks."""
    long = pa.table(
        {
            "product_id": [f"p{n}" for n in range(6)],
            "title": [" ".join(islice(cycle(KINDS), words)) for words in (1, 2, 12, 20, 200, 900)],
        }
    )
    write_catalogue(tmp_path / "long", [long])
    assert embed(workspace, catalogue="long") == 0
    assert "4 texts cut |" in capsys.readouterr().out
    plan = pinned_plan(workspace, "c1")
    assert plan is not None and "chunks" not in plan.made_by and "embed.chunks" not in plan.asked
    assert plan.max_tokens == MAX_TOKENS

    chunked = ("--embed.chunks=8",)
    assert embed(workspace, *chunked, cycle="c2", catalogue="long") == 0
    out = capsys.readouterr().out
    assert "6 embedded, 0 carried over" in out and "texts cut, 4 in chunks |" in out
    figures = result_of(workspace, "c2").figures
    assert (figures["rows_chunked"], figures["rows_truncated"]) == (4, 2)
    before, after = rows_of(vectors_of(workspace)), rows_of(vectors_of(workspace, "c2"))
    for name in ("p0", "p1"):
        np.testing.assert_allclose(after[name], before[name], atol=1e-3)
    assert np.abs(after["p3"] - before["p3"]).max() > 1e-3
    assert embed(workspace, cycle="c2", catalogue="long", action="verify") == 0
    assert "pass     sample" in capsys.readouterr().out, "verify goes by what the vectors were made with"
    assert embed(workspace, *chunked, cycle="c3", catalogue="long") == 0
    assert "0 embedded, 6 carried over" in capsys.readouterr().out
    assert embed(workspace, "--embed.chunks=7", cycle="c3", catalogue="long") == 78
    assert "embed.chunks is 7, but cycle c3 was started with 8" in capsys.readouterr().err


def test_verify_says_what_is_wrong(workspace: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(workspace, action="verify") == 65
    assert "has no complete vectors" in capsys.readouterr().err
    assert embed(workspace) == 0
    path = workspace.local_path("embeddings/c1/part-00002.parquet")
    assert path is not None
    path.write_bytes(b"PAR1")
    capsys.readouterr()
    assert embed(workspace, "--json", action="verify") == 65
    told = capsys.readouterr()
    assert "part-00002.parquet" in told.err and "next: delete" in told.err
    outcomes = {check["name"]: check["outcome"] for check in json.loads(told.out)["checks"]}
    assert outcomes["files"] == outcomes["numbers"] == outcomes["catalogue"] == "fail"
    assert read_pair(workspace, "relevance") is None and load_result(workspace, "c1", "verify") is None
    assert not digest_of(workspace).passed


def test_workers_of_an_array(workspace: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any order; the last one signs. Only the first writes events."""
    for index in (2, 0, 1):
        assert load_result(workspace, "c1", "embed") is None
        monkeypatch.setenv(ARRAY_INDEX, str(index))
        assert embed(workspace, "--embed.workers=3") == 0
    assert rows_of(vectors_of(workspace)).keys() == {f"p{n}" for n in range(100)}
    assert result_of(workspace).figures["parts"] == 3
    assert {event.get("part") for event in events_of(workspace)} == {None, 0}
    monkeypatch.delenv(ARRAY_INDEX)
    assert embed(workspace, "--embed.output.carry-over=none", cycle="c2") == 0
    files = [(tmp_path / f"workspace/embeddings/{cycle}/part-00000.parquet") for cycle in ("c1", "c2")]
    one, other = (pq.read_table(file).replace_schema_metadata() for file in files)
    assert one.equals(other), "the same vectors, bit by bit"


def test_the_next_cycle_embeds_only_the_news(workspace: Storage, tmp_path: Path) -> None:
    assert embed(workspace) == 0
    write_catalogue(tmp_path / "next", [products(range(30, 110))])
    assert embed(workspace, cycle="c2", catalogue="next") == 0
    figures = result_of(workspace, "c2").figures
    assert (figures["rows_carried"], figures["rows_embedded"], figures["rows_deleted"]) == (70, 10, 30)
    make_checkpoint(workspace, tmp_path, "c9", seed=2)
    assert embed(workspace, cycle="c3", catalogue="next") == 0
    assert result_of(workspace, "c3").figures["rows_carried"] == 0, "another model was promoted"
    assert embed(workspace, cycle="c3", catalogue="next", action="verify") == 0
    digest = digest_of(workspace, "c3")
    assert digest.previous == "c2" and (digest.counts.new, digest.counts.gone) == (None, None)
    served = read_pair(workspace, "relevance")
    assert served is not None and served[0].vectors.cycle == "c3"


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--embed.output.dimensions=17",), 78, "the model's vectors have 16"),
        (("--embed.workers=2",), 78, "worker unknown of 2"),
        (("--embed.catalogue.path=nowhere",), 65, "nowhere does not exist"),
        (("--embed.catalogue.id=sku",), 65, "no column 'sku'"),
        (("--model-name=other",), 74, "no checkpoint of model other is promoted"),
        (("--embed.checkpoint=checkpoints/c7/step-1",), 74, "is not a committed checkpoint"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(
    workspace: Storage, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, reason: str
) -> None:
    assert embed(workspace, *words) == code
    err = capsys.readouterr().err
    assert reason in err and "Traceback" not in err
    assert not workspace.stat("cycles/c1/embed/plan.json")


def test_a_cycle_is_not_continued_with_other_settings(workspace: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(workspace, "--embed.workers=2", "--embed.worker=0") == 0
    assert embed(workspace, "--embed.output.dtype=int8") == 78
    assert "embed.output.dtype is 'int8', but cycle c1 was started with 'fp16'" in capsys.readouterr().err
    assert embed(workspace) == 0, "with the same it is, by any number of workers"
    workspace.delete_prefix("cycles/c1")
    assert embed(workspace, "--embed.output.dtype=int8") == 78
    assert "has vectors from a different plan" in capsys.readouterr().err


def test_a_cpu_without_bf16_is_said_to_be_slow(
    workspace: Storage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "supports_bf16", lambda: False)
    for precision in ("bf16", "fp32"):
        assert embed(workspace, f"--embed.precision={precision}", cycle=precision) == 0
        said = "warning: embed.precision bf16 is many times slower than fp32 on this CPU" in capsys.readouterr().out
        assert said == (precision == "bf16")
