"""Scripts of examples/: each runs under the launcher, and its adopted copy of two other lines has the same losses."""

import contextlib
import difflib
import io
import os
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.parallel import adopt
from tests.ports import free_port
from tests.ranks import run_ranks
from tests.zygote import ROOT, Forked

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PLAIN = ("from torch.nn.parallel import DistributedDataParallel", "model = DistributedDataParallel(model)")
ADOPTED = ("import trnpipe as trn", "model = trn.transform(model)")
NEEDS = {"bert": "transformers", "llama": "transformers", "vit": "transformers", "lightning_mlp": "lightning"}
UNDER_A_MINUTE_S = 60.0


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_adopted_copy_differs_by_two_lines(path: Path) -> None:
    plain, adopted = (file.read_text().splitlines() for file in (path, path.parent / "adopted" / path.name))
    lines = [line for line in difflib.ndiff(plain, adopted) if line[0] in "+-"]
    gone, come = ([line[2:].strip() for line in lines if line[0] == sign] for sign in "-+")
    if path.stem == "lightning_mlp":
        assert gone == ["from lightning.pytorch.strategies import DDPStrategy", "strategy=DDPStrategy(),"]
        assert come == ["import trnpipe as trn", "strategy=trn.Strategy(),"]
    else:
        assert (tuple(gone), tuple(come)) == (PLAIN, ADOPTED)


def run_both(*names: str) -> dict[str, list[list[float]]]:
    """In a rank: losses of each script and of its adopted copy. `name:port`, as rank 0 makes a store for each."""
    found: dict[str, list[list[float]]] = {}
    ranks = os.environ["WORLD_SIZE"]
    for number, word in enumerate(names):
        folder, name = ("examples", "examples/adopted")[number % 2], word.partition(":")[0]
        os.environ["WORLD_SIZE"] = ranks  # Lightning's environment takes it away at its end
        os.environ["MASTER_PORT"] = word.partition(":")[2]
        adopt._mesh = None
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(ROOT / folder / f"{name}.py"), run_name="__main__")
        found.setdefault(name, []).append(losses(out.getvalue()))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [("mlp", "ddp"), ("bert", "llama", "vit"), pytest.param(("lightning_mlp",), marks=pytest.mark.thorough)],
    ids=" ".join,
)
def test_losses_of_the_adopted_are_those_of_the_plain(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        pytest.importorskip(NEEDS.get(name, "torch"))
    words = [f"{name}:{free_port()}" for name in names for _ in range(2)]
    for name, (plain, adopted) in run_ranks("tests.parallel.test_examples:run_both", 2, tmp_path, *words)[0].items():
        assert len(plain) >= 8 and plain[-1] < plain[0], name
        assert adopted == pytest.approx(plain, abs=1e-6), name


@pytest.mark.thorough
@pytest.mark.parametrize("path", [*EXAMPLES, *(ROOT / "examples" / "adopted").glob("*.py")], ids=str)
def test_each_runs_under_the_launcher(tmp_path: Path, path: Path) -> None:
    if find_spec(NEEDS.get(path.stem, "torch")) is None:
        pytest.skip(f"no {NEEDS[path.stem]}")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["launch", "--launch.processes", "2", "--", str(path)]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        run = Forked("pipeline", words, env=env, cwd=tmp_path, stdout=out, stderr=err)
        assert run.wait(UNDER_A_MINUTE_S) == 0, (tmp_path / "err").read_text()
    assert len(losses((tmp_path / "out").read_text())) >= 8
