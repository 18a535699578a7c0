"""Neuron's tool: when it runs, what its log says, and the outcome of a run. The tools are fakes (fake_neuron).

Refused graphs and missing tools: tests/fault/test_compile_stage.py.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compile.config import CompileConfig, CompilerFlags
from pipeline.compile.neuron import (
    LOG_NAME,
    SIGKILLED,
    CompileRun,
    NeuronCompile,
    NeuronCompileResult,
    drives_tool,
    entry_key,
    parse_log,
    use_neuron_cache,
)
from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.parallel.world import TRACE_FILE
from tests.compile.fake_neuron.toolchain import ToolChain

WAIT_S = 200.0  # longest wait for what must happen; machines may be loaded
NEURON, CPU = {"PJRT_DEVICE": "NEURON"}, {"PJRT_DEVICE": "CPU"}


@pytest.mark.parametrize(
    ("tool", "backend", "env", "expected"),
    [
        ("auto", "xla", NEURON, True),
        ("auto", "cpu", NEURON, False),
        ("auto", "xla", CPU, False),
        ("neuron", "xla", CPU, True),
        ("none", "xla", NEURON, False),
        ("neuron", "xla", CPU | {TRACE_FILE: "/f"}, False),  # the trial run does not drive itself once more
    ],
)
def test_where_the_tool_is_driven(tool: str, backend: str, env: dict[str, str], expected: bool) -> None:
    assert drives_tool(CompileConfig.model_validate({"tool": tool}), backend, env) is expected


@pytest.mark.parametrize("cache_url", ["", "s3://bucket/cache", "file:///disk/cache"])
def test_training_has_the_flags_and_the_cache_of_the_compile_stage(tmp_path: Path, cache_url: str) -> None:
    config = CompileConfig(flags=CompilerFlags(auto_cast="matmult", optlevel=2), cache_url=cache_url)
    env = NEURON | {"NEURON_CC_FLAGS": "--optlevel=3 --cache_dir=/elsewhere"}
    warning = use_neuron_cache(config, str(tmp_path), "xla", env)
    assert "--optlevel=3 --cache_dir=/elsewhere" in warning and "--optlevel=2" in warning
    assert env["NEURON_CC_FLAGS"].split() == list(config.flags.tokens())
    assert env["NEURON_COMPILE_CACHE_URL"] == config.cache_root(str(tmp_path))
    assert use_neuron_cache(config, str(tmp_path), "xla", env) == ""  # as in a rank of its own
    for backend, other in (("xla", CPU), ("cpu", NEURON), ("xla", NEURON | {TRACE_FILE: "/f"})):
        before = dict(other)
        assert use_neuron_cache(config, "/w", backend, other) == "" and other == before, "elsewhere, and in a trial run"


# Documented samples of what the tools print: messages of SDK 2.29 ([LEVEL]:) and before 2.27 (LEVEL ||COMPONENT||:).

ROOT = "/var/tmp/neuron-compile-cache/neuronxcc-2.16.372.0+4a9b2326"
ONE, TWO = f"{ROOT}/MODULE_9993940051196728623+3cc9a3cb", f"{ROOT}/MODULE_7470829644182149778+3cc9a3cb"
REPORT = {
    "compilation_summary": {"true": 1, "false": 1},
    "compilation_report": {
        f"{ONE}/model.hlo_module.pb": {"status": True, "retry": 0, "compile_time": 9.5},
        f"{TWO}/model.hlo_module.pb": {"status": False, "retry": 2, "compile_time": 192.75},
    },
    "start_time": 1737076372.5,
    "compilation_time": 195.25,
}
OLD = "2025-01-17 01:16:07.000934:  42821  INFO ||NEURON_CC_WRAPPER||: "
NEW = "2026-04-13 01:46:33.000003: 837617 [INFO]: "


def whole_run(prefix: str) -> str:
    extracted = "for ahead-of-time parallel compilation. No compilation was done."
    messages = (
        "Compile cache path: /var/tmp/neuron-compile-cache",
        f"Extracting graphs ({ONE}/model.hlo_module.pb) {extracted}",
        f"...Extracting graphs ({TWO}/model.hlo_module.pb) for aheExtracting graphs ({ONE}/model.hlo_module.pb) for",
        f"Using a cached neff at {ROOT}/MODULE_5+3cc9a3cb/model.neff. Exiting with a successfully compiled graph.",
        f"Got a cached failed neff at {ROOT}/MODULE_6+3cc9a3cb/model.neff. Will skip compilation, please set",
        f"New graph list from script 2: \n\t{ONE}/model.hlo_module.pb",
        "Call compiler with cmd: neuronx-cc compile --framework=XLA /tmp/a-9/model.MODULE_9-9.pb --output x -O1",
        "......\nCompiler status PASS",
        "Failed compilation with ['neuronx-cc', 'compile']: [NCC_EVRF007] no",
        json.dumps(REPORT, indent=4),
        "Total graphs: 2",
    )
    return "step 1 | loss -9\n" + "".join(f"{prefix}{message}\n" for message in messages)


@pytest.mark.parametrize("prefix", [OLD, NEW])
def test_a_whole_run(prefix: str) -> None:
    log = parse_log(whole_run(prefix))
    folder = ROOT.rpartition("/")[2]
    one, two = entry_key(ONE), entry_key(TWO)
    assert log.required == (one, two, f"{folder}/MODULE_5+3cc9a3cb", f"{folder}/MODULE_6+3cc9a3cb")
    assert {key: (graph.status, graph.compile_time) for key, graph in log.report.items()} == {
        one: (True, 9.5),
        two: (False, 192.75),
    }
    assert len(log.failures) == 1 and "NCC_EVRF007" in log.failures[0] and not log.was_killed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Failed compilation with ['neuronx-cc', 'compile', '--verbose=35']: neuronx-cc failed with -9", True),
        ("Command '['neuronx-cc', 'compile']' returned non-zero exit status -9.", True),
        ("subprocess.CalledProcessError: Command 'neuronx-cc compile' died with <Signals.SIGKILL: 9>.", True),
        ("[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory.", True),
        ("Failed compilation with ['neuronx-cc', 'compile', '--verbose=35']: neuronx-cc failed with 70", False),
        ("step 9 | loss -9.0 | compiled", False),
    ],
)
def test_a_killed_compiler_is_reported_in_many_ways(line: str, expected: bool) -> None:
    assert parse_log(f"x\n{line}\ny\n").was_killed is expected


@given(st.one_of(st.text(max_size=300), st.integers(0, 2_000)))
def test_any_text_and_a_log_that_is_cut_anywhere_can_be_read(text: str | int) -> None:
    whole = parse_log(whole_run(NEW))
    part = parse_log(whole_run(NEW)[:text] if isinstance(text, int) else text)
    if isinstance(text, int):
        assert set(part.required) <= set(whole.required) and part.report in ({}, whole.report)


SHOWN = f"Extracting graphs ({ONE}/model.hlo_module.pb)\n"
REFUSED = json.dumps({"compilation_summary": {"false": 1}, "compilation_report": {ONE: {"status": False}}})
KILLED = "Failed compilation with ['neuronx-cc']: neuronx-cc failed with -9\n"


@pytest.mark.parametrize(
    ("text", "exit_code", "trial_code", "is_missing", "expected"),
    [
        (SHOWN, 1, 0, False, None),  # the cache decides
        (SHOWN + REFUSED, 0, 0, True, ConfigError),  # of 256 failures
        (SHOWN + REFUSED + KILLED, 1, 0, True, TransientError),  # another try, with less memory
        (SHOWN, SIGKILLED[0], None, True, TransientError),
        (SHOWN, 0, 0, True, TransientError),  # no report
        ("", 2, None, False, TransientError),
        ("", 1, 65, False, DataError),
        (SHOWN, 1, 78, False, ConfigError),
        (SHOWN, 1, 137, False, TransientError),
        ("No todo hlos found in cache", 0, 0, False, ConfigError),
    ],
)
def test_what_a_run_came_to(
    tmp_path: Path, text: str, exit_code: int, trial_code: int | None, is_missing: bool, expected: type | None
) -> None:
    (tmp_path / "log").write_text(text)
    missing = (entry_key(ONE),) if is_missing else ()
    attempt = CompileRun(exit_code, trial_code, parse_log(text), missing, tmp_path / "log")
    assert attempt.is_done is (expected is None)
    if expected and not attempt.is_done:
        error = attempt.error()
        assert attempt.is_final is (type(error) is not TransientError or trial_code == 137) or attempt.was_killed
        assert isinstance(error, ConfigError if attempt.was_killed and trial_code in (0, None) else expected)


# Whole runs.


@dataclass
class Case:
    """A tool chain and one way to run the driver over it."""

    tools: ToolChain
    scratch: Path
    stop: StopSignal = field(default_factory=StopSignal)
    said: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Compilers of other jobs."""

    def run(self, num_graphs: int = 3, fault: str = "", *more: str, **changes: Any) -> NeuronCompileResult:
        command = changes.pop("command", self.tools.command(num_graphs, *more))
        root, env = changes.pop("cache_root", str(self.tools.cache)), changes.pop("env", self.tools.env(fault))
        return NeuronCompile(
            *(command, CompileConfig(**{"time_limit_s": WAIT_S, **changes}), root, self.scratch, self.stop),
            env=env,
            memory_bytes=65 * 2**30,
            say=self.said.append,
            # Only the compilers of this tool chain count, for other tests run at the same time.
            compilers=lambda: [*self.others, *(str(found.pid) for found in self.tools.processes())],
        ).run()

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    def assert_clean(self, *done: int) -> None:
        """No lock, no half entry, no process; these graphs are compiled."""
        assert self.tools.unclean() == [] and self.tools.processes() == []
        assert [index for index in range(10) if self.tools.is_done(index)] == list(done)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(ToolChain(tmp_path / "tools"), tmp_path / "scratch")


def test_all_graphs_are_compiled_and_a_second_time_none(case: Case) -> None:
    """What earlier runs left is repaired first."""
    case.tools.poison(0)
    case.tools.lock(1)
    result = case.run(2)
    assert f"drop failed {case.tools.key(0)}" in case.text and f"drop locked {case.tools.key(1)}" in case.text
    case.said[:2] = []
    assert result.graphs == tuple(case.tools.key(index) for index in range(2))
    assert result.seconds.keys() == set(result.graphs) and all(result.seconds.values())
    assert case.said[0] == "compiling up to 2 graphs in parallel (attempt 1)", "one for every 64 GiB"
    assert '"compilation_summary"' in (case.scratch / "attempt-1" / LOG_NAME).read_text()
    again = case.run(3)
    assert (len(again.graphs), list(again.seconds)) == (3, [case.tools.key(2)])
    assert len(case.tools.compiles()) == 3
    case.assert_clean(0, 1, 2)


def test_what_the_program_is_given(case: Case) -> None:
    """Options that the tool would swallow, the caller's folder, and the environment of training."""
    words = ["--world_size", "4", "--log_level=debug", "--num_parallel", "9", "--num", "1", "--command=x", "--static"]
    odd = ["a b", "$HOME", "it's", "", "*", "-c", ";exit 3", "ü"]
    more = {"NEURON_CC_FLAGS": "--optlevel=3", "NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE": "1"}
    case.run(1, "", *words, *odd, env=case.tools.env(NEURON_RT_LOG_LEVEL="INFO", **more))
    assert case.tools.trial()["argv"] == ["--graphs", "1", *words, *odd]
    assert case.tools.trial()["cwd"] == str(Path.cwd())
    assert case.tools.trial()["env"] == {
        "NEURON_CC_FLAGS": f"{CompilerFlags().text()} --retry_failed_compilation",
        "NEURON_COMPILE_CACHE_URL": str(case.tools.cache),
        "NEURON_PARALLEL_COMPILE_MAX_RETRIES": "1",
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
        "NEURON_EXTRACT_GRAPHS_ONLY": "1",
        "NEURON_RT_LOG_LEVEL": "INFO",
    }


def test_a_cache_on_s3_decides(case: Case, s3_uri: str) -> None:
    key = case.tools.key(0)
    command = ["echo", f"Using a cached neff at {s3_uri}/{key}/model.neff"]
    with pytest.raises(TransientError, match="graphs were not compiled"):
        case.run(command=command, cache_root=s3_uri)
    for name in ("model.neff", "model.done"):
        open_storage(s3_uri).write_bytes(f"{key}/{name}", b"NEFF")
    assert case.run(command=command, cache_root=s3_uri).graphs == (key,)


@pytest.mark.parametrize(("fault", "parallel"), [("crash", 2), ("oom:1", 1)])
def test_a_crash_and_a_lack_of_memory_are_tried_once_more(case: Case, fault: str, parallel: int) -> None:
    """A crash leaves a lock, and the tool ends with 0; for memory with one compiler alone."""
    case.run(3, fault)
    assert f"compiling up to {parallel} graphs in parallel (attempt 2)" in case.said
    case.assert_clean(0, 1, 2)


def test_a_trial_run_that_fails_and_a_lack_of_memory_for_one_compiler(case: Case) -> None:
    with pytest.raises(DataError, match="the trial run failed with exit code 65") as failed:
        case.run(3, "trial:65")
    assert "Traceback: the trial run breaks here" in str(failed.value) and case.tools.compiles() == []
    with pytest.raises(ConfigError, match="a compiler was killed") as caught:
        case.run(1, "oom:0", flags=CompilerFlags(optlevel=2))
    assert "compile.flags.optlevel" in caught.value.next_command
    case.assert_clean()


def when(is_due: Callable[[], bool], act: Callable[[], object]) -> None:
    """Do something in a thread as soon as that is so."""

    def watch() -> None:
        until = time.monotonic() + WAIT_S
        while not is_due() and time.monotonic() < until:
            time.sleep(0.02)
        act()

    threading.Thread(target=watch, daemon=True).start()


def test_a_lock_of_another_process_is_waited_for(case: Case) -> None:
    """The tool skips a locked graph without a word and ends with 0."""
    lock = case.tools.lock(1)
    case.others.append("another job's")
    finished = threading.Event()

    def other_process() -> None:
        (lock.parent / "model.neff").write_bytes(b"NEFF")
        (lock.parent / "model.done").touch()
        lock.unlink()
        finished.set()

    when(lambda: case.tools.is_done(0), other_process)
    result = case.run(2)
    assert finished.is_set() and len(result.graphs) == 2
    case.assert_clean(0, 1)


def test_a_trial_run_that_waits_for_a_dead_lock_goes_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone it prints one line a minute for ever."""
    monkeypatch.setattr("pipeline.compile.neuron.DEAD_LOCK_S", 0.0)
    monkeypatch.setattr(NeuronCompile, "_repair", lambda driver: None)
    case.tools.lock(0)
    monkeypatch.setattr(ToolChain, "processes", lambda tools: [])
    case.run(2, "wait")
    assert "waiting for the lock of" in case.text and f"unlock {case.tools.key(0)}" in case.text


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["hang-trial", "hang-compile"])
def test_a_hang_ends_at_the_time_limit_and_with_a_stop(case: Case, fault: str) -> None:
    with pytest.raises(TransientError, match="took longer than 3s"):
        case.run(2, fault, time_limit_s=3.0)
    case.assert_clean()
    (case.tools.state / "hangs").unlink(missing_ok=True)
    when((case.tools.state / "hangs").exists, lambda: case.stop.set("SIGTERM"))
    with pytest.raises(Preempted):
        case.run(2, fault)
    case.assert_clean()
