"""Exported folders: what is in them, and that an import gives back every bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from pipeline.checkpoint.store import Checkpoint, PublishedWeights
from pipeline.convert.exporting import ExportPlan, destination, write_export, write_tokenizer
from pipeline.convert.folder import Format
from pipeline.convert.importing import read_model, store_import
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import CheckpointError, ConfigError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.storage import open_storage
from pipeline.registry.checkpoints import Ancestor
from tests.convert.conftest import RETRY, Folder, given, source_of

WHOLE: tuple[Format, ...] = ("sentence-transformers", "safetensors")


@pytest.fixture
def checkpoint(folder: Folder) -> Checkpoint:
    folder.sentence()
    storage = open_storage(str(folder.path.parent / "workspace"))
    scratch = folder.path.parent / "scratch"
    return store_import(storage, folder.read(), settings_hash="s", code_version="v", scratch=scratch)[0]


def plan(format_: Format, **changes: Any) -> ExportPlan:
    return replace(ExportPlan(format_, 20, "relevance", (), Bucket(8, 12), 2), **changes)


Export = Callable[..., Path]


@pytest.fixture
def export(checkpoint: Checkpoint, tmp_path: Path) -> Export:
    def made(format_: Format, name: str = "exported", **changes: Any) -> Path:
        path = tmp_path / name
        with destination(str(path), retry=RETRY, stop=StopSignal(), scratch=tmp_path / f"s{name}", fields={}) as new:
            write_export(checkpoint, plan(format_, **changes), new, StopSignal())
        return path

    return made


@pytest.mark.parametrize("format_", WHOLE)
@pytest.mark.parametrize(("trained_head", "temperature"), [(True, 1.0), (True, 2.5), (False, 1.0)])
def test_an_import_of_an_export_is_the_same_model(
    checkpoint: Checkpoint, export: Export, tmp_path: Path, format_: Format, trained_head: bool, temperature: float
) -> None:
    assert not checkpoint.state.trained_head, "of an encoder alone: its head is random"
    published = PublishedWeights(uri="file:///mini/model.safetensors", sha256="0a" * 32)
    trained = {"trained_head": trained_head, "also_seen": {"f1": "dt=2026-01-01"}, "published": published}
    trained["temperature"] = temperature  # becomes part of the head
    object.__setattr__(checkpoint, "state", checkpoint.state.model_copy(update=trained))
    folder = export(format_)
    assert published.text in (folder / "README.md").read_text()
    model = read_model(source_of(folder), given(seed=77), tmp_path / "scratch")
    back, _ = store_import(
        open_storage(str(tmp_path / "other")), model, settings_hash="s", code_version="v", scratch=tmp_path / "tmp"
    )
    before, after = checkpoint.weights(), back.weights()
    before |= {name: before[name] / temperature for name in ("head.weight", "head.bias")}
    assert back.state.temperature == 1.0
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (back.state.model, back.state.inputs) == (checkpoint.state.model, checkpoint.state.inputs)
    assert (back.state.trained_head, back.state.also_seen) == (trained_head, checkpoint.state.also_seen)
    assert (back.state.max_tokens, back.tokenizer()) == (20, checkpoint.tokenizer())
    assert back.state.published == published
    parent = back.state.parent
    assert parent is not None and (parent.uri, parent.digest) == (checkpoint.uri, checkpoint.digest)
    assert back.state.origin is not None and back.state.origin.format == f"trnpipe {format_}"


def test_what_lies_in_the_folders(export: Export) -> None:
    shared = {"MANIFEST.json", "README.md", "trnpipe.json", "tokenizer.json", "tokenizer_config.json"}
    bert = shared | {"config.json", "model.safetensors", "relevance_head.safetensors"}
    sentence = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling"}
    for format_, names in (
        ("sentence-transformers", bert | sentence),
        ("safetensors", shared | {"model.safetensors"}),
        ("torchscript", shared | {"relevance-8x12.pt"}),
        ("onnx", bert | sentence | {"onnx"}),
    ):
        path = export(format_, format_)
        assert {found.name for found in path.iterdir()} == names
        assert all(found.stat().st_mode & 0o444 == 0o444 for found in path.rglob("*.*")), "others may read it"
    code = (path / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("PATH", str(path))
    found = dict[str, Any]()
    exec(code, found)  # noqa: S102 - that of the ONNX programs
    assert found["vectors"].shape == (1, 16)


def test_an_export_that_was_changed_is_refused_by_name(export: Export, tmp_path: Path) -> None:
    path = export("sentence-transformers")
    head = path / "relevance_head.safetensors"
    data = bytearray(head.read_bytes())
    data[-1] ^= 1
    head.write_bytes(data)
    (path / "README.md").write_text("my own words are no harm")
    with pytest.raises(CheckpointError, match=r"relevance_head.safetensors has \d+ bytes and xxh3_128"):
        read_model(source_of(path), given(), tmp_path)
    head.unlink()
    with pytest.raises(CheckpointError, match=r"relevance_head.safetensors does not exist"):
        read_model(source_of(path), given(), tmp_path)


def test_a_record_that_tells_of_more_than_there_is_is_refused(export: Export, tmp_path: Path) -> None:
    path = export("safetensors")
    (path / "MANIFEST.json").unlink()
    record = json.loads((path / "trnpipe.json").read_text())
    for changes, seen in (
        ({"model": record["model"] | {"num_layers": 10**9}}, "has 1000000002 layers, but its files have "),
        ({"model": record["model"] | {"hidden_size": 10**6}}, r"bert.* shape \["),
        ({"model": record["model"] | {"hidden_size": 10**9}}, "a model with hidden size 1000000000"),
        ({"inputs": record["inputs"] | {"vocab_size": 10**9}}, "tokenizer.json has "),
        (
            {"inputs": record["inputs"] | {"labels": ["a", "b", "c"], "label_gains": [0, 1, 2]}},
            r"head.weight: shape \[",
        ),
        ({"schema_version": 2}, "schema 2"),
        ({"weights": []}, "only a program"),
    ):
        (path / "trnpipe.json").write_text(json.dumps(record | changes))
        with pytest.raises(CheckpointError, match=seen):
            read_model(source_of(path), given(), tmp_path)
    (path / "trnpipe.json").write_text(json.dumps(record | {"weights": ["../../secret"]}))
    with pytest.raises(ConfigError, match="secret"):
        read_model(source_of(path), given(), tmp_path)


def test_a_checkpoint_is_not_imported_but_started_from(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"is already a trnpipe checkpoint(.|\n)*--train.start"):
        source_of(checkpoint.folder)


def test_a_tokenizer_without_a_frame_gets_one(folder: Folder, tmp_path: Path) -> None:
    """prepare accepts such a file: the program frames texts itself. Others need to be told."""
    content = json.loads(folder.tokenizer)
    content["post_processor"] = None
    bare = TextTokenizer(json.dumps(content).encode())
    write_tokenizer(tmp_path, bare, 20)
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert written.encode("red shoe").ids == bare.encode(["red shoe"]).ids.tolist()
    write_tokenizer(tmp_path, TextTokenizer(folder.tokenizer), 20)
    assert (tmp_path / "tokenizer.json").read_bytes() == folder.tokenizer
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["model_max_length"], config["pad_token"], config["cls_token"]) == (20, "[PAD]", "[CLS]")


def test_prefixes_are_prompts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    inputs = checkpoint.state.inputs.model_copy(update={"query_prefix": "query: ", "product_prefix": "passage: "})
    prefixed = replace(checkpoint, state=checkpoint.state.model_copy(update={"inputs": inputs}))
    write_export(prefixed, plan("sentence-transformers"), tmp_path, StopSignal())
    content = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    assert content["prompts"] == {"query": "query: ", "document": "passage: "}
    assert read_model(source_of(tmp_path), given(), tmp_path / "scratch").spec == inputs


def test_a_stop_ends_an_export(checkpoint: Checkpoint, tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("a test")
    (tmp_path / "new").mkdir()
    with pytest.raises(Preempted):
        write_export(checkpoint, plan("safetensors"), tmp_path / "new", stop)


def test_the_card(export: Export, checkpoint: Checkpoint) -> None:
    ancestors = (
        Ancestor(
            "checkpoints/c2/step-9",
            "d" * 64,
            "c2",
            9,
            "2026-01-02",
            figures={"loss": 1.0, "macro_f1": 0.5, "ndcg@10": 0.75},
        ),
        Ancestor("checkpoints/c1/step-5", "e" * 64, "c1", 5, note="it came |from| <afar>\n# heading"),
    )
    text = (export("torchscript", ancestors=ancestors) / "README.md").read_text()
    for expected in (
        "- ndcg@10: 0.75\n- macro_f1: 0.5\n- loss: 1\n",
        f"- checkpoints/c2/step-9, data to 2026-01-02, digest {'d' * 64}\n",
        r"it came \|from\| \<afar\> \# heading",
        "them to 20 tokens",
        "no: 0, yes: 1",
        "Additional features: price and 0 categories (a missing number is -3e+38)",
        "query int32 [2, 8], product int32 [2, 12], numeric float32 [2, 1]",
        checkpoint.digest,
        'program = torch.jit.load("PATH/relevance-8x12.pt")',
    ):
        assert expected in text, f"{expected}\n{text}"
    assert text.startswith('---\nlibrary_name: "pytorch"\n') and "\n# heading" not in text
    card = (export("sentence-transformers", name="other") / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    assert "pooler.dense" in card and [line.split()[0] for line in code.split("\n") if line] == ["from", "vectors"]
