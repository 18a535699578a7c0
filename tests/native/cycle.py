"""A tiny workspace and commands on it, on the stand-in device or on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.kit.zygote import Forked
from tests.native.standin import ROOT, environment, run

TINY = """
model_name = "native"
[data.synthetic]
num_queries = 100
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

    def __init__(
        self, folder: Path, settings: str = TINY, *, processes: int = 1, env: dict[str, str] | None = None
    ) -> None:
        self.folder, self.processes, self.workspace = folder, processes, folder / "ws"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tiny.toml").write_text(settings)
        self.env = environment(folder) if env is None else env

    def command(self, *words: str) -> list[str]:
        ranks = ["--launch.processes", str(self.processes)] if words[0] != "prepare" else []
        where = ["--config", str(self.folder / "tiny.toml"), "--workspace", str(self.workspace), "--cycle", "one"]
        return [sys.executable, "-m", "pipeline", *words, *where, *ranks]

    def run(self, *words: str, code: int = 0, **env: str) -> str:
        return run(self.command(*words), self.env | env, code=code, timeout_s=400)

    def on_host(self, *words: str) -> None:
        """On the CPU, from the zygote, which does not have the device."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRNPIPE_BACKEND")}
        log = self.folder / f"{words[0]}.log"
        with log.open("wb") as out:
            process = Forked(
                "pipeline",
                self.command(*words, "--backend", "cpu")[3:],
                env=env | {"OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=out,
                stderr=out,
            )
            assert process.wait(400) == 0, log.read_text()[-4000:]

    def killed(self, step: int, how: signal.Signals) -> None:
        """Train, and signal it once that step is in a checkpoint."""
        log = self.folder / "killed.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.command("train"), cwd=ROOT, env=self.env, stdout=out, stderr=out, start_new_session=True
            )
            marker = self.workspace / "checkpoints" / "one" / f"step-{step}" / "MANIFEST.json"
            limit = time.monotonic() + 400
            while not marker.exists():
                assert process.poll() is None and time.monotonic() < limit, log.read_text()[-4000:]
                time.sleep(0.01)
            if how is signal.SIGKILL:
                os.killpg(process.pid, how)
            else:
                process.send_signal(how)
            process.wait(100)
        assert process.returncode != 0, "it had ended before the signal"

    def losses(self) -> dict[int, float]:
        """By step, of the newest attempt that told of it."""
        found: dict[int, float] = {}
        for file in sorted((self.workspace / "cycles" / "one").glob("events*")):
            for text in file.read_text().splitlines() if file.is_file() else ():
                event = json.loads(text)
                if event["event"] == "train_steps":
                    losses = event["losses"]
                    found |= dict(zip(range(event["step"] - len(losses) + 1, event["step"] + 1), losses, strict=True))
        return found
