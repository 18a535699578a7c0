"""Programs of static shapes, loaded where there is no trnpipe, give the model's own numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.convert.exporting import Shapes, default_shapes, write_programs
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
SHAPES = Shapes((6, 12), (Bucket(6, 6), Bucket(6, 12)), batch_size=3)

READER = """
import json, sys
import torch
torch.set_num_threads(1)
result = {}
for path, tensors in torch.load(sys.argv[1], weights_only=True).items():
    result[path] = torch.jit.load(path)(*tensors).tolist()
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
    """With and without features, every shape; inputs that were not those of the trace."""
    asked: dict[str, tuple[torch.Tensor, ...]] = {}
    expected: dict[str, torch.Tensor] = {}
    torch.manual_seed(1)
    for name, spec in SPECS.items():
        shapes = SHAPES if name == "features" else Shapes((), SHAPES.buckets[-1:], SHAPES.batch_size)
        folder = tmp_path / name
        folder.mkdir(parents=True)
        model = random_model(spec)
        files = write_programs(folder, random_model(spec), spec, shapes, step=lambda: None)
        names = ["encoder-6", "encoder-12", "relevance-6x6", "relevance-6x12"]
        assert [file.file.partition(".")[0] for file in files] == names[-len(files) :]
        for file in files:
            inputs = [texts(spec, one.shape[1]) for one in file.inputs if one.name in ("tokens", "query", "product")]
            numeric = torch.randn(3, len(spec.numeric))
            categorical = torch.tensor([[0, 8], [4, 1], [2, 2]], dtype=torch.int32)[:, : len(spec.categorical_ids)]
            path = str(folder / file.file)
            with torch.no_grad():
                if file.file.startswith("encoder"):
                    expected[path] = unit(model.encoder(inputs[0]))
                else:
                    expected[path] = model(RelevanceInputs(inputs[0], inputs[1], numeric, categorical)).logits
            features = [numeric, categorical] if file.inputs[-1].name == "categorical" else []
            asked[path] = (*inputs, *features) if file.file.startswith("relevance") else (inputs[0],)
            assert [tuple(one.shape) for one in file.inputs] == [tuple(tensor.shape) for tensor in asked[path]]
    torch.save(asked, tmp_path / "asked.pt")
    command = [sys.executable, "-I", "-c", READER, str(tmp_path / "asked.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers.keys() == expected.keys() and len(answers) == 5
    for path, answer in answers.items():
        torch.testing.assert_close(torch.tensor(answer), expected[path], rtol=0, atol=1e-5, msg=path)


def test_a_program_that_differs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["plain"]

    class Wrong(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.full((3, 16), 0.25 + 2e-5)

    monkeypatch.setattr(torch.jit, "load", lambda path: Wrong())
    with pytest.raises(RuntimeError, match=r"encoder-6\.pt differs by"):
        write_programs(tmp_path, random_model(spec), spec, SHAPES, step=lambda: None)


def test_default_shapes_are_those_of_the_data() -> None:
    shapes = default_shapes([Bucket(16, 32), Bucket(8, 16), Bucket(8, 32)], 4)
    assert shapes == Shapes((16, 32), (Bucket(8, 16), Bucket(8, 32), Bucket(16, 32)), 4)
