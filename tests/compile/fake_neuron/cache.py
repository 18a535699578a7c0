"""The fakes' Neuron persistent cache, log lines and faults: what `libneuronxla` is to the real tools.

Written from the facts of AWS's docs (SDK 2.29), not from their code. Run only as part of the fake programs.

FAKE_NEURON_FAULT: `name` or `name:number`; FAKE_NEURON_STATE: a folder for what must happen once and for records;
FAKE_NEURON_LOG: `old` (through SDK 2.26) or `new` prefixes.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

VERSION = "2.24.8799.0+6f62ff7c"
TARGET = "trn1"
HLO, FLAGS, NEFF, DONE, LOG = "model.hlo_module.pb", "compile_flags.json", "model.neff", "model.done", "model.log"


def fault() -> tuple[str, int]:
    """The fault asked for and its number."""
    name, _, number = os.environ.get("FAKE_NEURON_FAULT", "").partition(":")
    return name, int(number or 0)


def state(name: str) -> Path:
    return Path(os.environ["FAKE_NEURON_STATE"]) / name


def first_time(name: str) -> bool:
    """True once for each name, over all processes and runs."""
    try:
        os.close(os.open(state(name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def log(component: str, text: str, level: str = "INFO") -> None:
    """One message with the prefix of either generation, written in one go."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    pid = os.getpid()
    new = os.environ.get("FAKE_NEURON_LOG", "new") == "new"
    prefix = f"{now}: {pid} [{level}]" if new else f"{now}:  {pid}  {level} ||{component}||"
    sys.stdout.write(f"{prefix}: {text}\n")
    sys.stdout.flush()


def graph_hash(index: int) -> str:
    """A decimal graph hash as of the training path."""
    return str(int(hashlib.md5(f"graph {index}".encode(), usedforsecurity=False).hexdigest()[:16], 16))


class Cache:
    """The cache that the environment names."""

    def __init__(self) -> None:
        tokens = os.environ.get("NEURON_CC_FLAGS", "").split()
        folders = [token.partition("=")[2] for token in tokens if token.startswith("--cache_dir=")]
        url = os.environ.get("NEURON_COMPILE_CACHE_URL", "/var/tmp/neuron-compile-cache")
        self.root = Path(folders[-1] if folders else url)
        self.retry_failed = "--retry_failed_compilation" in tokens
        wrapper = ("--cache_dir", "--retry_failed_compilation", "--no_cache", "--log_level")
        self.tokens = [token for token in tokens if not token.startswith(wrapper)]
        text = json.dumps([f"--target={TARGET}", *self.tokens])
        self.suffix = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8]

    def entry(self, graph: str) -> Path:
        return self.root / f"neuronxcc-{VERSION}" / f"MODULE_{graph}+{self.suffix}"

    def entries(self) -> list[Path]:
        return sorted(path.parent for path in self.root.glob(f"neuronxcc-*/MODULE_*/{HLO}"))

    def tell_counts(self) -> int:
        """Log the state of the whole cache; returns how many there are to do."""
        every = self.entries()
        done = [entry for entry in every if is_done(entry)]
        locked = [entry for entry in every if lock_of(entry).exists() and entry not in done]
        failed = [entry for entry in every if is_failed(entry)]
        todo = len(every) - len(done) - len(locked) - len(failed)
        log(
            "NEURON_CACHE",
            f"Current remaining items are {todo}, locked are {len(locked)}, failed are {len(failed)}, "
            f"done are {len(done)}, total is {len(every)}",
        )
        return todo


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


def neuron_cc(cache: Cache, graph: str, module: bytes) -> None:
    """What happens to a new graph in a running program: found, shown, or compiled on the spot."""
    entry = cache.entry(graph)
    log("NEURON_CACHE", f"Compile cache path: {cache.root}")
    if is_done(entry):
        suffix = "" if os.environ.get("FAKE_NEURON_LOG") == "new" else ". Exiting with a successfully compiled graph."
        log("NEURON_CC_WRAPPER", f"Using a cached neff at {entry / NEFF}{suffix}")
        return
    if is_failed(entry) and not cache.retry_failed:
        log(
            "NEURON_CC_WRAPPER",
            f"Got a cached failed neff at {entry / NEFF}. Will skip compilation, please set "
            "--retry_failed_compilation for recompilation.",
            "ERROR",
        )
        return
    entry.mkdir(parents=True, exist_ok=True)
    if not (entry / HLO).exists():
        (entry / HLO).write_bytes(module)
        (entry / FLAGS).write_text(json.dumps(cache.tokens))
    minutes = 0.0
    while fault()[0] == "wait" and lock_of(entry).exists():
        minutes += 1.0
        log("NEURON_CACHE", f"Another process must be compiling {entry / HLO}, been waiting for: {minutes} minutes")
        time.sleep(0.3)
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1":
        log(
            "NEURON_CC_WRAPPER",
            f"Extracting graphs ({entry / HLO}) for ahead-of-time parallel compilation. No compilation was done.",
        )
        return
    with locked(entry) as mine:
        if mine and not compile_entry(cache, entry, Path.cwd())[0]:
            raise RuntimeError("neuronx-cc failed")


def compile_entry(cache: Cache, entry: Path, workdir: Path) -> tuple[bool, int]:
    """Compile under the lock that the caller holds: (succeeded, retries). A failure is remembered."""
    tries = int(os.environ.get("NEURON_PARALLEL_COMPILE_MAX_RETRIES", "0")) + 1
    neff = workdir / f"model.{entry.name}.neff"
    command = ["neuronx-cc", "compile", "--framework=XLA", str(entry / HLO), "--output", str(neff)]
    command += [f"--target={TARGET}", *cache.tokens, "--verbose=35"]
    reason = ""
    for attempt in range(tries):
        if fault()[0] == "fail-all":
            reason = "[NCC_EVRF007] Instructions generated by compiler exceed the limit"
            continue
        log("NEURON_CC_WRAPPER", f"Call compiler with cmd: {shlex.join(command)}")
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        sys.stdout.write(ended.stdout)
        sys.stdout.flush()
        if ended.returncode == 0:
            (entry / LOG).unlink(missing_ok=True)
            (entry / NEFF).write_bytes(neff.read_bytes())
            (entry / DONE).touch()
            if os.environ.get("FAKE_NEURON_LOG", "new") == "new":
                log("NEURON_CC_WRAPPER", f"Compilation Successfully Completed for model.{entry.name}.hlo_module.pb")
            return True, attempt
        reason = ended.stderr.strip() or f"neuronx-cc failed with {ended.returncode}"
    log("NEURON_CC_WRAPPER", f"Failed compilation with {command!r}: {reason}", "ERROR")
    (entry / LOG).write_text(f"{reason}\n")
    return False, tries - 1
