"""HLO of real traces, made once for a test session: torch_xla needs processes of its own."""

import fcntl
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.backends.xla_process import FAST_COMPILE
from tests.kit import zygote

FOLDER = Path()  # set by conftest.py
# Where source lines come from; and what makes torch_xla trace things that it avoids by default.
_SEEDED = {"XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1", "XLA_EXPERIMENTAL": "nonzero"}
_ENV = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": FAST_COMPILE, "OMP_NUM_THREADS": "1"}
OWN = (
    "--model.preset=tiny",
    "--train.precision=bf16",
    "--model.dropout=0.1",
    "--train.parallel.recompute=units",
    "--train.micro-batch-size=16",
    "--model.token-match=true",
    "--model.architecture=mpnet",
    "--model.architecture=modernbert",
    "--data.numeric=price,weight",
)
"""Each way to trace a step, and each kind of encoder."""


def program(name: str) -> str:
    """The text of a seeded program, with source lines."""
    path = _once("programs", _trace) / f"{name}.hlo"
    assert path.exists(), path.with_suffix(".error").read_text(encoding="utf-8")
    return path.read_text(encoding="utf-8")


def counters(name: str) -> dict[str, int]:
    counted: dict[str, int] = json.loads((_once("programs", _trace) / "counters.json").read_text())[name]
    return counted


def own() -> dict[str, dict[str, Any]]:
    """What trial runs meet, by a flag of OWN: see trial_graphs.py."""
    found: dict[str, dict[str, Any]] = json.loads((_once("own", _meet) / "own.json").read_text())
    return found


@cache
def _once(what: str, make: Callable[[Path], None]) -> Path:
    """A folder that is filled by whoever comes first (xdist: many do)."""
    folder = FOLDER / what
    folder.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


def _trace(folder: Path) -> None:
    done = zygote.run("tests.compile.trace_programs", str(folder), env={**_ENV, **_SEEDED}, cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _meet(folder: Path) -> None:
    done = zygote.run("tests.compile.trial_graphs", *OWN, timeout_s=400.0)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "own.json").write_text(done.stdout)
