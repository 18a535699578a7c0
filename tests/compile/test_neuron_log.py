"""Logs of both generations of the Neuron tools are read by their text."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compile.neuron_tool import (
    GraphReport,
    LogWatch,
    entry_key,
    graph_name,
    parse_log,
)

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

Line = Callable[..., str]


def old(component: str, text: str, level: str = "INFO") -> str:
    return f"2025-01-17 01:16:07.000934:  42821  {level} ||{component}||: {text}\n"


def new(component: str, text: str, level: str = "INFO") -> str:
    return f"2026-04-13 01:46:33.000003: 837617 [{level}]: {text}\n"


def whole_run(line: Line) -> str:
    extracted = "for ahead-of-time parallel compilation. No compilation was done."
    return "".join(
        (
            "step 1 | loss nan\n",
            line("NEURON_CACHE", "Compile cache path: /var/tmp/neuron-compile-cache"),
            line("NEURON_CC_WRAPPER", f"Extracting graphs ({ONE}/model.hlo_module.pb) {extracted}"),
            line("NEURON_CC_WRAPPER", f"Extracting graphs ({TWO}/model.hlo_module.pb) {extracted}"),
            line("NEURON_CC_WRAPPER", f"Extracting graphs ({ONE}/model.hlo_module.pb) {extracted}"),
            line("NEURON_CC_WRAPPER", f"Using a cached neff at {ROOT}/MODULE_5+3cc9a3cb/model.neff"),
            line("NEURON_PARALLEL_COMPILE", f"New graph list from script 2: \n\t{ONE}/model.hlo_module.pb"),
            line("NEURON_CACHE", "Current remaining items are 2, locked are 0, failed are 0, done are 1, total is 3"),
            line("NEURON_CC_WRAPPER", "Call compiler with cmd: neuronx-cc compile --framework=XLA a.pb --verbose=35"),
            "......\nCompiler status PASS\n",
            line("NEURON_CC_WRAPPER", "Failed compilation with ['neuronx-cc', 'compile']: [NCC_EVRF007] no", "ERROR"),
            line("NEURON_PARALLEL_COMPILE", "worker 6 finished with num of tasks 1...."),
            line("NEURON_CACHE", "Current remaining items are 0, locked are 2, failed are 1, done are 32, total is 34"),
            line("NEURON_PARALLEL_COMPILE", json.dumps(REPORT, indent=4)),
            line("NEURON_PARALLEL_COMPILE", "Total graphs: 2"),
            line("NEURON_PARALLEL_COMPILE", "Total successful compilations: 1"),
            line("NEURON_PARALLEL_COMPILE", "Total failed compilations: 1"),
        )
    )


@pytest.mark.parametrize("line", [old, new])
def test_a_whole_run(line: Line) -> None:
    log = parse_log(whole_run(line))
    assert log.cache_path == "/var/tmp/neuron-compile-cache"
    assert log.extracted == (f"{ONE}/model.hlo_module.pb", f"{TWO}/model.hlo_module.pb")  # many ranks show the same one
    assert log.hits == (f"{ROOT}/MODULE_5+3cc9a3cb/model.neff",)
    assert (log.num_killed, log.has_crashed) == (0, False)
    assert len(log.failures) == 1 and "NCC_EVRF007" in log.failures[0]
    assert not (log.trial_failed or log.redirected or log.nothing_to_do or log.cached_failures)
    assert log.report == {
        f"{ONE}/model.hlo_module.pb": GraphReport(status=True, retry=0, compile_time=9.5),
        f"{TWO}/model.hlo_module.pb": GraphReport(status=False, retry=2, compile_time=192.75),
    }
    assert log.failed == {TWO.partition("cache/")[2]} and len(log.wanted) == 3


def test_both_generations_read_the_same() -> None:
    assert parse_log(whole_run(old)).report == parse_log(whole_run(new)).report
    assert parse_log(whole_run(old)).extracted == parse_log(whole_run(new)).extracted


def test_messages_in_the_middle_of_progress_dots_and_of_each_other() -> None:
    """Many processes write to one pipe."""
    text = (
        f"...2024-02-26 16:03:32.000510:  1  INFO ||X||: Extracting graphs ({ONE}/model.hlo.pb) for aheExtracting "
        f"graphs ({TWO}/model.hlo.pb) for ahead-of-time....Compiler status PASS\n..Compiler status PASS\n"
    )
    log = parse_log(text)
    assert log.extracted == (f"{ONE}/model.hlo.pb", f"{TWO}/model.hlo.pb")


@pytest.mark.parametrize("suffix", ["", ". Exiting with a successfully compiled graph."])
def test_a_hit_ends_at_its_neff(suffix: str) -> None:
    assert parse_log(f"Using a cached neff at {ONE}/model.neff{suffix}\n").hits == (f"{ONE}/model.neff",)


def test_a_cached_failure() -> None:
    line = f"Got a cached failed neff at {ONE}/model.neff. Will skip compilation, please set --retry_failed_compilation"
    log = parse_log(line)
    assert log.cached_failures == (f"{ONE}/model.neff",)
    assert log.hits == ()


@pytest.mark.parametrize(
    "line",
    [
        "Failed compilation with ['neuronx-cc', 'compile', '--verbose=35']: neuronx-cc failed with -9",
        "Process 12 failed compilation: -9",
        "RuntimeError: neuronx-cc compilation failed with -9. Check compiler logs.",
        "Command '['neuronx-cc', 'compile']' returned non-zero exit status -9.",
        "subprocess.CalledProcessError: Command 'neuronx-cc compile' died with <Signals.SIGKILL: 9>.",
        "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory.",
    ],
)
def test_a_killed_compiler_is_told_in_many_ways(line: str) -> None:
    assert parse_log(f"x\n{line}\ny\n").num_killed == 1


@pytest.mark.parametrize(
    "line",
    [
        "Failed compilation with ['neuronx-cc', 'compile', '--verbose=35']: neuronx-cc failed with 70",
        "Call compiler with cmd: neuronx-cc compile --framework=XLA /tmp/a-9/model.MODULE_9-9.pb --output x -O1",
        "step 9 | loss -9.0 | compiled",
        "step 9 | loss -9",
    ],
)
def test_another_end_is_not_a_kill(line: str) -> None:
    assert parse_log(line).num_killed == 0


def test_a_broken_worker_and_the_trial_run() -> None:
    text = "sub-process 0 got exception: A process in the process pool was terminated abruptly while the future was"
    assert parse_log(text).has_crashed
    assert parse_log("There was an error in the training script.").trial_failed
    assert parse_log("neuron_parallel_compile is currently incompatible with torchrun redirect. ").redirected
    assert parse_log("No todo hlos found in cache or hlo_tasklist, parallel_compile return").nothing_to_do


def test_waiting_for_a_lock(tmp_path: Path) -> None:
    log = tmp_path / "log"
    watch = LogWatch(log, is_local=True, compilers=list)
    old_text = "".join(
        f"Another process must be compiling {ONE}/model.hlo_module.pb, been waiting for: {m}.5 minutes\n"
        for m in range(3)
    )
    newer = f"2026-04-13 01:46:33.000003: 8 [INFO]: Another process must be compiling {TWO} ...\n"
    for text, name in ((old_text, f"{ONE}/model.hlo_module.pb"), (newer, TWO)):
        assert not watch.is_stuck()
        log.write_text((log.read_text() if log.exists() else "") + text)
        assert watch.news() == [f"a compile waits for the lock of {name}"]
    assert watch.is_stuck(), "twice, and no compiler runs"


def test_counts_are_told_when_they_change(tmp_path: Path) -> None:
    log, watch = tmp_path / "log", LogWatch(tmp_path / "log", is_local=True, compilers=list)
    log.write_text(whole_run(new))
    assert watch.news() == ["graphs in the cache: 32 done, 0 to do, 2 locked, 1 failed"]
    assert watch.news() == [] and watch.counts[-1] == 34


def test_a_report_of_the_first_releases_has_no_times() -> None:
    text = json.dumps(
        {"compilation_summary": {"true": 1}, "compilation_report": {ONE: {"status": True, "retry": 0}}}, indent=4
    )
    assert parse_log(text).report == {ONE: GraphReport(status=True)}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"compilation_summary": "x"}', '{"other": 1}'])
def test_a_report_that_is_none(text: str) -> None:
    assert parse_log(text).report is None


def test_the_last_whole_report_of_a_log_counts() -> None:
    def report(seconds: float) -> str:
        return json.dumps({**REPORT, "compilation_report": {ONE: {"status": True, "compile_time": seconds}}}, indent=4)

    cut = report(3.0)[:-40]
    for text, seconds in ((f"a: {report(1.0)}\nb: {report(2.0)}\n", 2.0), (f"a: {report(1.0)}\nb: {cut}", 1.0)):
        assert parse_log(text).report == {ONE: GraphReport(status=True, compile_time=seconds)}
    assert parse_log(cut).report is None


@pytest.mark.parametrize(
    "path",
    [f"{ONE}/model.hlo_module.pb", ONE, f"s3://bucket/a/{ONE.partition('cache/')[2]}/model.neff"],
)
def test_the_entry_of_a_path(path: str) -> None:
    assert entry_key(path) == "neuronxcc-2.16.372.0+4a9b2326/MODULE_9993940051196728623+3cc9a3cb"
    assert graph_name(path) == "MODULE_9993940051196728623+3cc9a3cb"


def test_other_paths_have_no_entry() -> None:
    work = "/tmp/u/neuroncc_compile_workdir/c9e1/model.MODULE_66+d505a3f8.hlo_module.pb"
    assert entry_key(work) == ""
    assert graph_name(work) == work


@given(st.text(max_size=300))
def test_any_text_can_be_read(text: str) -> None:
    log = parse_log(text)
    assert log.report is None or "compilation_summary" in text


@given(st.integers(0, 2_000))
def test_a_log_may_be_cut_anywhere(length: int) -> None:
    """The tool may be killed at any byte; what is whole is read, nothing is made up."""
    whole = parse_log(whole_run(new))
    part = parse_log(whole_run(new)[:length])
    assert set(part.extracted) <= set(whole.extracted)
    assert part.report in (None, whole.report)
