"""`trnpipe parity`: what it refuses, what it leaves behind, and the exit code."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.commands import ToolCall
from pipeline.commands import parity as command
from pipeline.core.errors import EXIT_OK, CheckpointError, ConfigError, DataError, GateRefused
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.parity.compare import ParityReport
from pipeline.parity.record import SideTask, record
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from tests import zygote
from tests.parity.case import CYCLE, Case, make_case

pytestmark = pytest.mark.stage
Run = Callable[..., int]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("parity"))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(case: Case, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, with sides in this process."""

    def here(task: SideTask, stop: StopSignal) -> int:
        record(task, stop, Console(stream=io.StringIO()))
        return EXIT_OK

    def run(*words: str, settings: Settings = case.settings, **options: str) -> int:
        call = ToolCall(arguments=words, options={f"--{name}": value for name, value in options.items()})
        return command.run(settings, StopSignal(), said.append, call)

    monkeypatch.setattr(command, "record_side", here)
    return run


def changed(settings: Settings, **parity: object) -> Settings:
    return settings.model_copy(update={"parity": settings.parity.model_copy(update=parity)})


def test_two_sides_that_agree(case: Case, run: Run, said: list[str]) -> None:
    pytest.importorskip("matplotlib")
    loose = case.settings.parity.reduced.model_copy(update={"min_overlap": 0.0, "min_correlation": 0.5})
    settings = changed(case.settings, reduced=loose, max_difference=0.5)
    assert run("cpu", "cpu:bf16", settings=settings) == EXIT_OK
    folder = open_storage(case.settings.workspace)
    prefix = f"cycles/{CYCLE}/parity/cpu.fp32-cpu.bf16"
    report = ParityReport.model_validate_json(folder.read_bytes(f"{prefix}/parity.json"))
    assert report.passed
    assert (report.a.name, report.b.name) == ("cpu.fp32", "cpu.bf16")
    assert folder.read_bytes(f"{prefix}/parity.svg").startswith(b"<?xml")
    assert f"report {folder.uri(prefix)}/parity.json" in said


def test_sides_too_far_apart_are_refused_with_the_figures(case: Case, run: Run) -> None:
    strict = case.settings.parity.reduced.model_copy(update={"max_probability_difference": 0.0})
    with pytest.raises(
        GateRefused, match=r"cpu\.fp32 and cpu\.bf16 differ too much: .*largest difference of a prob"
    ) as caught:
        run("cpu", "cpu:bf16", settings=changed(case.settings, reduced=strict, max_difference=0.5))
    assert caught.value.exit_code == 80
    assert "at most 0" in caught.value.expected
    report = json.loads(
        open_storage(case.settings.workspace).read_bytes(f"cycles/{CYCLE}/parity/cpu.fp32-cpu.bf16/parity.json")
    )
    assert "fail" in {check["outcome"] for check in report["checks"]}


def test_a_side_recorded_elsewhere_is_compared(case: Case, run: Run, said: list[str], tmp_path: Path) -> None:
    assert run("cpu", to=str(tmp_path / "there")) == EXIT_OK
    assert said[-1] == f"compare it with another side: trnpipe parity file://{tmp_path}/there SIDE"
    assert run(str(tmp_path / "there"), "cpu") == EXIT_OK
    assert run("cpu", f"file://{tmp_path}/there") == EXIT_OK


def test_without_matplotlib_there_is_a_word_instead_of_a_picture(
    run: Run, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run("cpu", to=str(tmp_path / "there"))
    assert run("cpu", str(tmp_path / "there")) == EXIT_OK
    assert said[-1] == "no picture: matplotlib is not installed (pip install 'matplotlib>=3.9')"


@pytest.mark.parametrize(
    ("words", "options", "seen"),
    [
        (("cpu", "cpu"), {}, "both sides are cpu"),
        (("cpu", "cpu:fp32"), {}, "both sides are cpu"),
        (("gpu",), {}, "'gpu' is not a backend"),
        (("cpu", "xla"), {"to": "somewhere"}, "--to with two sides"),
        (("cpu:fp64", "xla"), {}, "side 'cpu:fp64'"),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Run, words: tuple[str, ...], options: dict[str, str], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen) as caught:
        run(*words, **options)
    assert caught.value.expected


def test_a_place_without_a_record_says_what_may_be_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "record_side", lambda task, stop: pytest.fail("before anything is computed"))
    with pytest.raises(DataError, match="holds no recorded side") as caught:
        run("cpu", str(tmp_path / "gpu"))
    assert "xla, neuron, cpu, cuda" in caught.value.expected


def test_what_it_starts_from_is_said_when_there_is_none(case: Case, run: Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no prepared data"):
        run("cpu", settings=case.settings.model_copy(update={"cycle": "other"}))
    with pytest.raises(ConfigError, match="nothing is promoted"):
        run("cpu", settings=changed(case.settings, checkpoint="incumbent"))
    with pytest.raises(ConfigError, match=r"parity\.checkpoint is scratch"):
        run("cpu", settings=changed(case.settings, checkpoint="scratch"))
    with pytest.raises(CheckpointError, match="holds no committed checkpoint"):
        run("cpu", settings=changed(case.settings, checkpoint=str(tmp_path / "none")))


def test_a_side_that_fails_gives_its_exit_code(case: Case, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "record_side", lambda task, stop: 70)
    assert run("cpu", "cpu:bf16") == 70


def test_the_command_line_reaches_it(tmp_path: Path) -> None:
    done = zygote.run("pipeline", "parity", "gpu", f"--workspace={tmp_path}")
    assert done.returncode == 78
    assert "trnpipe parity: ConfigError: 'gpu' is not a backend" in done.stderr
    assert zygote.run("pipeline", "parity").returncode == 78
