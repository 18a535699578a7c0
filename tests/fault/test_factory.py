"""The whole cycle with the encoders of examples/own_encoder.py: killed, resumed, judged, embedded, exported, traced."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.backends.xla_process import needs_xla
from tests.fault.harness import ON_XLA, ROOT, TINY, UNJUDGED, Place, again_when_late, reference
from tests.fault.kills import Moment, kill_at

pytestmark = pytest.mark.slow
PLACE = "examples.own_encoder"
SHORT = ("--train.max-steps=40", "--train.evaluate-every=20", "--checkpoint.every-steps=10")
OWN = (*TINY, *SHORT, f"--model.factory={PLACE}:build", "--model.hidden-size=32", "--embed.buckets=16,48")
DISTILBERT = {"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
OF_TRANSFORMERS = (
    f"--model.factory={PLACE}:transformers_model",
    f"--model.factory-options={json.dumps(DISTILBERT)}",
    "--model.hidden-size=32",
)


@again_when_late
def test_a_cycle_that_is_killed_in_between(place: Callable[..., Place], tmp_path: Path) -> None:
    here = place("cpu", OWN)
    for moment in (Moment("saving", 10), Moment("step", 20, 0.02)):
        run, doing = kill_at(here, moment)
        run.assert_not_late()
        assert doing, f"{moment}: ended before, exit {run.process.returncode}\n{run.err[-2000:]}"
    here.run("train")
    assert here.ended() == reference("cpu", OWN)
    losses = [loss for _, (loss, _, _) in sorted(here.trace().items())]
    assert sum(losses[-10:]) < sum(losses[:10])
    here.run("evaluate", UNJUDGED)
    assert here.storage.stat("registry/relevance/production.json") is not None
    embedded = here.run("embed")
    assert "0 carried over" in embedded.out
    verified = here.run("embed verify")
    assert "pass     sample" in verified.out
    _check_exports(here, tmp_path)
    other = here.run("train", '--model.factory-options={"width": 16}', "--model.hidden-size=16", code=78)
    assert "model.factory_options" in other.err


def _check_exports(here: Place, tmp_path: Path) -> None:
    """Of the model in production: by its names alone."""
    refused = here.run("export", "--out", str(tmp_path / "no"), code=78)
    assert "does not support the WordsAndNeighbours of examples.own_encoder:build" in refused.err
    assert "--format safetensors" in refused.err
    here.run("export", "--out", str(tmp_path / "program"), "--format", "torchscript", "--bucket", "16x32")
    program = torch.jit.load(tmp_path / "program" / "relevance-16x32.pt")  # type: ignore[no-untyped-call]
    vectors = program.embed_query(torch.tensor([[2, 9, 3] + [0] * 13], dtype=torch.int32))
    np.testing.assert_allclose(vectors.norm(dim=1), [1.0], rtol=1e-5)
    here.run("export", "--out", str(tmp_path / "plain"), "--format", "safetensors")
    assert "text encoder (examples.own_encoder:build" in (tmp_path / "plain" / "README.md").read_text()
    assert "features: imported" in here.run("import", str(tmp_path / "plain"), cycle="c2").out


@pytest.mark.thorough
def test_a_model_of_transformers_and_its_export(place: Callable[..., Place], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    here = place("cpu", (*TINY, *SHORT, *OF_TRANSFORMERS, "--train.max-steps=20"))
    here.run("train")
    here.run("evaluate", UNJUDGED)
    out = tmp_path / "exported"
    here.run("export", "--out", str(out))
    model = transformers.AutoModel.from_pretrained(out).eval()
    assert type(model).__name__ == "DistilBertModel"
    saved = here.storage.local_path(f"{here.result()['outputs']['checkpoint']}/model.safetensors")
    weights = load_file(str(saved))
    state = model.state_dict()
    assert {f"encoder.module.{name}" for name in state} == {name for name in weights if name.startswith("encoder.")}
    assert all(torch.equal(weights[f"encoder.module.{name}"], tensor) for name, tensor in state.items())
    imported = here.run("import", str(out), cycle="c2")
    assert f"encoder {PLACE}:transformers_model" in imported.out and "features: imported" in imported.out


@pytest.mark.thorough
def test_spread_over_two_processes(place: Callable[..., Place]) -> None:
    """Whole on both, the optimizer's state in slices, or all in shards: the same losses."""
    two = (*OWN, "--train.max-steps=10", "--launch.processes=2", "--train.candidates-per-query=2")
    losses = []
    here = place("cpu", two)
    here.env = {**here.env, "PYTHONPATH": str(ROOT)}
    for degree, shard in ((1, "all"), (2, "state"), (2, "all")):
        cycle = f"{shard}-{degree}"
        spread = (f"--train.parallel.shard-degree={degree}", f"--train.parallel.shard={shard}")
        here.run("prepare", cycle=cycle)
        here.run("train", *spread, cycle=cycle)
        losses.append([loss for _, (loss, _, _) in sorted(here.trace(cycle=cycle).items())])
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@needs_xla
@pytest.mark.thorough
def test_traced_for_xla_and_trained_by_what_was_compiled(place: Callable[..., Place]) -> None:
    here = place("xla", (*ON_XLA, *OF_TRANSFORMERS, "--train.max-steps=20", "--embed.buckets=24"))
    compiled = here.run("compile")
    assert "warning" not in compiled.err, compiled.err
    here.run("train", "--compile.on-unknown-graph=error")
    assert here.result()["figures"]["steps_done"] == 20


@needs_xla
def test_what_looks_at_values_is_refused_before_xla_is_promised(place: Callable[..., Place]) -> None:
    name = "--model.factory=tests.model.factories:looks"
    here = place("xla", (*ON_XLA, name, "--model.hidden-size=16", "--embed.buckets=24"))
    refused = here.run("compile", code=78)
    assert "the graphs of model.factory tests.model.factories:looks are not valid: HLO006" in refused.err
    assert not here.storage.list_dirs("compile-cache/graphs")


@pytest.mark.parametrize(
    ("stage", "flags", "seen"),
    [
        ("train", ("--model.factory=no_such_package:build", "--model.hidden-size=16"), "No module named"),
        ("doctor", ("--model.factory=tests.model.factories:raises", "--model.hidden-size=16"), "raised KeyError"),
        (
            "train",
            (f"--model.factory={PLACE}:build", "--model.hidden-size=32", "--train.parallel.recompute=units"),
            "recompute units does not support model.factory",
        ),
    ],
)
def test_one_line_and_exit_78(place: Callable[..., Place], stage: str, flags: tuple[str, ...], seen: str) -> None:
    run = place("cpu", (*TINY, *flags)).run(stage, code=78)
    lines = [line for line in run.err.splitlines() if line]
    assert "ConfigError" in lines[0] and seen in lines[0], run.err
    assert "Traceback" not in run.err and any(line.strip().startswith("next:") for line in lines)
