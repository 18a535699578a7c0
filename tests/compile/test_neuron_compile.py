"""The driver of neuron_parallel_compile survives what the tools do, puts the cache in order and says so."""

import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.compile import neuron_compile
from pipeline.compile.cache import CompilerProcess
from pipeline.compile.config import CompileConfig, CompilerFlags, flags_hash
from pipeline.compile.neuron_compile import NeuronCompile, NeuronCompileResult, Repair, repair_after_run
from pipeline.compile.neuron_tool import LOG_NAME, neuron_environment, wrapper_script
from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from tests.compile.fake_neuron.cache import VERSION, lock_of
from tests.compile.fake_neuron.toolchain import ROOT, ToolChain

SUFFIX = flags_hash(CompilerFlags().tokens(), compiler=VERSION, target="trn1")
WAIT_S = 200.0  # longest wait for what must happen; machines may be loaded


@dataclass
class Case:
    """A tool chain and one way to run the driver over it."""

    tools: ToolChain
    scratch: Path
    stop: StopSignal = field(default_factory=StopSignal)
    said: list[str] = field(default_factory=list)

    def run(self, num_graphs: int = 3, fault: str = "", *more: str, **changes: Any) -> NeuronCompileResult:
        repair: Repair = changes.pop("repair", self.repair)
        root: str = changes.pop("cache_root", str(self.tools.cache))
        env = changes.pop("env", self.tools.env(fault, generation=changes.pop("generation", "new")))
        self.driver = NeuronCompile(
            changes.pop("command", self.tools.command(num_graphs, *more)),
            CompileConfig(**{"parallel": 2, "max_retries": 1, "time_limit_s": WAIT_S, **changes}),
            cache_root=root,
            scratch=self.scratch,
            repair=repair,
            stop=self.stop,
            env=env,
            say=self.said.append,
        )
        return self.driver.run()

    @property
    def num_retries(self) -> int:
        """Of whole attempts, and of graphs by the tool itself."""
        reports = [attempt.log.report or {} for attempt in self.driver.attempts]
        return len(reports) - 1 + sum(graph.retry for report in reports for graph in report.values())

    def repair(self, root: str) -> Sequence[str]:
        """The real repair; only the compilers of this tool chain count, for other tests run at the same time."""

        def compilers() -> list[CompilerProcess]:
            return [CompilerProcess(found.pid, "neuronx-cc") for found in self.tools.processes()]

        return repair_after_run(root, compilers=compilers)

    def stop_at_the_hang(self) -> None:
        """Set the stop signal, in a thread, when a fake has come to where it hangs."""

        def watch() -> None:
            until = time.monotonic() + WAIT_S
            while not (self.tools.state / "hangs").exists() and time.monotonic() < until:
                time.sleep(0.01)
            self.stop.set("SIGTERM")

        threading.Thread(target=watch, daemon=True).start()

    def assert_clean(self, *done: int) -> None:
        """No lock, no half entry, no process; these graphs are compiled."""
        assert self.tools.unclean() == []
        assert self.tools.processes() == []
        assert [index for index in range(300) if self.tools.is_done(index)] == list(done)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(ToolChain(tmp_path / "tools", SUFFIX), tmp_path / "scratch")


@pytest.mark.parametrize("generation", ["old", "new"])
def test_all_graphs_are_compiled(case: Case, generation: str) -> None:
    result = case.run(3, generation=generation)
    assert result.graphs == tuple(case.tools.key(index) for index in range(3))
    assert (result.num_succeeded, case.num_retries, case.driver.actions) == (3, 0, [])
    assert result.graph_seconds.keys() == set(result.graphs)
    assert all(seconds > 0 for seconds in result.graph_seconds.values())
    assert "Total graphs: 3" in (case.driver.attempts[-1].folder / LOG_NAME).read_text()
    case.assert_clean(0, 1, 2)


def test_a_second_time_nothing_is_compiled(case: Case) -> None:
    case.run(2)
    result = case.run(3)
    assert (len(result.graphs), result.num_succeeded) == (3, 1)
    result = case.run(3)
    assert (len(result.graphs), result.num_succeeded) == (3, 0)
    assert len(case.tools.compiles()) == 3


def test_options_that_the_tool_would_swallow_reach_the_program(case: Case) -> None:
    words = ["--world_size", "4", "--log_level=debug", "--num_parallel", "9", "--num", "1", "--command=x", "--static"]
    odd = ["a b", "$HOME", "it's", "", "*", "-c", ";exit 3", "ü"]
    case.run(1, "", *words, *odd)
    assert case.tools.trial()["argv"] == ["--graphs", "1", *words, *odd]


def test_the_program_starts_where_the_caller_is(case: Case, tmp_path: Path) -> None:
    case.run(1)
    assert case.tools.trial()["cwd"] == str(Path.cwd())
    leftovers = {path.name.partition("_results_")[0] for path in case.scratch.rglob("*.json")}
    assert leftovers == {"neuron_parallel_compile", "total_neuron_parallel_compile"}


def test_the_environment_of_the_program(case: Case) -> None:
    env = case.tools.env(
        NEURON_CC_FLAGS="--optlevel=3", NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE="1", NEURON_RT_LOG_LEVEL="INFO"
    )
    case.run(1, env=env, max_retries=3)
    assert case.tools.trial()["env"] == {
        "NEURON_CC_FLAGS": "--model-type=transformer --auto-cast=none --optlevel=1",
        "NEURON_COMPILE_CACHE_URL": str(case.tools.cache),
        "NEURON_PARALLEL_COMPILE_MAX_RETRIES": "3",
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
        "NEURON_EXTRACT_GRAPHS_ONLY": "1",
        "NEURON_RT_LOG_LEVEL": "INFO",
    }
    assert "--optlevel=3" in case.driver.actions[0] and "--optlevel=1" in case.driver.actions[0]


def test_a_cache_root_as_uri_or_relative(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool knows no file://, and starts in another folder."""
    monkeypatch.chdir(case.tools.folder)
    for index, url in enumerate((f"file://{case.tools.cache}", "cache")):
        case.run(index + 1, cache_root=CompileConfig(cache_url=url).cache_root(""))
        assert case.tools.trial()["env"]["NEURON_COMPILE_CACHE_URL"] == str(case.tools.cache)
    case.assert_clean(0, 1)


def test_a_cache_on_s3_has_the_last_say(case: Case, s3_uri: str) -> None:
    key = case.tools.key(0)
    command = ["echo", f"Using a cached neff at {s3_uri}/{key}/model.neff"]
    with pytest.raises(TransientError, match="locked by another process"):
        case.run(command=command, cache_root=s3_uri, repair=repair_after_run)
    for name in ("model.neff", "model.done"):
        open_storage(s3_uri).write_bytes(f"{key}/{name}", b"")
    result = case.run(command=command, cache_root=s3_uri)
    assert (result.graphs, result.num_succeeded) == ((key,), 0)


def test_retrying_failures_does_not_change_the_key(case: Case) -> None:
    env = neuron_environment({}, CompileConfig(), cache_root="s3://bucket/cache", retry_failed=True)
    assert env["NEURON_CC_FLAGS"].split()[-1] == "--retry_failed_compilation"
    assert env["NEURON_COMPILE_CACHE_URL"] == "s3://bucket/cache"


def test_the_wrapper_leaves_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(wrapper_script(["sh", "-c", "exit 7"], cwd=tmp_path, exit_file=tmp_path / "it's the code"))
    assert subprocess.run(["sh", str(script)], check=False).returncode == 7
    assert (tmp_path / "it's the code").read_text() == "7\n"


@pytest.mark.parametrize(
    ("memory_gib", "compilers"), [(0.5, 1), (32, 1), (64, 1), (65, 2), (511.5, 8), (512, 8), (2048, 32)]
)
def test_one_compiler_for_every_64_gib(case: Case, memory_gib: float, compilers: int) -> None:
    driver = NeuronCompile(
        case.tools.command(1),
        CompileConfig(time_limit_s=WAIT_S),
        cache_root=str(case.tools.cache),
        scratch=case.scratch,
        repair=case.repair,
        stop=case.stop,
        env=case.tools.env(),
        memory_bytes=int(memory_gib * 2**30),
    )
    assert driver.parallel == compilers


def test_a_compile_that_fails_once(case: Case) -> None:
    """The tool tries again by itself."""
    result = case.run(2, "flaky", parallel=1)
    assert (result.num_succeeded, case.num_retries, case.driver.actions) == (2, 1, [])
    case.assert_clean(0, 1)


def test_a_graph_that_the_compiler_refuses(case: Case) -> None:
    with pytest.raises(ConfigError, match="the compiler refused graphs") as caught:
        case.run(3, "fail:1")
    name = case.tools.entry(1).name
    assert name in str(caught.value) and "NCC_EVRF007" in str(caught.value)
    assert case.tools.entry(0).name not in caught.value.seen.partition("\n")[0]
    (kept,) = case.scratch.rglob(f"{name}.log")
    assert "Operator sort is not supported" in kept.read_text()
    assert case.tools.compiles().count(name) == 2  # once more, by the tool; never a second round
    case.assert_clean(0, 2)
    assert not case.tools.entry(1).exists()  # so that the failure is not reused for ever


def test_256_failures_are_not_a_success(case: Case) -> None:
    """The exit code is their number modulo 256."""
    with pytest.raises(ConfigError, match=r"the compiler refused graphs.* and 251 more"):
        case.run(256, "fail-all", max_retries=0)
    assert case.tools.compiles() == []


def test_a_poisoned_failure_is_compiled_again(case: Case) -> None:
    case.tools.poison(1)
    result = case.run(3)
    assert (result.num_succeeded, case.num_retries) == (3, 1)
    text = "\n".join(case.driver.actions)
    assert "the cache holds failures of earlier runs" in text and case.tools.entry(1).name in text
    assert f"drop failed {case.tools.key(1)}" in text
    case.assert_clean(0, 1, 2)


def test_a_poisoned_failure_that_no_repair_removes(case: Case) -> None:
    """On S3 it may not be ours to delete; the tool is told to retry it as well."""
    case.tools.poison(1)
    result = case.run(2, repair=lambda root: [])
    assert (result.num_succeeded, case.num_retries) == (2, 1)
    case.assert_clean(0, 1)


def test_a_stale_lock_is_removed(case: Case) -> None:
    """The tool skips a locked graph without a word and ends with 0."""
    case.tools.lock(1)
    case.run(2)
    text = "\n".join(case.driver.actions)
    assert "locked by another process" in text and f"unlock {case.tools.key(1)}" in text
    case.assert_clean(0, 1)


def test_a_living_lock_is_waited_for(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_compile, "OTHERS_POLL_S", 0.02)
    lock = case.tools.lock(1)

    def other_machine() -> None:
        until = time.monotonic() + WAIT_S
        while not any("another process compiles" in line for line in case.said) and time.monotonic() < until:
            time.sleep(0.01)
        (lock.parent / "model.neff").write_bytes(b"NEFF")
        (lock.parent / "model.done").touch()
        lock.unlink()

    threading.Thread(target=other_machine, daemon=True).start()
    result = case.run(2, repair=lambda root: [])
    assert (len(result.graphs), result.num_succeeded) == (2, 1)
    case.assert_clean(0, 1)


def test_a_lock_that_stays_is_given_up_at_the_limit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_compile, "OTHERS_POLL_S", 0.02)
    case.tools.lock(1)
    with pytest.raises(TransientError, match=r"locked by another process|took longer") as caught:
        case.run(2, repair=lambda root: [], time_limit_s=3.0)
    assert "next:" in str(caught.value)


def test_waiting_for_a_stale_lock_is_ended(case: Case) -> None:
    """Left alone it prints one line a minute for ever."""
    case.tools.lock(0)
    case.run(2, "wait")
    text = "\n".join(case.driver.actions)
    assert "waits for a lock that no running compiler holds" in text and "unlock" in text
    case.assert_clean(0, 1)


def test_a_crash_that_leaves_a_lock(case: Case) -> None:
    """The tool ends with 0 then, too."""
    result = case.run(3, "crash")
    text = "\n".join(case.driver.actions)
    assert "the compile broke off (exit code 0)" in text and "unlock" in text
    assert len(result.graphs) == 3
    case.assert_clean(0, 1, 2)


@pytest.mark.parametrize("fault", ["oom:1", "oom-child:1"])
def test_out_of_memory_halves_the_compilers(case: Case, fault: str) -> None:
    result = case.run(2, fault, parallel=4, max_retries=0)
    assert (result.parallel, len(result.graphs)) == (1, 2)
    assert [line for line in case.driver.actions if line.startswith("compiling at most")] == [
        "compiling at most 2 graphs at once from now on",
        "compiling at most 1 graphs at once from now on",
    ]
    case.assert_clean(0, 1)


def test_out_of_memory_with_one_compiler(case: Case) -> None:
    flags = CompilerFlags(optlevel=2)
    with pytest.raises(ConfigError, match="one at a time") as caught:
        case.run(1, "oom:0", parallel=2, max_retries=0, flags=flags)
    assert "compile.flags.optlevel" in caught.value.next_command
    case.assert_clean()
    with pytest.raises(ConfigError, match="more memory") as caught:
        case.run(1, "oom:0", parallel=1, max_retries=0)
    assert "optlevel" not in caught.value.next_command


def test_the_tool_itself_killed(case: Case) -> None:
    result = case.run(1, "npc-killed", parallel=2)
    assert result.parallel == 1 and "ran out of memory" in case.driver.actions[0]
    case.assert_clean(0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(78, ConfigError), (65, DataError), (75, TransientError), (143, TransientError), (137, TransientError)],
)
def test_a_failed_trial_run_fails_as_it_did(case: Case, code: int, kind: type[TrnpipeError]) -> None:
    with pytest.raises(kind, match=f"the trial run ended with exit code {code}") as caught:
        case.run(3, f"trial:{code}")
    assert "Traceback: the trial run breaks here" in str(caught.value)
    assert case.tools.compiles() == []


def test_a_bug_in_the_trial_run_is_not_retried(case: Case) -> None:
    with pytest.raises(TrnpipeError, match="exit code 1") as caught:
        case.run(3, "trial:1")
    assert type(caught.value) is TrnpipeError and not caught.value.retry


def test_a_program_that_shows_no_graph(case: Case) -> None:
    with pytest.raises(ConfigError, match="showed no graph"):
        case.run(3, "silent")


def test_the_report_may_be_in_its_file_alone(case: Case) -> None:
    assert case.run(2, "no-report").graph_seconds.keys() == {case.tools.key(0), case.tools.key(1)}


def test_without_the_tools(case: Case) -> None:
    with pytest.raises(ConfigError, match="neuron_parallel_compile cannot be started"):
        case.run(1, env={**case.tools.env(), "PATH": "/nowhere"})


def test_another_cache_in_the_program_is_an_error(case: Case, tmp_path: Path) -> None:
    flags = f"{CompilerFlags().text()} --cache_dir={tmp_path / 'elsewhere'}"
    with pytest.raises(ConfigError, match=r"the trial run used the cache .*elsewhere"):
        case.run(command=["env", f"NEURON_CC_FLAGS={flags}", *case.tools.command(1)])


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["hang-trial", "hang-compile"])
def test_a_hang_ends_at_the_time_limit(case: Case, fault: str) -> None:
    with pytest.raises(TransientError, match="took longer than 3s"):
        case.run(2, fault, time_limit_s=3.0)
    case.assert_clean()


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["hang-trial", "hang-compile"])
def test_stopped_while_tracing_or_compiling(case: Case, fault: str) -> None:
    case.stop_at_the_hang()
    with pytest.raises(Preempted, match="SIGTERM"):
        case.run(2, fault, "--own-session")  # as ranks under torchrun, out of reach of the process group
    case.assert_clean()
    text = "\n".join(case.said)
    assert "ended the trial run and all compilers" in text
    assert ("unlock" in text) == (fault == "hang-compile")
    case.stop = StopSignal()
    assert len(case.run(2).graphs) == 2  # what was left does not disturb the next one
    case.assert_clean(0, 1)


def test_stopped_before_the_start(case: Case) -> None:
    case.stop.set("SIGTERM")
    with pytest.raises(Preempted):
        case.run(1)
    assert not case.scratch.exists()


def test_a_repair_that_fails_does_not_hide_the_reason(case: Case) -> None:
    def repair(root: str) -> Sequence[str]:
        raise ConfigError("no rights")

    with pytest.raises(DataError) as caught:
        case.run(2, "trial:65", repair=repair)
    assert any("no rights" in note for note in caught.value.__notes__)


PROGRAM = """
import sys
from pathlib import Path
from pipeline.core.errors import TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.compile.config import CompileConfig
from pipeline.compile.neuron_tool import neuron_environment, wrapper_script
from pipeline.compile.neuron_compile import NeuronCompile
from pipeline.compile.neuron_compile import repair_after_run
from pipeline.proc.signals import stop_on_signals
stop = StopSignal()
root, scratch, *command = sys.argv[1:]
repair = lambda root: repair_after_run(root, compilers=list)
try:
    with stop_on_signals(stop):
        config = CompileConfig(parallel=2)
        NeuronCompile(command, config, cache_root=root, scratch=Path(scratch), repair=repair, stop=stop).run()
except TrnpipeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.fault
def test_sigterm_to_a_real_process(case: Case) -> None:
    """As Batch sends it: exit 143, before the monitor of runtime_signals ends the process by force."""
    words = [sys.executable, "-c", PROGRAM, str(case.tools.cache), str(case.scratch), *case.tools.command(2)]
    env = case.tools.env("hang-compile", PYTHONPATH=str(ROOT))
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + WAIT_S
        while not (case.tools.state / "hangs").exists() and time.monotonic() < until:
            time.sleep(0.02)
        assert [path for path in case.tools.cache.rglob("*.lock")] != []
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 143, errors
    assert "stopped by SIGTERM while compiling graphs" in errors  # the orderly way out, not the last resort
    case.assert_clean()


def test_a_dead_tool_leaves_no_compiler_behind(case: Case) -> None:
    """Killed by the host, the tool does not end what it started."""
    killed = threading.Event()

    def kill() -> None:
        until = time.monotonic() + WAIT_S
        while not (case.tools.state / "hangs").exists() and time.monotonic() < until:
            time.sleep(0.01)
        for process in case.tools.processes():
            with suppress(psutil.NoSuchProcess):  # ended with the one before
                if any("neuron_parallel_compile" in word for word in process.cmdline()[:3]):
                    process.kill()
        killed.set()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(ConfigError, match="one at a time"):
        case.run(1, "hang-compile", parallel=1)
    assert killed.wait(WAIT_S)
    case.assert_clean()


def test_quoting_is_that_of_the_shell() -> None:
    script = wrapper_script(["a b", "$x"], cwd=Path("/c d"), exit_file=Path("/e"))
    assert shlex.split(script.splitlines()[1])[:2] == ["cd", "/c d"]
    assert shlex.split(script.splitlines()[2]) == ["a b", "$x"]


def test_lock_names_agree_with_the_fake(case: Case) -> None:
    assert lock_of(case.tools.entry(0)).name == "model.hlo_module.pb.lock"
