"""Fakes of `neuron_parallel_compile` and `neuronx-cc`, and a program that shows graphs as torch_neuronx does.

Written from the facts of AWS's docs (SDK 2.29), not from their code. Kept on purpose: one argparse for the tool's own
options and the run command, the work folder deleted at the start, graphs learnt only from the trial run's standard
output, locked graphs skipped in silence, failures reused, the number of failures as exit code.

FAKE_NEURON_FAULT: `name` or `name:number`; FAKE_NEURON_STATE: a folder for records and for what must happen once.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

VERSION = "2.24.8799.0+6f62ff7c"
HLO, FLAGS, NEFF, DONE, LOG = "model.hlo_module.pb", "compile_flags.json", "model.neff", "model.done", "model.log"


def fault() -> tuple[str, int]:
    name, _, number = os.environ.get("FAKE_NEURON_FAULT", "").partition(":")
    return name, int(number or 0)


def state(name: str) -> Path:
    return Path(os.environ["FAKE_NEURON_STATE"]) / name


def first_time(name: str) -> bool:
    """True once for each name, over all processes and runs."""
    with suppress(FileExistsError):
        os.close(os.open(state(name), os.O_CREAT | os.O_EXCL))
        return True
    return False


def say(text: str, level: str = "INFO") -> None:
    """Print one message with a prefix, in one go: many processes write to one pipe."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    sys.stdout.write(f"{now}: {os.getpid()} [{level}]: {text}\n")
    sys.stdout.flush()


# The persistent cache that the environment names.


def graph_hash(index: int) -> str:
    """A decimal graph hash as of the training path."""
    return str(int(hashlib.sha256(f"graph {index}".encode()).hexdigest()[:16], 16))


def flag_tokens() -> list[str]:
    return [word for word in os.environ["NEURON_CC_FLAGS"].split() if word != "--retry_failed_compilation"]


def flags_hash(tokens: Sequence[str]) -> str:
    """As seen in logs of neuronx-cc 2.16 and later."""
    text = json.dumps(["--target=trn1", *tokens])
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8]


def entry_of(graph: str) -> Path:
    folder = Path(os.environ["NEURON_COMPILE_CACHE_URL"]) / f"neuronxcc-{VERSION}"
    return folder / f"MODULE_{graph}+{flags_hash(flag_tokens())}"


def is_done(entry: Path) -> bool:
    return (entry / NEFF).exists() and (entry / DONE).exists()


def is_failed(entry: Path) -> bool:
    return (entry / LOG).exists() and not is_done(entry)


def lock_of(entry: Path) -> Path:
    return entry / f"{HLO}.lock"


@contextmanager
def locked(entry: Path) -> Iterator[bool]:
    """Hold the lock, an empty file that nothing removes when we are killed; False when another one holds it."""
    try:
        os.close(os.open(lock_of(entry), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield False
        return
    yield True
    lock_of(entry).unlink(missing_ok=True)


# The program: `fake_train --graphs N`, and any other option, which it records.


def train() -> int:
    words, (name, number) = sys.argv[1:], fault()
    env = {key: value for key, value in os.environ.items() if key.startswith("NEURON_")}
    state("trial.json").write_text(json.dumps({"argv": words, "env": env, "cwd": str(Path.cwd())}))
    print("step 1 | loss nan", flush=True)
    for index in range(int(words[words.index("--graphs") + 1])):
        if index == 1 and name == "trial":
            print("Traceback: the trial run breaks here", file=sys.stderr)
            return number
        if index == 1 and name == "hang-trial":
            state("hangs").touch()
            time.sleep(600)
        show(entry_of(graph_hash(index)), f"HLO {index}".encode())
    return 0


def show(entry: Path, module: bytes) -> None:
    """Print what torch_neuronx does of a new graph under graph extraction."""
    if is_done(entry):
        say(f"Using a cached neff at {entry / NEFF}")
        return
    entry.mkdir(parents=True, exist_ok=True)
    (entry / HLO).write_bytes(module)
    (entry / FLAGS).write_text(json.dumps(flag_tokens()))
    while fault()[0] == "wait" and lock_of(entry).exists():
        say(f"Another process must be compiling {entry / HLO}, been waiting for: 1.0 minutes")
        time.sleep(0.3)
    say(f"Extracting graphs ({entry / HLO}) for ahead-of-time parallel compilation. No compilation was done.")


# The tool.


def parallel_compile() -> int:
    parser = argparse.ArgumentParser(prog="neuron_parallel_compile")
    parser.add_argument("--num_parallel", type=int, default=1)
    parser.add_argument("--world_size", type=int)
    parser.add_argument("--static_schedule", action="store_true")
    parser.add_argument("--command")
    parser.add_argument("--log_level")
    parser.add_argument("--parallel_compile_workdir", type=Path, required=True)
    options, command = parser.parse_known_args()
    workdir: Path = options.parallel_compile_workdir
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    os.environ["FAKE_NEURON_NUM_PARALLEL"] = str(options.num_parallel)
    trial_log = workdir / f"trial_run_pid{os.getpid()}_log.txt"
    # A program that is not on Neuron shows no graph: N are shown in its place once it has ended well.
    shown = os.environ.get("FAKE_NEURON_GRAPHS")
    more = [["fake_train", "--graphs", shown]] if shown else []
    if not all(run_trial(words, trial_log) for words in [command, *more]):
        say("There was an error in the training script.", "ERROR")
        return 1
    found = re.findall(r"Extracting graphs \((.*?)\)", trial_log.read_text(errors="ignore"))
    entries = sorted({Path(hlo).parent for hlo in found})
    if not entries:
        say("No todo hlos found in cache or hlo_tasklist, parallel_compile return before spawning workers....")
        return 0
    return compile_all(entries, workdir)


def run_trial(command: list[str], trial_log: Path) -> bool:
    """Run with graph extraction on; the output is passed on and kept. True if it ended well."""
    env = {**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as process,
        trial_log.open("ab") as out,
    ):
        assert process.stdout is not None
        while block := os.read(process.stdout.fileno(), 4096):
            sys.stdout.buffer.write(block)
            sys.stdout.flush()
            out.write(block)
    return process.returncode == 0


def compile_all(entries: list[Path], workdir: Path) -> int:
    """Go through the list; what is done, failed or locked is passed over. Returns the number of failures."""
    report: dict[str, dict[str, object]] = {}
    for entry in entries:
        with locked(entry) as mine:
            if not mine or is_done(entry) or is_failed(entry):
                continue
            if fault()[0] == "crash" and first_time("crash"):
                say("sub-process 0 got exception: a process in the pool was terminated abruptly")
                os._exit(0)
            started = time.time()
            status = compile_entry(entry, workdir)
            report[str(entry / HLO)] = {"status": status, "retry": 0, "compile_time": time.time() - started}
    states = [(is_done(one), lock_of(one).exists(), is_failed(one)) for one in entries]
    done, held, failed = map(sum, zip(*states, strict=True))
    todo = len(states) - done - held - failed
    say(f"Current remaining items are {todo}, locked are {held}, failed are {failed}, done are {done}, total is 9")
    num_good = sum(bool(one["status"]) for one in report.values())
    counts = {"true": num_good, "false": len(report) - num_good}
    text = json.dumps({"compilation_summary": counts, "compilation_report": report}, indent=4)
    if os.environ.get("NEURON_PARALLEL_COMPILE_DUMP_RESULTS"):
        Path(f"neuron_parallel_compile_results_{time.time()}.json").write_text(text)
    say(text)
    return counts["false"]


def compile_entry(entry: Path, workdir: Path) -> bool:
    """Compile under the lock that the caller holds. A failure is remembered."""
    neff = workdir / f"model.{entry.name}.neff"
    command = ["neuronx-cc", "compile", "--framework=XLA", str(entry / HLO), "--output", str(neff), *flag_tokens()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        (entry / NEFF).write_bytes(neff.read_bytes())
        (entry / DONE).touch()
        return True
    reason = ended.stderr.strip() or f"neuronx-cc failed with {ended.returncode}"
    say(f"Failed compilation with {command!r}: {reason}", "ERROR")
    (entry / LOG).write_text(f"{reason}\n")
    return False


# The compiler.


def compiler() -> int:
    """0, 70 with a reason on standard error, or killed."""
    hlo, output = Path(sys.argv[3]), Path(sys.argv[5])
    (name, number), module = fault(), hlo.parent.name
    with state("compiles").open("a") as record:
        record.write(f"{module}\n")
    if name == "oom" and int(os.environ["FAKE_NEURON_NUM_PARALLEL"]) > number:
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fail" and f"MODULE_{graph_hash(number)}+" in module:
        print("[NCC_EVRF007] Operator sort is not supported", file=sys.stderr)
        return 70
    if name == "hang-compile":
        state("hangs").touch()
        time.sleep(600)
    output.write_bytes(b"NEFF" + hlo.read_bytes())
    print("...\nCompiler status PASS", flush=True)
    return 0
