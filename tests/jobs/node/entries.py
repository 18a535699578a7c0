"""Entries as processes of this machine, with small Python programs as their commands."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jobs.node.__main__ import main
from pipeline.parallel.world import own_address
from tests.kit.ports import free_port

PATIENT = {
    "TRNJOBS_HEARTBEAT_S": "0.1",
    "TRNJOBS_LOST_AFTER_S": "60",
    "TRNJOBS_GATHER_S": "120",
    "TRNJOBS_GRACE_S": "20",
    "TRNJOBS_BUNDLE_S": "60",
    "AWS_EC2_METADATA_DISABLED": "true",
}
READY = 'import os, signal, sys, time; print("ready", flush=True); '
WAIT = READY + "time.sleep(100)"


LEFT_OUT = ("TRN", "AWS_BATCH", "MASTER", "CCOM_", "GLOO_", "FI_")


class Entry:
    """An entry in a forked child of the tests, which has imported all it needs: it starts in no time."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(words, env, to_out, to_err)
        os.close(to_out)
        os.close(to_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self.returncode: int | None = None

    def _be(self, words: Sequence[str], env: Mapping[str, str], to_out: int, to_err: int) -> NoReturn:
        try:
            os.dup2(to_out, 1)
            os.dup2(to_err, 2)
            os.closerange(3, 1000)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ.clear()
            os.environ.update(env)
            os._exit(main(["--", *words]))
        finally:
            os._exit(99)

    def send_signal(self, signum: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def finish(self) -> tuple[str, str]:
        """Its output and errors from here on, once it has ended."""
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(self.stderr.read)
            out = self.stdout.read()
        self._wait(0)
        return out, errors.result()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def entry(*words: str, env: Mapping[str, str]) -> Entry:
    """An entry that runs these words. Nothing of the environment of the tests reaches it by accident."""
    return Entry(words, {**clean_env(), **PATIENT, **env})


def clean_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def read_until(process: Entry, text: str) -> str:
    """The first line of the output that holds `text`."""
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"no {text!r} before the end: {process.finish()}")


def job_env(workspace: Path, **more: str) -> dict[str, str]:
    names = {
        "TRNPIPE_WORKSPACE": str(workspace),
        "TRNPIPE_CYCLE": "2026-11-20",
        "TRNJOBS_JOB": "train",
        "AWS_BATCH_JOB_ID": "job-1",
        "AWS_BATCH_JOB_ATTEMPT": "1",
    }
    return names | more


def post_mortem(workspace: Path, *, node: int = 0, job: str = "train", attempt: int = 1) -> dict[str, Any]:
    path = workspace / f"cycles/2026-11-20/jobs/post-mortem/{job}-{attempt}-node{node}.json"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


@dataclass
class EntryGroup:
    """The nodes of one multi-node job."""

    workspace: Path
    num_nodes: int
    port: int = field(default_factory=free_port)
    nodes: dict[int, Entry] = field(default_factory=dict)

    def start(self, node: int, words: Sequence[str], **env: str) -> Entry:
        batch = {
            "AWS_BATCH_JOB_ID": f"job-1#{node}",
            "AWS_BATCH_JOB_NUM_NODES": str(self.num_nodes),
            "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "MASTER_PORT": str(self.port),
        }
        if node:
            batch["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = own_address()
        self.nodes[node] = entry(*words, env=job_env(self.workspace, **batch) | env)
        return self.nodes[node]

    def codes(self) -> list[int | None]:
        """Exit codes of all nodes, by node, once all have ended."""
        for process in self.nodes.values():
            process.finish()
        return [self.nodes[node].returncode for node in sorted(self.nodes)]


@contextmanager
def entry_group(workspace: Path, num_nodes: int) -> Iterator[EntryGroup]:
    one = EntryGroup(workspace, num_nodes)
    try:
        yield one
    finally:
        for process in one.nodes.values():
            process.kill()
            process.finish()


def ml_root(root: Path, own: str, hosts: list[str], interface: str = "eth0") -> dict[str, str]:
    """The environment of a container of SageMaker whose /opt/ml is `root`."""
    config = {"current_host": own, "hosts": hosts, "network_interface_name": interface}
    (root / "input" / "config").mkdir(parents=True)
    (root / "input" / "config" / "resourceconfig.json").write_text(json.dumps(config))
    return {"TRAINING_JOB_NAME": "relevance-train-r1a2-0badcafe", "TRNJOBS_ML_ROOT": str(root)}
