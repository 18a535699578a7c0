"""A tiny trained workspace, checkpoints made of its weights, and `trnpipe evaluate` in this process."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.store import KIND, STATE, WEIGHTS, TrainState
from pipeline.cli import main
from pipeline.context import StageResult, load_result
from pipeline.evaluate.report import EvaluationReport, load_report
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.records import HistoryEntry, Pointer, read_history, read_pointer
from tests.fault.harness import DATA, MODEL, TRAIN

MODEL_NAME = "relevance"
FLAGS = (
    *DATA,
    *MODEL,
    *TRAIN,
    "--backend=cpu",
    "--data.synthetic.num-queries=60",
    "--data.synthetic.num-days=2",
    "--data.test-fraction=0.3",
    "--data.slices=brand",
    "--train.max-steps=40",
    "--train.evaluate-every=0",
    "--gate.min-queries=10",
    "--gate.resamples=300",
    "--gate.drops=ndcg@10=0.05,macro_f1=0.05",
    "--gate.slice-drops=ndcg@10=0.1",
    "--gate.first-baselines=warn",  # 40 steps do not make a model that beats BM25
    "--no-evaluate.baselines.boosting",  # a second of each test; test_evaluate_baselines.py has it
)
Weights = dict[str, torch.Tensor]


def last_wins(flags: tuple[str, ...]) -> list[str]:
    return list({flag.partition("=")[0]: flag for flag in flags}.values())


@dataclass
class Case:
    """A workspace of its own."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    flags: tuple[str, ...] = FLAGS
    said: list[str] = field(default_factory=list)

    @cached_property
    def storage(self) -> Storage:
        return open_storage(str(self.folder / "workspace"))

    def run(self, *flags: str, stage: str = "evaluate", cycle: str = "c1", code: int = 0) -> str:
        """What it printed; asserts the exit code."""
        given = last_wins((*self.flags, f"--workspace={self.folder}/workspace", f"--cycle={cycle}", *flags))
        ended = main([stage, *given])
        captured = self.capsys.readouterr()
        assert ended == code, f"exit {ended}, expected {code}\n{captured.out}\n{captured.err}"
        return captured.out + captured.err

    def trained(self, cycle: str = "c1") -> str:
        result = load_result(self.storage, cycle, "train")
        assert result is not None
        return result.outputs["checkpoint"]

    def made(self, name: str, change: Callable[[Weights], object] = lambda weights: None, **state: Any) -> str:
        """A checkpoint like the trained one, with other weights or another state; its prefix."""
        source = self.storage.local_path(self.trained())
        assert source is not None
        staging = Path(mkdtemp(dir=self.folder))
        for file in source.iterdir():
            shutil.copy(file, staging / file.name)
        (staging / "MANIFEST.json").unlink()
        weights = load_file(staging / WEIGHTS)
        change(weights)
        save_file({key: value.contiguous() for key, value in weights.items()}, staging / WEIGHTS)
        told = TrainState.model_validate_json((staging / STATE).read_bytes())
        (staging / STATE).write_text(told.model_copy(update={"cycle": name, **state}).model_dump_json())
        prefix = f"checkpoints/{name}/step-{told.step}"
        commit_dir(self.storage, staging, prefix, kind=KIND, fields={"step": told.step, "cycle": name})
        return prefix

    @property
    def pointer(self) -> Pointer | None:
        found = read_pointer(self.storage, MODEL_NAME)
        return found[0] if found else None

    @property
    def history(self) -> list[tuple[str, str]]:
        return [(entry.action, entry.checkpoint) for entry in self.entries]

    @property
    def entries(self) -> tuple[HistoryEntry, ...]:
        return read_history(self.storage, MODEL_NAME)

    def report(self, cycle: str = "c1") -> EvaluationReport:
        found = load_report(self.storage, cycle)
        assert found is not None
        return found

    def result(self, cycle: str = "c1") -> StageResult | None:
        return load_result(self.storage, cycle, "evaluate")


def noisy(share: float) -> Callable[[Weights], object]:
    """Weights of which a share is noise of the same size."""

    def change(weights: Weights) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in weights.items():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.std(correction=0)
            weights[name] = (1 - share) * tensor + share * noise

    return change


def not_a_number(weights: Weights) -> None:
    """One NaN in the head: every score is one."""
    name = next(name for name in weights if name.endswith("head.bias"))
    weights[name][0] = float("nan")
