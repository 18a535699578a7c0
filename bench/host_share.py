"""Share of a training step that is host work: tracing, hashing, launching, loading; not execution on the device."""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from bench.results import Figure, Result, Target, figure, finish
from bench.rows import RandomRows, input_spec
from bench.stepper import Stepper, make_program, open_stepper, train_config
from pipeline.backends.xla import XlaBackend
from pipeline.core.batch_order import Bucket
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import RelevanceOutputs
from pipeline.train.loss import Contrast
from pipeline.train.step import TrainProgram

NAME = "host_share"
TITLE = "Share of a step outside device execution: preset small, batch 32 x 64 tokens a side, XLA:CPU"
METHOD = """
The real TrainProgram, fed through MpDeviceLoader, default (fused) boundary. In the measured blocks the device is
waited for at the boundary of every step, so that host work cannot hide behind execution: the share is
1 - ExecuteTime / wall, an upper bound. Blocks without these waits (as in production) alternate with them and give the
exposed share: 1 - ExecuteTime of a waited step / wall of a free one.
"""
TARGET = Target(figure="host_share", comparison="<=", value=0.10)
LOG_EVERY = 1000  # figures are not read inside a block


class MeteredXla(XlaBackend):
    """The XLA backend with a clock on its step boundaries, and with an optional wait at each."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = True
        self.boundary_s = 0.0

    def execute_seconds(self) -> float:
        """Return the seconds the device spent executing so far."""
        return self._metric("ExecuteTime")[1]

    def operators(self) -> int:
        """Return the number of operators traced so far."""
        return sum(self._counters("xla::").values())

    def step_boundary(self, computed: Sequence[Tensor]) -> None:
        started = time.monotonic()
        super().step_boundary(computed)
        if self.waits:
            self.synchronise()
        self.boundary_s += time.monotonic() - started


@dataclass
class Spent:
    """Seconds of host work by what it was for, added up over steps."""

    forward: float = 0.0
    micro_step: float = 0.0
    update: float = 0.0
    boundary: float = 0.0


class MeteredProgram(TrainProgram):
    """TrainProgram with clocks around its parts; the work is inherited."""

    spent = Spent()

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        started = time.monotonic()
        outputs = super().forward(batch)
        self.spent.forward += time.monotonic() - started
        return outputs

    def _accumulate(self, batch: Mapping[str, Tensor], contrast: Contrast | None, *, is_last: bool) -> None:
        with _Clock(self.backend) as clock:
            super()._accumulate(batch, contrast, is_last=is_last)
        self.spent.micro_step += clock.host_s

    def _update(self, control: Tensor) -> None:
        with _Clock(self.backend) as clock:
            super()._update(control)
        self.spent.update += clock.host_s


class _Clock:
    """Wall time of a block without the time in step boundaries."""

    def __init__(self, backend: object) -> None:
        assert isinstance(backend, MeteredXla)
        self._backend, self.host_s = backend, 0.0

    def __enter__(self) -> "_Clock":
        self._started, self._boundary_s = time.monotonic(), self._backend.boundary_s
        return self

    def __exit__(self, *error: object) -> None:
        boundary_s = self._backend.boundary_s - self._boundary_s
        self.host_s = time.monotonic() - self._started - boundary_s


@dataclass
class Blocks:
    """What the blocks of one program gave, in milliseconds a step."""

    wall: list[float] = field(default_factory=list)
    execute: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    free_wall: list[float] = field(default_factory=list)

    def measure(self, stepper: Stepper, backend: MeteredXla, steps: int) -> None:
        """One block with waits, one without."""
        program = stepper.program
        assert isinstance(program, MeteredProgram)
        program.spent, backend.boundary_s = Spent(), 0.0
        backend.waits = True
        executed_s = backend.execute_seconds()
        wall_s = stepper.seconds(steps)
        executed_s = backend.execute_seconds() - executed_s
        spent, per_step = program.spent, 1e3 / steps
        self.wall.append(wall_s * per_step)
        self.execute.append(executed_s * per_step)
        self.forward.append(spent.forward * per_step)
        self.backward.append((spent.micro_step - spent.forward) * per_step)
        self.optimizer.append(spent.update * per_step)
        self.launch.append((backend.boundary_s - executed_s) * per_step)
        backend.waits = False
        self.free_wall.append(stepper.seconds(steps) * per_step)
        backend.waits = True

    @property
    def host_share(self) -> list[float]:
        return [1.0 - execute / wall for execute, wall in zip(self.execute, self.wall, strict=True)]

    @property
    def exposed_share(self) -> list[float]:
        return [max(0.0, 1.0 - execute / wall) for execute, wall in zip(self.execute, self.free_wall, strict=True)]

    def figures(self) -> list[Figure]:
        """All of it, shares first."""
        texts = {
            "wall": "wall time of a step, waited for at its boundary",
            "execute": "of it executing on the device",
            "forward": "tracing the forward pass",
            "backward": "tracing loss and backward pass",
            "optimizer": "tracing clipping, guard and AdamW",
            "launch": "hashing, looking up and launching the graphs",
            "free_wall": "wall time of a step without the waits",
        }
        shares = [
            figure("host_share", self.host_share, "share", "outside device execution"),
            figure("exposed_share", self.exposed_share, "share", "when steps run ahead"),
        ]
        names = [f.name for f in fields(self)]
        return shares + [figure(f"{name}_ms", getattr(self, name), "ms/step", texts[name]) for name in names]


def run(*, quick: bool) -> Result:
    """Measure the share and its parts, ours and the comparison's."""
    steps, blocks = (2, 2) if quick else (6, 5)
    model, vocab_size, bucket = ModelConfig(preset="small"), 30522, Bucket(64, 64)
    if quick:
        model, vocab_size, bucket = ModelConfig(preset="tiny"), 1000, Bucket(16, 16)
    spec, config = input_spec(vocab_size), train_config(32)
    backend = MeteredXla()
    source = RandomRows(spec, bucket, rows=32 * 64)
    ours = make_program(model, spec, config, backend, (bucket,), LOG_EVERY, MeteredProgram)
    blocks_of = Blocks()
    with open_stepper(ours, backend, source, config, LOG_EVERY) as stepper:
        stepper.warm_up()
        compiles, operators = backend.compile_count(), backend.operators()
        for _ in range(blocks):
            blocks_of.measure(stepper, backend, steps)
        compiles = backend.compile_count() - compiles
        operators = backend.operators() - operators
    figures = [
        *blocks_of.figures(),
        figure("operators", operators / (2 * blocks * steps), "a step", "traced"),
        figure("compiles", compiles, "graphs", "compiled during the measured blocks"),
    ]
    settings: dict[str, str | int | float] = {
        "preset": model.preset,
        "vocab_size": vocab_size,
        "steps_per_block": steps,
    }
    return finish(NAME, TITLE, METHOD, figures, quick=quick, target=TARGET, settings=settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    run(quick=parser.parse_args().quick)
