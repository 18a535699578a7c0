"""Programs of static shapes, loaded where there is no trnpipe, give the model's own numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.convert.exporting import ExportPlan, write_program
from pipeline.core.batch_order import Bucket
from pipeline.model.config import InputSpec
from pipeline.model.ops import l2_normalize
from pipeline.model.relevance import RelevanceInputs, RelevanceModel, build_model
from tests.convert.conftest import MODEL

PLAIN = InputSpec(vocab_size=40, pad_id=3, labels=("a", "b", "c"), label_gains=(0, 0.5, 1))
SPECS = {
    "features": PLAIN.model_copy(update={"numeric": ("n", "m"), "categorical_ids": (5, 9)}),
    "plain": PLAIN,
}
PLAN = ExportPlan("torchscript", 12, "relevance", (), Bucket(6, 12), 3)

READER = """
import json, sys
import torch
torch.set_num_threads(1)
program = torch.jit.load(sys.argv[1])
asked = torch.load(sys.argv[2], weights_only=True)
result = {name: getattr(program, name)(*tensors).tolist() for name, tensors in asked.items()}
assert not [name for name in sys.modules if name.split(".")[0] in ("pipeline", "torch_xla")]
json.dump(result, sys.stdout)
"""


def random_model(spec: InputSpec) -> RelevanceModel:
    model = build_model(MODEL.model_copy(update={"num_layers": 1}), spec, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def texts(spec: InputSpec, length: int) -> torch.Tensor:
    """Return a full text, a short one, and one of padding alone."""
    tokens = torch.randint(4, spec.vocab_size, (3, length), dtype=torch.int32)
    tokens[1, 3:] = spec.pad_id
    tokens[2] = spec.pad_id
    return tokens


@pytest.mark.stage
@pytest.mark.parametrize("name", SPECS)
def test_a_fresh_process_without_trnpipe_gets_the_same_numbers(tmp_path: Path, name: str) -> None:
    """With inputs that were not those of the trace."""
    torch.manual_seed(1)
    spec, path = SPECS[name], tmp_path / "program.pt"
    write_program(path, random_model(spec), spec, PLAN)
    model, query, product = random_model(spec), texts(spec, 6), texts(spec, 12)
    numeric = torch.randn(3, len(spec.numeric))
    categorical = torch.tensor([[0, 8], [4, 1], [2, 2]], dtype=torch.int32)[:, : len(spec.categorical_ids)]
    features = (numeric, categorical) if name == "features" else ()
    asked = {"forward": (query, product, *features), "embed_query": (query,), "embed_product": (product,)}
    torch.save(asked, tmp_path / "asked.pt")
    command = [sys.executable, "-I", "-c", READER, str(path), str(tmp_path / "asked.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    found = {key: torch.tensor(value) for key, value in json.loads(done.stdout).items()}
    with torch.no_grad():
        expected = {
            "forward": model(RelevanceInputs(query, product, numeric, categorical)).logits,
            "embed_query": l2_normalize(model.encoder(query)),
            "embed_product": l2_normalize(model.encoder(product)),
        }
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_program_that_differs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return torch.full((3, 3), 100.0)

    monkeypatch.setattr(torch.jit, "load", lambda path: Wrong())
    with pytest.raises(RuntimeError, match=r"forward of program\.pt differs from"):
        write_program(tmp_path / "program.pt", random_model(PLAIN), PLAIN, PLAN)
