"""Ask a tiny model: search beside exact search, encode beside the vectors of embed, score beside evaluate."""

import io
import json
import math
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

import trnpipe
from jobs import cli as jobs_cli
from pipeline import cli
from pipeline.checkpoint.save import commit_snapshot
from pipeline.checkpoint.store import KIND, WEIGHTS
from pipeline.commands.ask import two_columns
from pipeline.convert.folder import PRODUCT, QUERY
from pipeline.core.errors import CheckpointError, ConfigError, DataError, NumericError
from pipeline.core.fingerprint import hash63
from pipeline.embed.vectors import find_vectors
from pipeline.evaluate.metrics import labels
from pipeline.evaluate.report import load_report
from pipeline.evaluate.score import load_scores
from pipeline.inference.model import Hit, Kind
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage, open_storage
from pipeline.retrieval.bm25 import Bm25
from tests.embed.catalogues import KINDS, products, title, write_catalogue
from tests.embed.checkpoints import make_checkpoint, snapshot_of
from tests.fault.harness import MODEL, TRAIN

pytestmark = pytest.mark.stage


def ask(storage: Storage, *words: str) -> int:
    return cli.main([words[0], f"--workspace={storage.local_path('')}", "--backend=cpu", *words[1:]])


def test_search_equals_exact_search_over_the_committed_vectors(served: Storage) -> None:
    model = trnpipe.load_model(workspace=str(served.local_path("")))
    assert model.name == "c1/step-1"
    vectors = find_vectors(served, "c1")
    blocks = [block for part in range(len(vectors.info.parts)) for block in vectors.blocks(part)]
    ids = [name for batch, _ in blocks for name in batch["id"].to_pylist()]
    every = np.concatenate([values for _, values in blocks]).astype(np.float64)
    assert len(ids) == len(set(ids)) == 101
    texts = [title(int(name[1:])) if name != "p100" else "camera\x1b[31m model 7" for name in ids]
    words = Bm25(texts)
    for query in ("phone model 8 black edition", "kettle", "nothing that is there"):
        cosines = every @ model.encode(query).astype(np.float64)
        best = np.argsort(-cosines, kind="stable")[:7]
        hits = model.search(query, top=7)
        assert [hit.cosine for hit in hits] == pytest.approx(cosines[best], abs=1e-6)
        assert {hit.id for hit in hits} == {ids[item] for item in best}
        assert [hit.title for hit in hits] == [texts[ids.index(hit.id)] for hit in hits]
        found = [ids[item] for item in words.search([query], 7)[1][0] if item >= 0]
        assert [hit.id for hit in model.search(query, top=7, by="words")] == found
    both = model.search("phone model 8 black edition", top=5, by="hybrid")
    assert [hit.ranks["hybrid"] for hit in both] == [1, 2, 3, 4, 5]
    gains = [sum(1 / (60 + rank) for order, rank in hit.ranks.items() if order != "hybrid") for hit in both]
    assert gains == sorted(gains, reverse=True)


def test_vectors_that_were_replaced_after_they_were_deployed(served: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    other = find_vectors(served, "c0")
    monkeypatch.setattr("pipeline.inference.model.find_vectors", lambda storage, cycle: other)
    with pytest.raises(CheckpointError, match="trnpipe serving rollback"):
        trnpipe.load_model(workspace=str(served.local_path("")))


def test_the_index_is_written_once_and_read_by_the_next_process(served: Storage, cache: Path) -> None:
    hits = trnpipe.load_model(workspace=str(served.local_path(""))).search("drill", by="words")
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert hits and written
    assert trnpipe.load_model(workspace=str(served.local_path(""))).search("drill", by="words") == hits
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == written


def test_encode_makes_the_vectors_that_embed_stored(served: Storage) -> None:
    model = trnpipe.load_model(workspace=str(served.local_path("")), cycle="c0")
    vectors = find_vectors(served, "c0")
    batch, stored = next(vectors.blocks(0))
    texts = [title(int(name[1:])) for name in batch["id"].to_pylist()]
    assert np.abs(model.encode(texts, kind="product") - stored).max() < 1e-3  # fp16
    one = model.encode(texts[0], kind="product")
    assert np.allclose(one, model.encode(texts[:1], kind="product")[0])
    assert model.similarity(one, model.encode(texts, "product")).shape == (1, len(texts))
    assert model.encode([]).shape == (0, 16)


TEXTS = [
    "phone model 8 black edition",
    "",
    "PHONE Model 8\tblack\u00a0edition",
    "Größe café 手机 🙂",
    "kettle " * 400,
    "unknowable" * 60,
    " " * 2000 + "drill",
]


@pytest.mark.parametrize("prefixes", [("", ""), ("query: ", "passage: ")])
def test_encode_equals_sentence_transformers(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    """On the exported folder, to 1e-5, prompts included."""
    peer = pytest.importorskip("sentence_transformers")
    snapshot = snapshot_of("c0", 3)
    inputs = snapshot.state.inputs.model_copy(update={"query_prefix": prefixes[0], "product_prefix": prefixes[1]})
    state = snapshot.state.model_copy(update={"inputs": inputs})
    commit_snapshot(open_storage(str(tmp_path / "workspace")), replace(snapshot, state=state), tmp_path / "snapshot")
    checkpoint, out = f"{tmp_path}/workspace/checkpoints/c0/step-1", str(tmp_path / "exported")
    assert cli.main(["export", checkpoint, f"--workspace={tmp_path}/workspace", "--out", out]) == 0
    theirs, ours = peer.SentenceTransformer(out, device="cpu", local_files_only=True), trnpipe.load_model(checkpoint)
    kinds: list[tuple[Kind, str]] = [("query", QUERY[0]), ("product", PRODUCT[0])]
    for kind, name in kinds:
        prompt = {"prompt_name": name} if prefixes[0] else {}
        expected = theirs.encode(TEXTS, show_progress_bar=False, **prompt)
        found = ours.encode(TEXTS, kind=kind)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert np.abs(found[0] - found[4]).max() > 0.01, "vectors that differ"
    if prefixes[0]:
        assert np.abs(ours.encode(TEXTS[0]) - ours.encode(TEXTS[0], "product")).max() > 1e-3


def test_search_on_the_command_line(served: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(served, "search", "camera model", "--top", "5", "--by", "words") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "c1/step-1, 101 products" in lines[0] and len(lines) == 7
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    assert ask(served, "search", "camera model", "--beside", "previous", "--top", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["c1/step-1", "c0/step-1"] and len(lines) == 8
    assert all(len(line) <= 80 for line in lines)
    assert ask(served, "search", "camera model", "--beside", "production", "--cycle=c0", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [column["model"].rpartition("checkpoints/")[2] for column in answer["columns"]] == ["c0/step-1", "c1/step-1"]
    assert len(answer["columns"][0]["hits"]) == 10
    for words in (["camera", "--beside", "production"], ["camera", "--by", "magic"], [" "], ["x", "--top", "0"]):
        assert ask(served, "search", *words) == ConfigError.exit_code
    assert ask(served, "search", "camera", "--cycle=c9") == DataError.exit_code


def test_a_workspace_that_does_not_exist_is_not_created(served: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    root = served.local_path("")
    assert root is not None
    for program, words in (
        (cli, ["search", "x"]),
        (cli, ["registry", "show"]),
        (jobs_cli, ["status"]),
        (jobs_cli, ["diff"]),
    ):
        assert program.main([*words, f"--workspace={root}s"]) == ConfigError.exit_code
        text = capsys.readouterr().err
        assert f"{root}s does not exist" in text and f"next: --workspace {root}\n" in text
    assert not Path(f"{root}s").exists()


def test_titles_that_are_cut_end_in_an_ellipsis() -> None:
    hits = [Hit("p1", "belvor pace ed619 running shoes extra wide blue", 0.9, {"vectors": 1})]
    lines = two_columns(hits, hits, ("a", "b"), 80)
    assert lines[1].count("…") == 2 and len(lines[1]) <= 80 and " = " in lines[1]


def test_a_catalogue_that_was_changed_is_refused(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "workspace"))
    make_checkpoint(storage, tmp_path)
    write_catalogue(tmp_path / "in", [products(range(30))])
    flags = [f"--workspace={tmp_path}/workspace", "--cycle=c0", "--backend=cpu", "--data.num-workers=1"]
    assert cli.main(["embed", *flags, f"--embed.catalogue.path={tmp_path}/in"]) == 0
    pq.write_table(products(range(31)), tmp_path / "in" / "file-0.parquet")
    with pytest.raises(DataError, match="changed"):
        trnpipe.load_model(workspace=f"{tmp_path}/workspace", cycle="c0").search("drill")


def test_encode_on_the_command_line(
    served: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts.txt").write_text("﻿phone\nkettle model\n", encoding="utf-8")
    assert ask(served, "encode", str(tmp_path / "texts.txt")) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["phone", "kettle model"]
    assert ask(served, "encode", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "v.npy")) == 0
    matrix = np.load(tmp_path / "v.npy")
    assert np.allclose(matrix, [row["vector"] for row in rows], atol=1e-6)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"phone\n\xff\n")))
    capsys.readouterr()
    assert ask(served, "encode") == DataError.exit_code
    assert "line 2 of - is not UTF-8" in capsys.readouterr().err
    assert ask(served, "encode", str(tmp_path / "gone.txt")) == DataError.exit_code
    assert ask(served, "encode", "--kind", "title") == ConfigError.exit_code


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Storage, Path]:
    """A workspace with a model trained on a CSV file with features and attributes, some missing, and evaluated."""
    folder = tmp_path_factory.mktemp("judged")
    random = np.random.default_rng(5)
    rows = []
    for query in range(60):
        for place in range(6):
            kind = KINDS[(query + (place > 2)) % 8]
            price = f"{random.uniform(1, 100):.2f}" if place else ""
            cost, code = f"{random.uniform(1, 9):.1f}" if query % 5 else "", f"c-{query + 20 * place}"
            row = [
                f"{KINDS[query % 8]} {query}",
                f"{kind} model {place}",
                f"{place <= 2:d}",
                price,
                f"brand{place % 3}",
            ]
            rows.append(",".join([*row, f"C{query}" if query % 7 else "", code, "3.5", cost]))
    path = folder / "pairs.csv"
    path.write_text("query,title,label,price,brand,query_code,code,cost_left,cost_right\n" + "\n".join(rows) + "\n")
    flags = [f"--workspace={folder}/workspace", f"--data.path={path}", "--cycle=c1", "--backend=cpu", *MODEL, *TRAIN]
    flags += ["--data.numeric=price", "--data.categorical=brand", "--data.labels=0,1", "--data.test-fraction=0.4"]
    flags += ["--data.attributes=code,cost", "--data.buckets=8x8,16x32", "--data.tokenizer.vocab-size=300"]
    flags += ["--data.num-workers=1", "--data.valid-fraction=0.3", "--train.max-steps=10", "--train.evaluate-every=0"]
    flags += ["--no-evaluate.baselines.boosting"]
    assert cli.main(["prepare", *flags]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "MIN_FITTED", 50)
        assert cli.main(["train", *flags]) == 0
    assert cli.main(["evaluate", *flags]) in (0, 80)
    return open_storage(str(folder / "workspace")), path


def test_score_equals_the_scores_of_evaluate(
    judged: tuple[Storage, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, path = judged
    (folder,) = (name for name in storage.list_dirs("cycles/c1/evaluate/scores/") if name.startswith("test-"))
    expected = load_scores(storage, f"cycles/c1/evaluate/scores/{folder}", tmp_path)
    probabilities = dict(zip(expected.arrays["sample_id"].tolist(), expected.rows.probabilities, strict=True))
    checkpoint = f"checkpoints/c1/{storage.list_dirs('checkpoints/c1/')[-1]}"
    assert ask(storage, "score", str(path), "--checkpoint", checkpoint) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"] for line in lines] == list(range(360))
    compared = 0
    for line in lines:
        sample = hash63(f"flat|{path.name}|{line['row']}")
        if sample in probabilities:
            compared += 1
            assert list(line["probabilities"].values()) == pytest.approx(probabilities[sample], abs=2e-6)
            assert line["gain"] == pytest.approx(probabilities[sample] @ [0, 1], abs=2e-6)
    assert compared == len(probabilities) > 50
    model = trnpipe.load_model(storage.uri(checkpoint))
    report, state = load_report(storage, "c1"), model.checkpoint.state
    assert report and report.candidate.temperature == state.temperature != 1.0
    assert report.candidate.ece_before and report.candidate.ece_before > report.candidate.metrics.values["ece"]
    first = {"query": "phone 0", "title": "phone model 0", "price": 20.5, "brand": "brand0"}
    first |= {"query_code": "C0", "code": "c-0", "cost_left": 3.5, "cost_right": 2}
    scores = model.score([first, first | {"price": 99.0}])
    assert scores.labels == ("0", "1") and len(scores) == 2 and scores.grades[0] in scores.labels
    assert scores.gains[0] != scores.gains[1]
    assert len(model.score([])) == 0
    with pytest.raises(DataError, match="price"):
        model.score([("phone 0", "phone model 0")])
    for pair in ("ab", ("a",), ("a", "b", "c")):
        with pytest.raises(DataError, match=r"pair 0 is .*\n.*a query and a title"):
            model.score([pair])  # type: ignore[list-item]
    with pytest.raises(DataError, match="pair 1: feature price"):
        model.score([first, first | {"price": "much"}])
    changes = ({"price": None}, {"code": "c-1"}, {"query_code": None}, {"cost_right": None}, {"cost_right": 9})
    gains = model.score([first, *(first | change for change in changes)]).gains.tolist()
    assert len(set(gains)) == 1 + len(changes), "every feature and attribute matters, and may be missing"
    absent = [
        first | {"brand": value, "query_code": value, "code": value} for value in (None, math.nan, np.float32("nan"))
    ]
    gains = model.score(absent).gains.tolist()
    assert gains == pytest.approx([gains[0]] * 3, abs=1e-6), "as pandas names what is missing"
    assert model.score([first | {"code": "C 0"}]).gains[0] != gains[0], "the text"
    assert [each.kind for each in model.row_config.attributes] == ["text", "number"]


def test_score_names_the_rows_that_it_cannot_score(
    judged: tuple[Storage, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, _ = judged
    checkpoint = f"checkpoints/c1/{storage.list_dirs('checkpoints/c1/')[-1]}"
    rows = ("phone,phone 1,2,brand1", ",phone 2,2,brand1", "phone,phone 3,much,")
    header = "query,title,price,brand,query_code,code,cost_left,cost_right\n"
    table = header + "".join(f"{row},C1,c-1,1,2\n" for row in rows)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.encode())))
    assert ask(storage, "score", "--checkpoint", checkpoint) == DataError.exit_code
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line.get("error") for line in lines] == [None, "empty query", "feature price is not a finite number"]
    assert "score: 1 of 3 rows" in captured.err


FORMS = {
    "int8": ["--embed.output.dtype=int8"],
    "npy": ["--embed.output.format=npy", "--embed.output.dtype=fp32"],
    "cut": ["--embed.output.dimensions=6"],
    "filtered": ["--embed.catalogue.filter=market=de"],
    "numbers": ["--embed.catalogue.id=number"],
}


@pytest.mark.parametrize("form", FORMS)
def test_search_equals_exact_search_whatever_the_vectors_are(tmp_path: Path, form: str) -> None:
    """Titles in several scripts, empty ones with a text, ids that are numbers, rows that a filter leaves out."""
    titles = ["kettle größe 2", "手机 64 gb", "", "🙂 shoe", "phone\x1b[31m", "kettle größe 2", "drill"]
    columns: dict[str, list[Any]] = {
        "product_id": [f"p{n}" for n in range(7)],
        "number": [n + 10 for n in range(7)],
        "title": titles,
        "text": ["", "", "long text", "", "", "", ""],
        "market": ["de", "us", "de", "de", "us", "de", "de"],
    }
    workspace = open_storage(str(tmp_path / "workspace"))
    make_checkpoint(workspace, tmp_path)
    write_catalogue(tmp_path / "in", [pa.table(columns)])
    flags = [f"--workspace={tmp_path}/workspace", "--cycle=c0", "--backend=cpu", "--data.num-workers=1"]
    assert cli.main(["embed", *flags, f"--embed.catalogue.path={tmp_path}/in", *FORMS[form]]) == 0
    model = trnpipe.load_model(workspace=str(tmp_path / "workspace"), cycle="c0")
    kept = [n for n in range(7) if form != "filtered" or columns["market"][n] == "de"]
    names = columns["number" if form == "numbers" else "product_id"]
    (block,) = find_vectors(workspace, "c0").blocks(0)
    assert block[0]["id"].to_pylist() == [names[n] for n in kept]
    every = block[1].astype(np.float64)
    query = model.encode("größe 2")[: every.shape[1]].astype(np.float64)
    cosines = every @ (query / np.linalg.norm(query))
    hits = model.search("größe 2", top=5)
    assert [hit.cosine for hit in hits] == pytest.approx(np.sort(cosines)[::-1][:5], abs=1e-6)
    places = [names.index(hit.id) for hit in hits]
    assert [hit.title for hit in hits] == [titles[place] or "long text" for place in places]
    assert {hit.id for hit in model.search("GRÖSSE GRÖßE", by="words")} == {names[0], names[5]}


def test_search_and_encode_say_what_is_wrong(served: Storage) -> None:
    model = trnpipe.load_model(workspace=str(served.local_path("")))
    with pytest.raises(ConfigError, match="magic"):
        model.search("phone", by="magic")  # type: ignore[arg-type]
    for query, top in ((" ", 10), ("phone", 0)):
        with pytest.raises(ConfigError, match=f"top {top}"):
            model.search(query, top)
    with pytest.raises(ConfigError, match="kind 'title'"):
        model.encode("phone", kind="title")  # type: ignore[arg-type]
    for text in ("\udcff", 7, None):
        with pytest.raises(DataError, match="UTF-8"):
            model.encode([text])  # type: ignore[list-item]
    assert len(model.search("phone " * 10_000)) == 10
    assert len(model.search("phone", top=1000)) == len(model.index) == 101


def test_vectors_and_scores_that_are_no_numbers_are_refused(judged: tuple[Storage, Path], tmp_path: Path) -> None:
    storage, path = judged
    (step,) = storage.list_dirs("checkpoints/c1/")
    source = storage.local_path(f"checkpoints/c1/{step}")
    assert source is not None
    shutil.copytree(source, tmp_path / "bad")
    (tmp_path / "bad" / "MANIFEST.json").unlink()
    weights = load_file(tmp_path / "bad" / WEIGHTS)
    save_file({name: tensor * float("nan") for name, tensor in weights.items()}, tmp_path / "bad" / WEIGHTS)
    commit_dir(open_storage(str(tmp_path)), tmp_path / "bad", "broken", kind=KIND, fields={"step": 1, "cycle": "c1"})
    texts = tmp_path / "texts.txt"
    texts.write_text("phone\n")
    for words in (["encode", str(texts)], ["score", str(path)]):
        assert ask(storage, *words, "--checkpoint", str(tmp_path / "broken")) == NumericError.exit_code


def test_a_refused_cycle_says_how_it_can_be_searched(
    judged: tuple[Storage, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model encodes and scores; to be searched it must embed the catalogue, which the error says how to do."""
    storage, path = judged
    texts = tmp_path / "texts.txt"
    texts.write_text("phone\n")
    assert ask(storage, "encode", str(texts), "--cycle=c1") == 0
    assert ask(storage, "score", str(path), "--cycle=c1") == 0
    assert ask(storage, "search", "phone", "--cycle=c1") == ConfigError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    command = shlex.split(said.partition("trnpipe embed ")[2].partition(",")[0])
    assert command[:2] == ["--cycle", "c1"] and "then trnpipe search QUERY --cycle c1" in said
    flags = [f"--workspace={storage.local_path('')}", "--backend=cpu", f"--data.path={path}", "--data.num-workers=1"]
    assert cli.main(["embed", *command, *flags]) == 0
    assert ask(storage, "search", "phone", "--cycle=c1") == 0
    assert " 1 " in capsys.readouterr().out
