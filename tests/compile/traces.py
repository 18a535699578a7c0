"""HLO of real traces, made once for a test session: autograd and torch_xla need processes of their own."""

import fcntl
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests import zygote
from tests.backends.xla_process import FAST_COMPILE

FOLDER = Path()  # set by conftest.py

# Where source lines come from; and what makes torch_xla trace things that it avoids by default.
_SEEDED = {
    "XLA_HLO_DEBUG": "1",
    "XLA_IR_DEBUG": "1",
    "XLA_EXPERIMENTAL": "nonzero",
}


def program_texts() -> dict[str, str]:
    """Seeded programs, and our tiny graph, with source lines."""
    return _trace("programs", tuple(_SEEDED.items()))


def own_texts() -> dict[str, str]:
    """Our own graphs, as they are traced in a run."""
    return _trace("own", ())


def program(name: str) -> str:
    return _text(program_texts(), name)


def own(name: str) -> str:
    return _text(own_texts(), f"own-{name}")


def counters(name: str) -> dict[str, int]:
    counted: dict[str, int] = json.loads(program_texts()["counters"])[name]
    return counted


def _text(texts: dict[str, str], name: str) -> str:
    assert name in texts, texts.get(f"{name} failed", f"no trace of {name}")
    return texts[name]


@cache
def _trace(what: str, variables: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Made by whoever comes first (xdist: many do)."""
    folder = FOLDER / what
    folder.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            _make(what, variables, folder)
            (folder / "made").touch()
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.hlo")}
    texts |= {f"{path.stem} failed": path.read_text(encoding="utf-8") for path in folder.glob("*.error")}
    if (counted := folder / "counters.json").exists():
        texts["counters"] = counted.read_text(encoding="utf-8")
    return texts


def _make(what: str, variables: tuple[tuple[str, str], ...], folder: Path) -> None:
    module, words = "tests.compile.trace_programs", (str(folder), what)
    env = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": FAST_COMPILE, "OMP_NUM_THREADS": "1", **dict(variables)}
    if what == "programs":  # another hash seed than that of "own", which is compared with it
        whole = {**os.environ, "PYTHONPATH": str(zygote.ROOT), **env}
        command = [sys.executable, "-m", module, *words]
        done = subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True, timeout=400)
    else:
        done = zygote.run(module, *words, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
