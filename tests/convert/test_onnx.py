"""ONNX programs, run by ONNX Runtime, give the model's own numbers for texts of any length."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.convert import exporting
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.data.shards import Arrays
from pipeline.model.ops import l2_normalize
from pipeline.model.relevance import RelevanceInputs
from tests.convert.test_programs import SPECS, random_model

onnxruntime = pytest.importorskip("onnxruntime")
onnx_program = pytest.importorskip("pipeline.convert.onnx_program")
pytestmark = pytest.mark.stage
PLAN = exporting.ExportPlan("onnx", 12, "relevance", (), Bucket(6, 12), 1)


def rows_of(name: str, count: int, tokens: int) -> Arrays:
    query, product, *features = (
        each.numpy() for each in exporting.sample_inputs(SPECS[name], Bucket(6, tokens), count)
    )
    if not features:
        features = [np.zeros((count, 0), np.float32), np.zeros((count, 0), np.int32)]
    return {"query": query, "product": product, "numeric": features[0], "categorical": features[1]}


@pytest.mark.parametrize("name", SPECS)
def test_texts_of_other_lengths_than_those_it_was_traced_with(name: str, tmp_path: Path) -> None:
    spec, model = SPECS[name], random_model(SPECS[name])
    traced = rows_of(name, 5, 9 if name == "plain" else 6)  # with 6, queries and products have the same length
    assert onnx_program.write_onnx(tmp_path, model, spec, traced) < 1e-5
    sessions = [onnxruntime.InferenceSession(path) for path in sorted((tmp_path / "onnx").iterdir())]
    rows = rows_of(name, 3, 12)
    query, product = (torch.from_numpy(rows[each]).long() for each in ("query", "product"))
    mask = product != spec.pad_id
    texts = {"input_ids": product.where(mask, 7).numpy(), "attention_mask": mask.long().numpy()}
    _, vectors = sessions[0].run(None, texts)
    with torch.no_grad():
        assert np.allclose(vectors, l2_normalize(model.encoder(product)).numpy(), atol=1e-5)
        features = torch.from_numpy(rows["numeric"]), torch.from_numpy(rows["categorical"])
        expected = model(RelevanceInputs(query, product, *features)).logits.numpy()
    given = {"query_ids": query, "product_ids": product, "numeric": features[0], "categorical": features[1].long()}
    known = {each.name for each in sessions[1].get_inputs()}
    assert known == {"query_ids", "product_ids", *(("numeric", "categorical") if name == "features" else ())}
    (logits,) = sessions[1].run(None, {each: given[each].numpy() for each in known})
    assert np.allclose(logits, expected, atol=1e-4)


def test_a_program_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_program, "TOLERANCE", 0.0)
    with pytest.raises(DataError, match=r"model.onnx differs from the model by .*e-") as refused:
        onnx_program.write_onnx(tmp_path, random_model(SPECS["plain"]), SPECS["plain"], rows_of("plain", 2, 9))
    assert "--format torchscript" in str(refused.value.next_command)


def test_a_program_that_computes_nan_is_refused(tmp_path: Path) -> None:
    model = random_model(SPECS["plain"])
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(torch.nan)
    with pytest.raises(DataError, match=r"model.onnx differs from the model by inf"):
        onnx_program.write_onnx(tmp_path, model, SPECS["plain"], rows_of("plain", 2, 9))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pipeline.convert.onnx_program", None)
    with pytest.raises(ConfigError, match="--format onnx needs onnxruntime") as refused:
        exporting._write_onnx(tmp_path, random_model(SPECS["plain"]), SPECS["plain"], PLAN)
    assert "pip install 'onnx>=1.19' 'onnxscript>=0.5' 'onnxruntime>=1.22'" in str(refused.value.next_command)
