"""Puts the fake Neuron tools first on PATH and looks at what they leave."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.compile.config import CompilerFlags
from tests.compile.fake_neuron.programs import (
    FLAGS,
    HLO,
    LOG,
    NEFF,
    VERSION,
    flags_hash,
    graph_hash,
    is_done,
    lock_of,
)

ROOT = Path(__file__).parents[3]
PROGRAMS = {"neuron_parallel_compile": "parallel_compile", "neuronx-cc": "compiler", "fake_train": "train"}
SCRIPT = """#!{python} -S
import sys
sys.path.insert(0, {root!r})
from tests.compile.fake_neuron.programs import {program}
sys.exit({program}())
"""


@dataclass
class ToolChain:
    """One installation with a cache and a state folder of its own."""

    folder: Path

    def __post_init__(self) -> None:
        self.bin, self.state, self.cache = (self.folder / name for name in ("bin", "state", "cache"))
        for folder in (self.bin, self.state, self.cache):
            folder.mkdir(parents=True)
        for name, program in PROGRAMS.items():
            path = self.bin / name
            path.write_text(SCRIPT.format(python=sys.executable, root=str(ROOT), program=program))
            path.chmod(0o755)

    def env(self, fault: str = "", **more: str) -> dict[str, str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        fakes = {"FAKE_NEURON_FAULT": fault, "FAKE_NEURON_STATE": str(self.state)}
        return {**os.environ, "PATH": path, **fakes, **more}

    def command(self, num_graphs: int, *more: str) -> list[str]:
        """A run command for the fake training program."""
        return ["fake_train", "--graphs", str(num_graphs), *more]

    def entry(self, index: int) -> Path:
        suffix = flags_hash(CompilerFlags().tokens())
        return self.cache / f"neuronxcc-{VERSION}" / f"MODULE_{graph_hash(index)}+{suffix}"

    def key(self, index: int) -> str:
        return str(self.entry(index).relative_to(self.cache))

    def collect(self, index: int) -> Path:
        """An entry that was traced and never compiled."""
        entry = self.entry(index)
        entry.mkdir(parents=True)
        (entry / HLO).write_bytes(f"HLO {index}".encode())
        (entry / FLAGS).write_text("[]")
        return entry

    def poison(self, index: int) -> None:
        """A failure of an earlier run."""
        (self.collect(index) / LOG).write_text("an old failure\n")

    def lock(self, index: int) -> Path:
        """A lock of an earlier, killed run."""
        lock = lock_of(self.collect(index))
        lock.touch()
        return lock

    def is_done(self, index: int) -> bool:
        return is_done(self.entry(index))

    def unclean(self) -> list[Path]:
        """Locks and half entries."""
        locks = self.cache.rglob("*.lock")
        halves = (path for path in self.cache.rglob(NEFF) if not is_done(path.parent))
        return sorted([*locks, *halves])

    def compiles(self) -> list[str]:
        """Names of the modules given to neuronx-cc, in order."""
        record = self.state / "compiles"
        return record.read_text().split() if record.exists() else []

    def trial(self) -> dict[str, Any]:
        """What the last trial run was given."""
        value: dict[str, Any] = json.loads((self.state / "trial.json").read_text())
        return value

    def processes(self) -> list[psutil.Process]:
        """Living processes that were started with our environment, in whatever session."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("FAKE_NEURON_STATE") == str(self.state)
                if ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:
                continue
        return found
