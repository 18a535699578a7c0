"""An imported model is a checkpoint like any other."""

import re
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.convert.importing import ForeignModel, read_model, store_import
from pipeline.core.errors import CheckpointError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.io.storage import Storage, open_storage
from pipeline.model.hf import from_hf, to_hf
from pipeline.model.relevance import build_model
from tests.convert.conftest import MODEL, Folder, given, source_of


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "workspace"))


def store(workspace: Storage, model: ForeignModel, folder: Folder) -> tuple[Checkpoint, bool]:
    return store_import(workspace, model, settings_hash="s", code_version="v", scratch=folder.path.parent / "scratch")


def test_a_checkpoint_as_training_writes_it(folder: Folder, workspace: Storage) -> None:
    folder.sentence()
    model = folder.read()
    checkpoint, already = store(workspace, model, folder)
    assert not already
    assert re.fullmatch(r"checkpoints/import-model-[0-9a-f]{8}/step-0", checkpoint.prefix)
    state = checkpoint.state
    assert (state.step, state.watermark, state.partitions, state.parent) == (0, "", {}, None)
    assert (state.max_tokens, state.model, state.inputs) == (20, model.config, model.spec)
    assert state.origin == model.origin and state.tokenizer_fingerprint == model.tokenizer.fingerprint
    assert checkpoint.tokenizer() == folder.tokenizer
    assert checkpoint.optimizer() == {}
    template = build_model(state.model, state.inputs, 0).state_dict()
    found = from_hf(checkpoint.weights(), template, source="x")
    assert found.keys() == model.weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.weights.items())
    assert sorted(path.name for path in checkpoint.folder.iterdir()) == sorted(
        [MANIFEST_NAME, "config.json", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"]
    )
    assert not any((folder.path.parent / "scratch").rglob("*.safetensors")), "nothing is left in scratch"


def test_the_same_import_is_found_again_and_another_one_is_another(folder: Folder, workspace: Storage) -> None:
    checkpoint, _ = store(workspace, folder.read(), folder)
    before = {path.name: path.stat().st_mtime_ns for path in checkpoint.folder.iterdir()}
    again, already = store(workspace, folder.read(), folder)
    assert already and again.digest == checkpoint.digest
    assert {path.name: path.stat().st_mtime_ns for path in again.folder.iterdir()} == before
    others = [
        folder.read(seed=6),
        folder.read(model=MODEL.model_copy(update={"pooling": "cls"})),
        folder.read(model=MODEL.model_copy(update={"interaction_size": 12})),
    ]
    folder.save(**{"embeddings.LayerNorm.bias": torch.ones(16)})
    found = [store(workspace, model, folder) for model in [*others, folder.read()]]
    assert not any(already for _, already in found)
    assert len({checkpoint.prefix, *(one.prefix for one, _ in found)}) == 5


@pytest.mark.fault
def test_a_damaged_or_half_written_import_is_written_again(folder: Folder, workspace: Storage) -> None:
    model = folder.read()
    checkpoint, _ = store(workspace, model, folder)
    path = checkpoint.folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        open_checkpoint(workspace, checkpoint.prefix, folder.path / "cache")
    mended, already = store(workspace, model, folder)
    assert not already and mended.digest == checkpoint.digest
    (checkpoint.folder / MANIFEST_NAME).unlink()
    assert store(workspace, model, folder)[0].digest == checkpoint.digest
    weights = to_hf(model.weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in mended.weights().items())


def test_from_s3_to_s3(folder: Folder, s3_uri: str, tmp_path: Path) -> None:
    folder.sentence()
    names = [path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*") if path.is_file()]
    open_storage(s3_uri).upload_dir("models/theirs", folder.path, names)
    model = read_model(source_of(f"{s3_uri}/models/theirs"), given(), tmp_path / "downloads")
    workspace = open_storage(f"{s3_uri}/workspace")
    checkpoint, already = store(workspace, model, folder)
    assert not already and checkpoint.uri.startswith(f"{s3_uri}/workspace/checkpoints/import-theirs-")
    assert store(workspace, model, folder)[1]
    single = source_of(f"{s3_uri}/models/theirs/model.safetensors")
    bare = read_model(single, given(tokenizer=model.tokenizer), tmp_path / "downloads")
    for name, tensor in folder.read().weights.items():
        assert torch.equal(tensor, model.weights[name]) and torch.equal(tensor, bare.weights[name])


def test_a_strange_name_makes_a_plain_one(tmp_path: Path, workspace: Storage) -> None:
    folder = Folder(tmp_path / "all MiniLM (v2) übung..")
    checkpoint, _ = store(workspace, folder.read(), folder)
    assert re.fullmatch(r"checkpoints/import-all-MiniLM-v2-bung-[0-9a-f]{8}/step-0", checkpoint.prefix)
