"""The fake `neuron_parallel_compile`, as AWS documents it: SDK 2.29, and for what the docs leave open SDK 2.23.

Kept on purpose: one argparse for its own options and the run command (parse_known_args, prefixes included), the work
folder deleted at the start, graphs learnt only from the trial run's standard output, locked graphs skipped in silence,
the number of failures as exit code.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.compile.fake_neuron import cache as fake

COMMANDS = ("collect-and-compile", "collect", "compile", "clean", "clear-locks", "clear-neffs", "scan")
Outcome = dict[str, tuple[bool, int, float]]


def main() -> int:
    """Parse, trace, compile."""
    options, command = parse(sys.argv[1:])
    workdir = Path(options.parallel_compile_workdir)
    if workdir.exists():
        say(f"Removing existing workdir {workdir}")
        shutil.rmtree(workdir)
    workdir.mkdir(parents=True)
    os.environ["FAKE_NEURON_NUM_PARALLEL"] = str(options.num_parallel)
    if fake.fault()[0] == "npc-killed" and fake.first_time("npc-killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    match options.command:
        case "clear-locks":
            for lock in fake.Cache().root.glob("*/MODULE_*/*.lock"):
                lock.unlink()
            return 0
        case "clean":
            shutil.rmtree(fake.Cache().root, ignore_errors=True)
            return 0
        case "compile":
            every = fake.Cache().entries()
            return compile_all([e for e in every if not fake.is_done(e) and not fake.is_failed(e)], options, workdir)
    trial_log = workdir / f"trial_run_pid{os.getpid()}_log.txt"
    if not run_trial(command, trial_log):
        say("There was an error in the training script.", "ERROR")
        if not os.environ.get("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE"):
            return 1
    if options.command == "collect":
        return 0
    found = re.findall(r"Extracting graphs \((.*?)\)", trial_log.read_text(errors="ignore"))
    say("New graph list from script " + "\n\t".join([f"{len(found)}: ", *found]))
    return compile_all([Path(hlo).parent for hlo in found], options, workdir)


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="neuron_parallel_compile")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    user = os.environ.get("USER", "no-user")
    parser.add_argument("--command", choices=COMMANDS, default=COMMANDS[0])
    parser.add_argument("--num_parallel", type=int, default=math.ceil(memory / 2**36))
    parser.add_argument("--node_id", type=int, default=0)
    parser.add_argument("--world_size", type=int)
    parser.add_argument("--static_schedule", action="store_true")
    parser.add_argument("--analyze-output", default="./model_analysis_result")
    parser.add_argument("--analyze-verbosity", choices=("1", "2"), default="2")
    parser.add_argument("--parallel_compile_workdir", default=f"/tmp/{user}/parallel_compile_workdir")
    parser.add_argument("--log_level", choices=("INFO", "DEBUG", "ERROR", "WARNING"), default="INFO")
    return parser.parse_known_args(words)


def run_trial(command: list[str], trial_log: Path) -> bool:
    """The program with graph extraction on; its output is passed on and kept.

    A program that is not on Neuron shows no graph: FAKE_NEURON_GRAPHS=N shows N in its place once it has ended well.
    FAKE_NEURON_SPOIL=<file> holds rubbish when it starts.
    """
    say(f"Running cmd: {command}")
    if spoilt := os.environ.get("FAKE_NEURON_SPOIL"):
        Path(spoilt).write_text("rubbish")
    shown = os.environ.get("FAKE_NEURON_GRAPHS")
    more = [["fake_train", "--graphs", shown]] if shown else []
    return all(run_and_keep(words, trial_log) for words in [command, *more])


def run_and_keep(command: list[str], trial_log: Path) -> bool:
    """True when the command ended well."""
    env = {**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1", "PATH": f"/usr/sbin:/sbin:{os.environ['PATH']}"}
    try:
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process,
            trial_log.open("ab") as out,
        ):
            assert process.stdout is not None
            while block := os.read(process.stdout.fileno(), 4096):
                sys.stdout.buffer.write(block)
                sys.stdout.flush()
                out.write(block)
    except OSError as error:
        say(str(error), "ERROR")
        return False
    return process.returncode == 0


def compile_all(entries: list[Path], options: argparse.Namespace, workdir: Path) -> int:
    """A pool of workers, each going through the whole list; returns the number of failures."""
    if not entries:
        say("No todo hlos found in cache or hlo_tasklist, parallel_compile return before spawning workers....")
        return 0
    for entry in entries:
        (entry / fake.LOG).unlink(missing_ok=True)  # it is here although it failed: to be compiled again
    started, report = time.time(), Outcome()
    with ProcessPoolExecutor(max_workers=options.num_parallel) as pool:
        jobs: list[Future[Outcome]] = []
        with suppress(BrokenExecutor):  # a worker may have died before the next one is asked for
            for index in range(options.num_parallel):
                jobs.append(pool.submit(work, sorted(set(entries)), workdir, index))
        for index, job in enumerate(jobs):
            try:
                report.update(job.result())
            except Exception as error:
                say(f"sub-process {index} got exception: {error}")
    num_failed = sum(not succeeded for succeeded, _, _ in report.values())
    tell(report, started, num_failed)
    return num_failed


def work(entries: list[Path], workdir: Path, index: int) -> Outcome:
    """One worker: what is done, failed or locked is passed over."""
    cache, report = fake.Cache(), Outcome()
    for entry in entries:
        if fake.is_done(entry) or fake.is_failed(entry):
            continue
        with fake.locked(entry) as mine:
            if not mine or fake.is_done(entry) or fake.is_failed(entry):
                continue
            if fake.fault()[0] == "crash" and fake.first_time("crash"):
                os._exit(1)
            started = time.time()
            succeeded, retries = fake.compile_entry(cache, entry, workdir)
            report[str(entry / fake.HLO)] = (succeeded, retries, time.time() - started)
    say(f"worker {index} finished with num of tasks {len(report)}....")
    cache.tell_counts()
    return report


def tell(report: Outcome, started: float, num_failed: int) -> None:
    """The JSON summary, the totals, and the files."""
    counts = {"true": len(report) - num_failed, "false": num_failed}
    summary: dict[str, Any] = {
        "compilation_summary": {name: count for name, count in counts.items() if count},
        "compilation_report": {
            path: {"status": succeeded, "retry": retries, "compile_time": seconds}
            for path, (succeeded, retries, seconds) in report.items()
        },
        "start_time": started,
        "compilation_time": time.time() - started,
    }
    text = json.dumps(summary, indent=4)
    if os.environ.get("NEURON_PARALLEL_COMPILE_DUMP_RESULTS"):
        Path(f"neuron_parallel_compile_results_{time.time()}.json").write_text(text)
        total = json.dumps({"total_neuron_parallel_compile_time": time.time() - started})
        Path(f"total_neuron_parallel_compile_results_{time.time()}.json").write_text(total)
    if fake.fault()[0] != "no-report":
        say(text)
    say(f"Total graphs: {len(report)}")
    say(f"Total successful compilations: {counts['true']}")
    say(f"Total failed compilations: {counts['false']}")


def say(text: str, level: str = "INFO") -> None:
    fake.log("NEURON_PARALLEL_COMPILE", text, level)
