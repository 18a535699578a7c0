"""Sides in processes of their own: killed, told to stop, orphaned; and XLA against the CPU."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.commands import ToolCall
from pipeline.commands import parity as command
from pipeline.core.errors import EXIT_OK, DataError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.parity import record as child
from pipeline.parity.compare import Side, compare_sides
from pipeline.parity.record import SideTask, find_record, load_side, record_side
from pipeline.telemetry.console import Console
from tests.backends.xla_process import FAST_COMPILE, needs_xla
from tests.parity.case import PARITY, Case, make_case
from tests.parity.test_recording import dropped_weight, wrong_epsilon

pytestmark = pytest.mark.stage
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "XLA_FLAGS": FAST_COMPILE}.items():
        monkeypatch.setenv(name, value)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.parity.record import main
from pipeline.telemetry.events import EventLog, EventName

emit = EventLog.emit

def emit_and_die(self, name, /, **fields):
    emit(self, name, **fields)
    if name == EventName.CHECKPOINT_SAVED:
        os.kill(os.getpid(), signal.SIGKILL)

EventLog.emit = emit_and_die
sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
"""


def wait_for_a_checkpoint(task: SideTask) -> None:
    folder, end = Path(task.place) / "work" / "checkpoints", time.monotonic() + WAIT_S
    while not list(folder.glob("parity/step-*/MANIFEST.json")):
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.thorough
def test_a_killed_side_goes_on_and_ends_the_same(case: Case, tmp_path: Path) -> None:
    task = case.task(place="killed", steps=20)
    file = tmp_path / "task.json"
    file.write_text(task.model_dump_json())
    words = [sys.executable, "-c", KILLED, str(file), str(os.getpid())]
    assert subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL
    assert find_record(open_storage(task.place)) is None
    killed = case.side(task).record
    assert b"train_resumed" in open_storage(task.place).read_bytes("work/events.jsonl")
    whole = case.side(case.task(place="whole", steps=20)).record
    assert (killed.evaluations, killed.curve) == (whole.evaluations, whole.curve)


def test_a_stop_is_passed_on_and_the_exit_code_comes_back(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    task, stop = case.task(place="told", steps=100_000), StopSignal()

    def stop_later() -> None:
        wait_for_a_checkpoint(task)
        stop.set("test")

    thread = threading.Thread(target=stop_later)
    thread.start()
    assert record_side(task, stop) == Preempted.exit_code
    thread.join()
    assert "trnpipe parity cpu.fp32: Preempted: stopped by SIGTERM" in capfd.readouterr().err


def test_a_side_stops_when_its_parent_is_gone() -> None:
    stop = StopSignal()
    child._stop_with_parent(os.getpid(), stop)  # not our parent's number
    assert stop.is_set()


def test_a_process_that_was_killed_may_be_retried(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(TransientError, match=f"ended by signal {signal.SIGKILL:d}"):
        record_side(case.task(place="signal"), StopSignal())


def test_on_neuron_a_side_has_the_flags_and_the_cache_of_the_compile_stage(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, str] = {}

    def look(task: SideTask, stop: StopSignal, console: Console) -> None:
        seen.update(os.environ)
        raise DataError("as seen")

    monkeypatch.setattr(child, "record", look)
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--optlevel=3")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "")
    file = tmp_path / "task.json"
    file.write_text(case.task(Side("xla", "fp32")).model_dump_json())
    assert child.main(file, os.getppid()) == DataError.exit_code
    assert seen["NEURON_CC_FLAGS"] == case.settings.compile.flags.text()
    assert seen["NEURON_COMPILE_CACHE_URL"].endswith("workspace/compile-cache")
    said = capsys.readouterr()
    assert "NEURON_CC_FLAGS was '--optlevel=3'" in said.out
    assert "trnpipe parity xla.fp32: DataError: as seen" in said.err


@needs_xla
def test_xla_agrees_with_the_cpu_and_a_seeded_error_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(tmp_path, {"train": (80, 0), "valid": (60, 0), "test": (0, 0)})  # one bucket: half the graphs
    cpu, said = case.side(case.task(place="cpu")), list[str]()
    assert command.run(case.settings, StopSignal(), said.append, ToolCall(arguments=(cpu.uri, "xla"))) == EXIT_OK
    assert "parity of A cpu.fp32 (cpu) and B xla.fp32 (xla:CPU)" in said[0]
    xla = load_side(open_storage(case.task(Side("xla", "fp32")).place), case.folder / "cache")
    compared = compare_sides(cpu, xla, PARITY).compared
    assert compared.curve.max_loss > 0, "the two are computed by different kernels"
    for error in (wrong_epsilon, dropped_weight):
        with monkeypatch.context() as patch:
            error(patch)
            bad = case.side(case.task(place=f"xla-{error.__name__}"))
        assert not compare_sides(xla, bad, PARITY).passed
