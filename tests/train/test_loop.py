"""The loop: cadence, stop, resume, deadline, patience, no batch lost unnoticed. Real model, real batches."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.backends import Batch
from pipeline.backends.cpu import CpuBackend
from pipeline.core.batch_order import RankSlice
from pipeline.core.errors import NumericError, Preempted, TransientError, TrnpipeError
from pipeline.core.layout import Layout, layout_of
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.model.config import ModelConfig
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName
from pipeline.train.config import Cadence, GuardConfig, TrainConfig
from pipeline.train.loop import TrainLoop
from pipeline.train.optimizer import learning_rate_at
from pipeline.train.step import TrainProgram
from pipeline.train.stream import BatchStream, Pace
from tests.train.rows import MODEL, TRAIN, grouped, make_program, make_rows, plan_of


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("loop"), [(40, 40)])


@dataclass
class Bench:
    """A loop with everything it calls out to on record."""

    rows: TokenRows
    config: TrainConfig = TRAIN
    model: ModelConfig = MODEL
    start: int = 0
    max_steps: int = 6
    accumulation: int = 1
    cadence: Cadence = Cadence(log=2, evaluate=0, save=0)  # noqa: RUF009 - frozen
    best: bool = False
    enough_at: int = -1
    deadline_s: float | None = None
    backend: CpuBackend = field(default_factory=CpuBackend)
    stop: StopSignal = field(default_factory=StopSignal)
    calls: list[tuple[str, int]] = field(default_factory=list)
    events: list[tuple[EventName, dict[str, Any]]] = field(default_factory=list)
    on_evaluate: Callable[[], None] = lambda: None
    on_save: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.deadline_s is not None:
            deadline = datetime.now(UTC) + timedelta(seconds=self.deadline_s)
            self.config = self.config.model_copy(update={"deadline": deadline})
        self.program: TrainProgram = make_program(self.backend, self.config, self.model, self.accumulation)
        self.console = io.StringIO()

    def loop(self) -> TrainLoop:
        share = RankSlice(accumulation=self.accumulation)
        groups = grouped(self.rows, self.config)
        return TrainLoop(
            program=self.program,
            stream=BatchStream(groups, plan_of(groups, self.config), share, self.config, self.start, self.max_steps),
            process_group=ProcessGroup(World(), timeout_s=1),
            stop=self.stop,
            console=Console(stream=self.console),
            cadence=self.cadence,
            evaluate=self._evaluate,
            save=self._save,
            emit=self._emit,
        )

    def run(self) -> str:
        return self.loop().run()

    def _evaluate(self, step: int) -> tuple[bool, bool]:
        self.calls.append(("evaluate", step))
        self.on_evaluate()
        return self.best, step == self.enough_at

    def _save(self, step: int) -> None:
        self.calls.append(("save", step))
        self.on_save()

    def _emit(self, name: EventName, **fields: object) -> None:
        self.events.append((name, dict(fields)))

    def steps(self, figure: str) -> list[Any]:
        """One figure of all TRAIN_STEPS events, put together."""
        return [value for name, f in self.events if name == EventName.TRAIN_STEPS for value in f[figure]]

    def weights(self) -> dict[str, Tensor]:
        return self.program.snapshot()[0]


def test_every_step_is_reported_once(rows: TokenRows) -> None:
    bench = Bench(rows, max_steps=5)
    assert bench.run() == "complete"
    reports = [fields["step"] for name, fields in bench.events if name == EventName.TRAIN_STEPS]
    assert reports == [2, 4, 5]
    assert len(bench.steps("losses")) == len(bench.steps("grad_norms")) == len(bench.steps("samples")) == 5
    assert len(set(bench.steps("samples"))) == 5
    assert len(bench.console.getvalue().splitlines()) == 3
    assert sum(fields["seconds"] for name, fields in bench.events if name == EventName.TRAIN_STEPS) > 0


def test_evaluations_and_saves_come_in_order_and_the_last_step_is_the_callers(rows: TokenRows) -> None:
    bench = Bench(rows, cadence=Cadence(log=10, evaluate=2, save=3))
    bench.run()
    assert bench.calls == [("evaluate", 2), ("save", 3), ("evaluate", 4)]
    best = Bench(rows, cadence=Cadence(log=10, evaluate=2, save=0), best=True)
    best.run()
    assert best.calls == [("evaluate", 2), ("save", 2), ("evaluate", 4), ("save", 4)]


def test_an_evaluation_that_says_enough_ends_the_run_which_the_caller_saves(rows: TokenRows) -> None:
    bench = Bench(rows, cadence=Cadence(log=10, evaluate=2, save=3), enough_at=4)
    assert bench.run() == "converged"
    assert bench.calls == [("evaluate", 2), ("save", 3), ("evaluate", 4)]
    assert len(bench.steps("losses")) == 4
    again = Bench(rows, cadence=Cadence(log=10, evaluate=2, save=3), start=4, enough_at=4)
    assert again.run() == "converged" and again.calls == [("evaluate", 4)]


def test_the_stop_signal_saves_at_the_step_boundary(rows: TokenRows) -> None:
    bench = Bench(rows, cadence=Cadence(log=100, evaluate=1, save=0), max_steps=100)
    bench.on_evaluate = lambda: bench.stop.set("SIGTERM") if len(bench.calls) == 3 else None
    assert bench.run() == "stopped"
    assert bench.calls[-1] == ("save", 4)
    assert ("evaluate", 4) not in bench.calls  # no long work after the signal
    assert len(bench.steps("losses")) == 4  # the figures of all saved steps are out


@pytest.mark.parametrize("error", [Preempted, TransientError])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_an_evaluation_that_fails_costs_no_step_after_a_stop(
    rows: TokenRows, error: type[TrnpipeError], is_stopped: bool
) -> None:
    """Ours, or a peer that left after the stop; without a stop it is an error."""
    bench = Bench(rows, cadence=Cadence(log=100, evaluate=3, save=0))

    def fail() -> None:
        if is_stopped:
            bench.stop.set("SIGTERM")
        raise error("failed")

    bench.on_evaluate = fail
    if is_stopped:
        assert bench.run() == "stopped"
        assert bench.calls == [("evaluate", 3), ("save", 3)]
    else:
        with pytest.raises(error):
            bench.run()


class Mangling(CpuBackend):
    """A device loader that does not hand over what it was given."""

    def __init__(self, mangle: Callable[[Iterator[Batch]], Iterable[Batch]]) -> None:
        super().__init__()
        self.mangle = mangle

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        @contextmanager
        def mangled() -> Iterator[Iterator[Batch]]:
            yield iter(self.mangle(iter(batches)))

        return mangled()


def first_as(*order: int) -> Callable[[Iterator[Batch]], Iterator[Batch]]:
    """Return what hands over the first two batches in this order, and the others as they are."""

    def mangled(batches: Iterator[Batch]) -> Iterator[Batch]:
        first = list(islice(batches, 2))
        yield from ({**first[number]} for number in order)
        yield from batches

    return mangled


OTHER = r"more batches than were produced|expected the device to receive|expected the batch at position"


@pytest.mark.parametrize(
    ("mangle", "accumulation", "match"),
    [
        (first_as(0), 1, OTHER),
        (first_as(0), 2, OTHER),
        (first_as(0, 0, 1), 1, OTHER),
        (first_as(0, 0, 1), 2, OTHER),
        (first_as(1, 0), 1, r"steps \[1, 2\], but got \[2, 1\]"),
        (lambda batches: islice(batches, 4), 1, "the loader ended at step 4 of 6"),
    ],
)
def test_a_batch_that_is_lost_repeated_or_swapped_fails_the_run(
    rows: TokenRows, mangle: Callable[[Iterator[Batch]], Iterator[Batch]], accumulation: int, match: str
) -> None:
    with pytest.raises(RuntimeError, match=match):
        Bench(rows, backend=Mangling(mangle), accumulation=accumulation).run()


def test_batches_carry_step_and_rate_and_the_host_notes_tokens_and_samples(rows: TokenRows) -> None:
    def stream_of() -> BatchStream:
        groups = grouped(rows)
        return BatchStream(groups, plan_of(groups), RankSlice(accumulation=2), TRAIN, 1, 3)

    stream, again = stream_of(), stream_of()
    batches, _ = list(stream), list(again)
    assert [float(batch["control"][3]) for batch in batches] == [2, 2, 3, 3]
    assert float(batches[0]["control"][0]) == pytest.approx(learning_rate_at(TRAIN.optimizer, 2, 3))
    for number, batch in enumerate(batches):
        tokens, digest, ready_at = stream.received(1 + number // 2)
        texts = len(batch["tokens"]) + int((batch["gain"] >= 0).sum())
        assert tokens == int((batch["tokens"] != 0).sum()) and 4 * texts <= tokens <= 6 * texts
        assert again.received(1 + number // 2)[1] == digest and ready_at > 0


def test_an_error_in_the_data_thread_reaches_the_caller(rows: TokenRows, tmp_path: Path) -> None:
    class Broken(TokenRows):
        def read(self, pools: Any, rows: Any, bucket: int, fields: Sequence[str] = ()) -> Any:
            if (rows > 30).any():
                raise OSError("disk gone")
            return super().read(pools, rows, bucket, fields)

    broken = Broken(rows._shards, rows.buckets, rows.pad_id)
    with pytest.raises(OSError, match="disk gone"):
        Bench(broken).run()


@pytest.mark.parametrize("figure", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_is_not_finite_and_was_taken_ends_the_run(rows: TokenRows, figure: str, value: float) -> None:
    """As on a device whose comparisons with NaN are true. The bad step is not the last one of those that are read."""
    bench = Bench(rows, max_steps=4, cadence=Cadence(log=2, evaluate=0, save=2))
    loop = bench.loop()
    read = loop.program.read_metrics
    loop.program.read_metrics = lambda count: [  # type: ignore[method-assign]
        {**row, figure: value} if row["step"] == 1 else row for row in read(count)
    ]
    with pytest.raises(NumericError):
        loop.run()
    assert loop.step == 2 and not bench.calls


class Peers(ProcessGroup):
    """One of several ranks, whose peers by tensor parallelism send what it sends."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(World(), timeout_s=1, layout=layout)

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.layout.world_size


def drawn_by(rows: TokenRows, layout: Layout) -> list[list[int]]:
    """The seeds of dropout of each step of a rank."""
    bench = Bench(rows, model=MODEL.model_copy(update={"dropout": 0.3}), accumulation=2)
    loop = bench.loop()
    loop.process_group = Peers(layout)
    found: list[list[int]] = []
    step = loop.program.step

    def noted(micros: Sequence[Batch], *, seeds: Sequence[int] = ()) -> None:
        found.append(list(seeds))
        step(micros, seeds=seeds)

    loop.program.step = noted  # type: ignore[assignment, method-assign]
    loop.run()
    return found


def test_data_ranks_draw_other_dropout_and_tensor_peers_the_same(rows: TokenRows) -> None:
    ranks = [drawn_by(rows, layout_of(rank, 4, shard_degree=1, tensor_degree=2)) for rank in range(4)]
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
    every = [seed for rank in ranks[::2] for step in rank for seed in step]
    assert len(every) == len(set(every)) == 2 * 6 * 2


def test_samples_of_tensor_peers_count_once(rows: TokenRows) -> None:
    alone, spread = Bench(rows), Bench(rows)
    alone.run()
    loop = spread.loop()
    loop.process_group = Peers(layout_of(0, 2, shard_degree=1, tensor_degree=2))
    loop.run()
    assert spread.steps("samples") == alone.steps("samples")


def test_an_operator_that_ran_on_the_host_before_the_loop_is_named_when_it_does_in_it(rows: TokenRows) -> None:
    """By a device that notes each operator once, since its notes were last cleared."""

    class Noting(CpuBackend):
        noted = True

        def host_operators(self) -> dict[str, int]:
            return {"aten::x": 1} if self.noted else {}

        def reset_host_operators(self) -> None:
            self.noted = False

    bench = Bench(rows, max_steps=4, backend=Noting())
    bench.run()
    assert "aten::x" not in bench.console.getvalue()
    again = Bench(rows, max_steps=4, backend=Noting())
    loop = again.loop()
    step = loop.program.step

    def with_operator(micros: Sequence[Batch], *, seeds: Sequence[int] = ()) -> None:
        again.backend.noted = True  # type: ignore[attr-defined]
        step(micros, seeds=seeds)

    loop.program.step = with_operator  # type: ignore[assignment, method-assign]
    loop.run()
    assert again.console.getvalue().count("cpu does not support aten::x") == 1


def test_patience_ends_in_a_numeric_error_and_nothing_is_saved(rows: TokenRows) -> None:
    config = TRAIN.model_copy(update={"guard": GuardConfig(patience=3)})
    bench = Bench(rows, config=config, max_steps=50, cadence=Cadence(log=2, evaluate=0, save=4))
    weights = bench.weights()
    bench.program.strategy.masters[1].data[0] = float("nan")
    with pytest.raises(NumericError, match="4 consecutive steps") as caught:
        bench.run()
    assert "a new cycle (--cycle NAME)" in caught.value.next_command  # another rate is another run
    assert not bench.calls
    skipped = [fields for name, fields in bench.events if name == EventName.STEP_SKIPPED]
    assert [fields["total"] for fields in skipped] == [2, 4]
    assert torch.equal(weights["encoder.word_embeddings.weight"], bench.weights()["encoder.word_embeddings.weight"])


@pytest.mark.parametrize(("policy", "ended", "steps"), [("finish", "late", 2), ("warn", "complete", 6)])
def test_the_deadline(rows: TokenRows, policy: str, ended: str, steps: int) -> None:
    bench = Bench(rows, config=TRAIN.model_copy(update={"on_deadline": policy}), deadline_s=-1.0)
    loop = bench.loop()
    assert loop.run() == ended
    assert loop.step == steps
    assert [name for name, _ in bench.events].count(EventName.DEADLINE_AT_RISK) == 1


def test_a_stop_saves_also_when_the_deadline_has_passed(rows: TokenRows) -> None:
    config = TRAIN.model_copy(update={"on_deadline": "finish"})
    late = Bench(rows, config=config, deadline_s=-1.0, cadence=Cadence(log=1, evaluate=0, save=1))
    assert late.run() == "late" and not late.calls, "the caller saves the last step"
    stopped = Bench(rows, config=config, deadline_s=-1.0, cadence=Cadence(log=1, evaluate=0, save=1))
    stopped.stop.set("SIGTERM")
    assert stopped.run() == "stopped" and stopped.calls == [("save", 1)]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("pipeline.train.loop.time.monotonic", lambda: self.now)

    def pass_on(self, seconds: float) -> None:
        self.now += seconds


def test_the_pace_is_that_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(samples_per_step=8, data_size=2)
    clock.pass_on(3.0)
    assert pace.read().samples_per_s == 0.0 and pace.seconds_per_step is None
    for seconds, expected in ((2.0, None), (4.0, 4.0), (6.0, 0.7 * 4.0 + 0.3 * 6.0)):
        pace.step_done(tokens=10, waited_s=1.0)
        clock.pass_on(seconds)
        assert pace.read() == (seconds, 8 / seconds, 20 / seconds, 1.0 / seconds)
        assert pace.seconds_per_step == (expected and pytest.approx(expected))


@pytest.mark.parametrize("apart", ["evaluate", "save"])
def test_evaluating_and_saving_are_no_time_of_steps(
    rows: TokenRows, monkeypatch: pytest.MonkeyPatch, apart: str
) -> None:
    clock = Clock(monkeypatch)
    bench = Bench(rows, cadence=Cadence(log=2, evaluate=3 * (apart == "evaluate"), save=3 * (apart == "save")))
    bench.on_evaluate = bench.on_save = lambda: clock.pass_on(1000.0)
    assert bench.run() == "complete" and clock.now == 1000.0
    seconds = [fields["seconds"] for name, fields in bench.events if name == EventName.TRAIN_STEPS]
    assert seconds == [0.0] * 4


def timed(bench: Bench, after: Callable[[int], None]) -> TrainLoop:
    """A loop that calls `after` with the number of each step, from 0, as soon as it is taken."""
    loop = bench.loop()
    step = loop.program.step

    def taken(micros: Sequence[Batch], *, seeds: Sequence[int] = ()) -> None:
        step(micros, seeds=seeds)
        after(loop.step)

    loop.program.step = taken  # type: ignore[assignment, method-assign]
    return loop


def test_the_eta_leaves_out_what_compiled_in_an_interval(rows: TokenRows, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiling(CpuBackend):
        graphs = 1

        def compile_count(self) -> int:
            return self.graphs

        def compile_seconds(self) -> float:
            return 100.0 * self.graphs

    clock, backend = Clock(monkeypatch), Compiling()
    bench = Bench(rows, backend=backend)

    def pass_on(step: int) -> None:
        clock.pass_on(110.0 if step == 3 else 10.0)
        backend.graphs += step == 3

    timed(bench, pass_on).run()
    etas = [fields["eta_s"] for name, fields in bench.events if name == EventName.TRAIN_STEPS]
    assert etas == [None, 20.0, 0.0]
    told = [fields for name, fields in bench.events if name == EventName.GRAPH_COMPILED]
    assert told[0] == {"step": 2, "new": 1, "total": 1, "compile_s": 100.0} and told[1]["total"] == 2


def test_a_deadline_that_the_pace_will_miss_is_warned_of_before_it(
    rows: TokenRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    config = TRAIN.model_copy(update={"on_deadline": "finish"})
    bench = Bench(rows, config=config, deadline_s=55.0, max_steps=8)
    loop = timed(bench, lambda step: clock.pass_on(10.0))
    assert loop.run() == "late" and loop.step == 6
    risks = [fields for name, fields in bench.events if name == EventName.DEADLINE_AT_RISK]
    assert len(risks) == 1, "once, as soon as there is a pace"
    assert risks[0] == pytest.approx({"step": 4, "eta_s": 40.0, "spare_s": 15.0 - 40.0}, abs=1.0)


def test_values_that_mean_nothing_are_not_judged(rows: TokenRows) -> None:
    """Those of a trial run on Neuron, where graphs are collected."""
    loop = (bench := Bench(rows, deadline_s=-1.0)).loop()
    loop.values_are_real = False
    loop.program.strategy.masters[1].data[0] = float("nan")
    assert loop.run() == "complete" and not bench.events
