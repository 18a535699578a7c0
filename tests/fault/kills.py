"""kill -9 at chosen and at random moments, and what to do until the run has finished all the same."""

import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.fault.harness import Place, Run
from tests.fault.s3_server import S3Server

PREPARE_PHASES = ("prepare",)
TRAIN_PHASES = ("start", "step", "saving", "commit", "evaluation", "finish")
S3_PHASES = ("prepare", "start", "step", "saving", "upload", "marker", "evaluation", "finish")


@dataclass(frozen=True)
class Moment:
    """When to kill: in a phase, not before a step, a moment after it has begun."""

    phase: str
    step: int = 0
    delay_s: float = 0.0

    @property
    def stage(self) -> str:
        return self.phase if self.phase in ("prepare", "teach") else "train"

    def __str__(self) -> str:
        return f"{self.phase} (step >= {self.step}, +{self.delay_s * 1000:.0f} ms)"


def random_moment(
    rng: random.Random,
    phases: tuple[str, ...],
    *,
    after: int,
    prepare_s: float,
    start_s: float,
    max_steps: int,
    evaluate_every: int,
) -> Moment:
    """`after`: newest step whose checkpoint is safe. `_s`: how long prepare and the way to the first step take."""
    phase = rng.choice(phases)
    if phase in ("prepare", "teach"):
        return Moment(phase, delay_s=rng.uniform(0.0, prepare_s if phase == "prepare" else prepare_s / 4))
    if phase == "start":
        return Moment(phase, delay_s=rng.uniform(0.0, start_s))
    first = min(max(after, 0) + 1, max_steps)
    step = rng.randint(first, min(first + max_steps // 3, max_steps))
    if phase == "evaluation":
        step = max(evaluate_every, step // evaluate_every * evaluate_every)
        return Moment(phase, step, rng.uniform(0.0, 0.06))
    if phase == "finish":
        return Moment(phase, max_steps, rng.uniform(0.0, 0.15))
    return Moment(phase, step, rng.uniform(0.0, 0.1) if phase == "step" else rng.uniform(0.0, 0.004))


def kill_at(place: Place, moment: Moment, server: S3Server | None = None) -> tuple[Run, str]:
    """Start the stage of the moment and kill -9 it then. Returns the run and what it did, "" if it ended."""
    if moment.phase in ("upload", "marker"):
        assert server is not None
        return _kill_at_request(place, moment, server)
    left, seen = _left_open(place), len(place.events())
    run = place.start(moment.stage)
    if run.until(_condition(place, moment, left, seen)):
        time.sleep(moment.delay_s)
    alive = run.is_alive
    run.kill()
    return run, _post_mortem(place, moment, left) if alive and run.process.returncode == -9 else ""


Steps = tuple[frozenset[int], frozenset[int]]


def _left_open(place: Place) -> Steps:
    """Steps in the staging folder, and in the workspace without a manifest."""
    is_local = place.storage.local_path("") is not None
    return frozenset(place.staged()), frozenset(place.half_committed() if is_local else ())


def _condition(place: Place, moment: Moment, left: Steps, seen: int) -> Callable[[], bool]:
    """What an earlier attempt has `left`, and the events `seen` of it, do not count."""
    conditions: dict[str, Callable[[], bool]] = {
        "step": lambda: place.step(seen) >= moment.step,
        "saving": lambda: any(step >= moment.step for step in place.staged() - left[0]),
        "commit": lambda: any(step >= moment.step for step in place.half_committed() - left[1]),
        "evaluation": lambda: place.step(seen) >= moment.step,
        "finish": lambda: place.step(seen) >= place.max_steps,
    }
    return conditions.get(moment.phase, lambda: True)


def _post_mortem(place: Place, moment: Moment, left: Steps) -> str:
    """What the killed process was doing, by what it left: surer than when the signal was meant to come."""
    if moment.stage == "prepare":
        committed = place.storage.list_dirs("tokens/tiny/")
        return f"prepare, {'with' if committed else 'without'} anything committed"
    if moment.stage == "teach":
        is_begun = any("-done/" in stat.key for stat in place.storage.list("tokens/"))
        return f"teach, {'with' if is_begun else 'without'} anything committed"
    staged, half_committed = (now - before for now, before in zip(_left_open(place), left, strict=True))
    if half_committed:
        return "commit of a checkpoint"
    if staged:
        return "writing or uploading a checkpoint"
    names = [event["event"] for event in place.events() if event["event"] != "graph_compiled"]
    if moment.phase == "evaluation" and names[-1] == "train_steps":
        return "evaluation"
    return f"{moment.phase}, after {names[-1]}" if names else "start"


def _kill_at_request(place: Place, moment: Moment, server: S3Server) -> tuple[Run, str]:
    """Kill while a PUT of a checkpoint is being answered: of the first tensor file, or of the manifest."""
    wanted = "MANIFEST.json" if moment.phase == "marker" else "optimizer.safetensors"
    prefix = "/" + place.workspace.removeprefix("s3://") + "/checkpoints/"
    ready, hit = threading.Event(), list[str]()

    def watch(method: str, path: str) -> None:
        if method != "PUT" or not path.startswith(prefix) or not path.endswith(wanted) or hit:
            return
        if int(path.rsplit("step-", 1)[1].split("/")[0]) >= moment.step:
            hit.append(path)
            ready.wait(30)
            run.kill()

    server.watcher = watch
    try:
        run = place.start(moment.stage)
        ready.set()
        run.until(lambda: False)
    finally:
        server.watcher = None
    run.wait()
    return run, f"upload of {hit[0].rsplit('/', 2)[-2]}/{wanted}" if hit and run.process.returncode == -9 else ""


def finish(place: Place) -> None:
    """Run all stages to the end, as a retry would."""
    place.prepare()
    place.run("train")


def lose_scratch(place: Place) -> None:
    """The next attempt runs on another machine."""
    shutil.rmtree(place.scratch, ignore_errors=True)
