"""What scripts written for plain DDP do with a spread model: refused, warned of once, or as with one process."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trnpipe
from pipeline.core.errors import ConfigError
from pipeline.parallel import tensors
from tests.kit.ranks import run_ranks

CASES = "tests.parallel.test_tensors"
WHOLE = '{"shard_degree": 1}'


def dense() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_of(model: nn.Module, part: int = 0, parts: int = 1, step: int = 0) -> Tensor:
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).tensor_split(parts)[part]
    found: Tensor = model(rows).square().sum(1).mean()
    return found


def spread(plan: str) -> nn.Sequential:
    trnpipe.init(json.loads(plan))
    model: nn.Sequential = trnpipe.transform(dense())
    return model


def said_of(habit: Callable[[], object]) -> str:
    """The first line that it writes to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        habit()
    return said.getvalue().partition("\n")[0]


def reading(plan: str) -> dict[str, str]:
    """By habit what is said of it, as if it were the first."""
    trnpipe.init(json.loads(plan))
    model: Any = trnpipe.transform(dense())
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    grad: Any = model[0].weight.grad
    habits: dict[str, Callable[[], object]] = {
        "norm": lambda: grad.norm().item(),
        "mean": lambda: float(model[0].weight.data.mean()),
        "state": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "whole": lambda: grad.full_tensor().norm().item(),
        "clipped by trn": lambda: float(trnpipe.clip_grad_norm(model, 1e9)),
        "counted": lambda: sum(one.numel() for one in model.parameters()),
    }
    found = {}
    for name, habit in habits.items():
        tensors._warned.clear()
        found[name] = said_of(habit)
        assert not said_of(habit), "once in a process"
    return found


@pytest.mark.parametrize(("plan", "warned"), [("{}", {"norm", "mean", "state"}), (WHOLE, set())])
def test_what_a_rank_reads_of_its_own_part_is_warned_of_once(tmp_path: Path, plan: str, warned: set[str]) -> None:
    first, second = run_ranks(f"{CASES}:reading", 2, tmp_path, plan)
    assert {name for name, text in first.items() if text} == warned
    for name in warned:
        kind = "pickled" if name == "state" else "a value was read"
        assert first[name].startswith("trnpipe: test_tensors.py, line ") and kind in first[name]
    assert not any(second.values()), "rank 0 says it"


def steps(name: str, model: nn.Module, part: int = 0, parts: int = 1) -> list[float]:
    """Of the global loss, before each step."""
    kind = Scaled if name == "Scaled" else getattr(torch.optim, name)
    optimizer: Any = kind(model.parameters(), lr=0.05)
    found = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, part, parts, step)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss = optimizer.step(closure).detach().clone()
        if parts > 1:
            torch.distributed.all_reduce(loss)
        found.append(float(loss) / parts)
    return found


class Scaled(torch.optim.Optimizer):
    """Steps of one length, as LARS has them; somebody's own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():  # type: ignore[no-untyped-call]
            loss = closure()
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad, alpha=-group["lr"] / one.grad.norm().item())
        return loss


OPTIMIZERS = ("Adafactor", "Rprop", "Scaled", "AdamW", "LBFGS", "NAdam", "RMSprop", "SGD")


def optimized(plan: str) -> dict[str, Any]:
    """By optimizer the largest difference from one process, or the class of its error; rank and size of the data."""
    place = trnpipe.init(json.loads(plan))
    found: dict[str, Any] = {}
    for name in OPTIMIZERS:
        alone = steps(name, dense())
        model = trnpipe.transform(dense())
        try:
            losses = steps(name, model, place.data_rank, place.data_size)
        except ConfigError as error:
            found[name] = str(error).splitlines()[0]
        else:
            found[name] = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    return found


@pytest.mark.parametrize(
    ("plan", "refused"), [("{}", ("Adafactor", "Rprop", "Scaled")), (WHOLE, ("Adafactor", "Rprop"))]
)
def test_an_optimizer_that_needs_whole_parameters_is_refused_and_others_are_those_of_one_process(
    tmp_path: Path, plan: str, refused: tuple[str, ...]
) -> None:
    for found in run_ranks(f"{CASES}:optimized", 2, tmp_path, plan):
        for name in OPTIMIZERS:
            if name in refused:
                assert name in str(found[name]), found
            else:
                assert found[name] < 1e-5, (name, found)
