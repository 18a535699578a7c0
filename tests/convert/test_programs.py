"""Programs of static shapes, loaded where there is no trnpipe, give the model's own numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.convert.exporting import ExportPlan, program_name, write_program
from pipeline.core.batch_order import Bucket
from pipeline.model.config import InputSpec
from pipeline.model.ops import unit
from pipeline.model.relevance import RelevanceInputs, RelevanceModel, build_model
from tests.convert.conftest import MODEL

SPECS = {
    "features": InputSpec(
        vocab_size=40,
        pad_id=3,
        labels=("a", "b", "c"),
        label_gains=(0, 0.5, 1),
        numeric=("n", "m"),
        categorical_ids=(5, 9),
    ),
    "plain": InputSpec(vocab_size=40, pad_id=0, labels=("a", "b"), label_gains=(0, 1)),
}
PLAN = ExportPlan("torchscript", 12, "relevance", (), "bert", Bucket(6, 12), 3)

READER = """
import json, sys
import torch
torch.set_num_threads(1)
result = {}
for path, inputs in torch.load(sys.argv[1], weights_only=True).items():
    program = torch.jit.load(path)
    result[path] = {name: getattr(program, name)(*tensors).tolist() for name, tensors in inputs.items()}
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
    """One full, one short, one of padding alone."""
    tokens = torch.randint(4, spec.vocab_size, (3, length), dtype=torch.int32)
    tokens[1, 3:] = spec.pad_id
    tokens[2] = spec.pad_id
    return tokens


@pytest.mark.stage
def test_a_fresh_process_without_trnpipe_gets_the_same_numbers(tmp_path: Path) -> None:
    """With and without features; inputs that were not those of the trace."""
    asked: dict[str, dict[str, tuple[torch.Tensor, ...]]] = {}
    expected: dict[str, dict[str, torch.Tensor]] = {}
    torch.manual_seed(1)
    for name, spec in SPECS.items():
        (tmp_path / name).mkdir()
        path = tmp_path / name / program_name(PLAN.bucket)
        write_program(path, random_model(spec), spec, PLAN)
        model, query, product = random_model(spec), texts(spec, 6), texts(spec, 12)
        numeric = torch.randn(3, len(spec.numeric))
        categorical = torch.tensor([[0, 8], [4, 1], [2, 2]], dtype=torch.int32)[:, : len(spec.categorical_ids)]
        features = (numeric, categorical) if name == "features" else ()
        asked[str(path)] = {
            "forward": (query, product, *features),
            "embed_query": (query,),
            "embed_product": (product,),
        }
        with torch.no_grad():
            expected[str(path)] = {
                "forward": model(RelevanceInputs(query, product, numeric, categorical)).logits,
                "embed_query": unit(model.encoder(query)),
                "embed_product": unit(model.encoder(product)),
            }
    torch.save(asked, tmp_path / "asked.pt")
    command = [sys.executable, "-I", "-c", READER, str(tmp_path / "asked.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for place, tensors in expected.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(torch.tensor(answers[place][name]), tensor, rtol=0, atol=1e-5)


def test_a_program_that_differs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return torch.full((3, 2), 100.0)

    monkeypatch.setattr(torch.jit, "load", lambda path: Wrong())
    with pytest.raises(RuntimeError, match=r"forward of program\.pt differs by"):
        write_program(tmp_path / "program.pt", random_model(SPECS["plain"]), SPECS["plain"], PLAN)
