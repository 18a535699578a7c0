"""Scripts of examples/: an adopted copy of two other lines has the same losses."""

import contextlib
import difflib
import io
import os
import runpy
from pathlib import Path

import pytest

from pipeline.parallel import mesh
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.zygote import ROOT

EXAMPLES = [ROOT / "examples" / path.name for path in sorted((ROOT / "examples/adopted").glob("*.py"))]
PLAIN = ("from torch.nn.parallel import DistributedDataParallel", "model = DistributedDataParallel(model)")
ADOPTED = ("import trnpipe as trn", "model = trn.transform(model)")
PLAIN_LIGHTNING = ("from lightning.pytorch.strategies import DDPStrategy", "strategy=DDPStrategy(),")
ADOPTED_LIGHTNING = (ADOPTED[0], "strategy=trn.Strategy(),")
NEEDS = {"bert": "transformers", "llama": "transformers", "vit": "transformers", "lightning_mlp": "lightning"}


def losses(text: str) -> list[float]:
    """Of rank 0; `trnpipe launch` puts its number before each line."""
    lines = [line.removeprefix("[0] ") for line in text.splitlines()]
    return [float(line.split()[-1]) for line in lines if line.startswith("step ")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_adopted_copy_differs_by_two_lines(path: Path) -> None:
    plain, adopted = (file.read_text().splitlines() for file in (path, path.parent / "adopted" / path.name))
    lines = [line for line in difflib.ndiff(plain, adopted) if line[0] in "+-"]
    gone, come = (tuple(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
    lightning = path.stem == "lightning_mlp"
    assert (gone, come) == ((PLAIN_LIGHTNING, ADOPTED_LIGHTNING) if lightning else (PLAIN, ADOPTED))


def test_the_documents_show_these_lines() -> None:
    text = (ROOT / "docs" / "parallel.md").read_text()
    assert all(f"\n-{line}\n" in text for line in PLAIN) and all(f"\n+{line}\n" in text for line in ADOPTED)


def run_both(*names: str) -> dict[str, list[list[float]]]:
    """In a rank: losses of each script and of its adopted copy. `name:port`, as rank 0 makes a store for each."""
    found: dict[str, list[list[float]]] = {}
    ranks = os.environ["WORLD_SIZE"]
    for number, word in enumerate(names):
        folder, name = ("examples", "examples/adopted")[number % 2], word.partition(":")[0]
        os.environ["WORLD_SIZE"] = ranks  # Lightning's environment takes it away at its end
        os.environ["MASTER_PORT"] = word.partition(":")[2]
        mesh._mesh = None
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(ROOT / folder / f"{name}.py"), run_name="__main__")
        found.setdefault(name, []).append(losses(out.getvalue()))
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("mlp", "ddp"),
        pytest.param(("bert", "llama", "vit"), marks=pytest.mark.thorough),
        pytest.param(("lightning_mlp",), marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_losses_of_the_adopted_are_those_of_the_plain(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        pytest.importorskip(NEEDS.get(name, "torch"))
    words = [f"{name}:{free_port()}" for name in names for _ in range(2)]
    for name, (plain, adopted) in run_ranks("tests.parallel.test_examples:run_both", 2, tmp_path, *words)[0].items():
        assert len(plain) >= 8 and plain[-1] < plain[0], name
        assert adopted == pytest.approx(plain, abs=1e-6), name


def run_native() -> list[float]:
    """In a rank: the losses of the script for any device, on the host."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples" / "native_ddp.py"), run_name="__main__")
    return losses(out.getvalue())


def test_the_script_for_any_device_has_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    two, one = (run_ranks("tests.parallel.test_examples:run_native", ranks, tmp_path / str(ranks)) for ranks in (2, 1))
    assert len(two[0]) == 8 and two[0][-1] < two[0][0]
    assert two[0] == pytest.approx(one[0], abs=1e-6)
