"""The whole cycle on the stand-in device, with 1 and 2 processes: compile, train, kill, resume, evaluate, embed.

Every command runs with compile.on_unknown_graph "error": a graph compiled after warm-up, or at a place that the
compile stage did not meet, ends it. The same workspace is trained on the CPU, by the flat program: losses agree.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.standin import ROOT, environment, needs_compiler, run

pytestmark = [needs_compiler, pytest.mark.thorough]

TINY = """
model_name = "native"
[data.synthetic]
num_queries = 150
candidates_per_query = 8
[data.tokenizer]
vocab_size = 500
[data]
buckets = ["16x16", "32x32"]
[model]
preset = "tiny"
dropout = 0.0
hidden_size = 32
num_layers = 1
intermediate_size = 64
[train]
max_steps = 12
global_batch_size = 16
micro_batch_size = 8
evaluate_every = 6
metric = "combined"
[train.optimizer]
learning_rate = 1e-3
[checkpoint]
every_steps = 4
[log]
every_steps = 2
[embed]
buckets = [32]
tokens_per_batch = 128
[evaluate.baselines]
bm25 = false
boosting = false
"""


class Cycle:
    """A workspace, and commands on it."""

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self.folder, self.processes = folder, processes
        self.env = environment(folder)

    def command(self, *words: str) -> list[str]:
        ranks = ["--launch.processes", str(self.processes)] if words[0] != "prepare" else []
        where = ["--config", str(self.folder / "tiny.toml"), "--workspace", str(self.folder / "ws"), "--cycle", "one"]
        return [sys.executable, "-m", "pipeline", *words, *where, *ranks]

    def run(self, *words: str, code: int = 0, **env: str) -> str:
        return run(self.command(*words), self.env | env, code=code)

    def killed(self, step: int, how: signal.Signals) -> None:
        """Train, and signal it once it has told of a step."""
        process = subprocess.Popen(
            self.command("train"),
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step") and int(line.split("/")[0].split()[1]) >= step:
                break
        else:
            raise AssertionError("".join(lines)[-4000:])
        if how is signal.SIGKILL:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        process.communicate(timeout=100)
        assert process.returncode != 0

    def losses(self) -> dict[int, float]:
        """By step, of the newest attempt that told of it."""
        found: dict[int, float] = {}
        for file in sorted((self.folder / "ws" / "cycles" / "one").glob("events*")):
            for text in file.read_text().splitlines() if file.is_file() else ():
                event = json.loads(text)
                if event["event"] == "train_steps":
                    losses = event["losses"]
                    found |= dict(zip(range(event["step"] - len(losses) + 1, event["step"] + 1), losses, strict=True))
        return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared workspace, and what training on the CPU made of it."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "tiny.toml").write_text(TINY)
    cycle = Cycle(folder)
    cycle.run("prepare", TRNPIPE_BACKEND="cpu")
    return folder


def of(prepared: Path, folder: Path, processes: int) -> Cycle:
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    return Cycle(folder, processes)


@pytest.fixture(scope="module")
def on_cpu(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    cycle = of(prepared, tmp_path_factory.mktemp("cpu"), 1)
    cycle.run("train", TRNPIPE_BACKEND="cpu")
    losses = cycle.losses()
    assert sorted(losses) == list(range(1, 13))
    return losses


@pytest.mark.timeout(600)  # a dozen processes, each of which traces its programs
@pytest.mark.parametrize(("processes", "how"), [(1, signal.SIGKILL), (2, signal.SIGTERM)])
def test_the_whole_cycle(
    prepared: Path, on_cpu: dict[int, float], tmp_path: Path, processes: int, how: signal.Signals
) -> None:
    cycle = of(prepared, tmp_path, processes)
    compiled = cycle.run("compile")
    assert "programs" in compiled and "embed " in compiled
    cycle.killed(10, how)
    resumed = cycle.run("train")
    assert "continuing from" in resumed and "compiled ahead of time" in resumed
    losses = cycle.losses()
    assert sorted(losses) == sorted(on_cpu)
    assert max(abs(losses[step] - on_cpu[step]) for step in losses) < 1e-5
    checkpoint = "checkpoints/one/step-12"
    cycle.run("evaluate", "--evaluate.force-reason", "test")
    cycle.run("embed", "--embed.checkpoint", checkpoint)
    assert "serving.json" in cycle.run("embed", "verify")
