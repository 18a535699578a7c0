"""Environment of a node: which job, node and attempt it is, and time limits.

Processes under `trnjobs-entry` read these variables on every platform, in addition to those set at submission
(`job_variables`) and torchrun's MASTER_ADDR and MASTER_PORT. The local engine sets them itself. On AWS Batch and
SageMaker they are derived here from the platform's variables and files.

    TRNJOBS_JOB_ID   the same on all nodes of a job, different for each task of an array
    TRNJOBS_ATTEMPT  number of the attempt, from 1
    TRNJOBS_NODE     rank of the node, 0 is the main node
    TRNJOBS_NODES    number of nodes, unset for a single-node job
    TRNJOBS_MAIN     address of the main node, for the others
    TRNJOBS_INDEX    index of an array task, from 0
    TRNJOBS_ROUND    number of the submission, unset for the first
"""

import hashlib
import json
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from jobs.plan.spec import JobPlan, JobSpec
from pipeline.core.errors import EXIT_OK, EXIT_TABLE, ConfigError, TransientError
from pipeline.core.format import quotable
from pipeline.core.record import Record
from pipeline.io.storage import Storage
from pipeline.parallel.world import (
    ARRAY_INDEX,
    ATTEMPT,
    JOB_ID,
    MAIN_ADDRESS,
    MASTER_PORT,
    NODE,
    NUM_NODES,
    node_from_env,
)
from pipeline.proc.children import COMMAND_S

SUBMISSION = "TRNJOBS_ROUND"
LOOPBACK = ("127.0.0.1", "localhost")  # main address of a node group on one machine, which may have no network


@dataclass(frozen=True)
class NodeIdentity:
    """One node of one attempt of a job.

    `job`: name in the plan, for an array task with `-index`. `submission`: number of the submission, each of which
    counts attempts from 1. Node 0 is the main node, which listens at `port` of `main_address` (empty: all interfaces).
    """

    workspace: str
    cycle: str
    job: str
    job_id: str
    attempt: int
    node: int
    num_nodes: int
    main_address: str
    port: int
    submission: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read the environment variables. Raises ConfigError if they are inconsistent."""
        node, num_nodes = node_from_env(env)
        address = env.get("MASTER_ADDR") or (env.get(MAIN_ADDRESS, "") if node > 0 else "")  # as for torchrun
        if node > 0 and not address:
            raise ConfigError(
                f"node {node} of {num_nodes} has no address of the main node", expected=f"the address in {MAIN_ADDRESS}"
            )
        index = env.get(ARRAY_INDEX, "")
        return cls(
            workspace=env.get("TRNPIPE_WORKSPACE", ""),
            cycle=env.get("TRNPIPE_CYCLE", ""),
            job=env.get("TRNJOBS_JOB", "job") + (f"-{index}" if index else ""),
            job_id=env.get(JOB_ID, "local"),
            attempt=_whole(env, ATTEMPT, 1),
            node=node,
            num_nodes=num_nodes,
            main_address=address,
            port=_whole(env, "MASTER_PORT", MASTER_PORT) + 1,  # the port after torchrun's
            submission=_whole(env, SUBMISSION, 1),
        )

    @property
    def token(self) -> str:
        """Token shared by the nodes of this attempt. A node left over from an earlier attempt has a different one."""
        return hashlib.sha256(f"{self.job_id}\n{self.attempt}".encode()).hexdigest()

    @property
    def is_in_cycle(self) -> bool:
        return bool(self.workspace and self.cycle)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Timing(Record):
    """Time limits in seconds. `TRNJOBS_GATHER_S` in the environment sets `gather_s`, and likewise for the others."""

    heartbeat_s: Seconds = 5.0
    lost_after_s: Seconds = 30.0  # a node is lost after this time without a heartbeat
    gather_s: Seconds = 900.0  # Time for all nodes to connect. AWS Batch starts them in any order, minutes apart.
    grace_s: Seconds = COMMAND_S  # Time from SIGTERM to SIGKILL of the command. AWS Batch kills the container after 30.
    bundle_s: Seconds = 10.0  # time to write the post-mortem

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read the environment variables. Raises ConfigError unless all are positive numbers."""
        variables = {name: f"TRNJOBS_{name.upper()}" for name in cls.model_fields}
        try:
            return cls.model_validate({name: env[text] for name, text in variables.items() if text in env})
        except ValidationError as error:
            variable = variables[str(error.errors()[0]["loc"][0])]
            raise ConfigError(f"{variable}={env[variable]!r}", expected="a number of seconds above 0") from error


def job_variables(plan: JobPlan, job: JobSpec, submission: int) -> dict[str, str]:
    """Return the variables that are set at submission on every platform."""
    variables = {"TRNPIPE_CYCLE": plan.cycle, "TRNPIPE_WORKSPACE": plan.workspace, "TRNJOBS_JOB": job.name}
    return variables | ({SUBMISSION: str(submission)} if submission > 1 else {})


def _whole(env: Mapping[str, str], variable: str, default: int) -> int:
    text = env.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r}", expected="a whole number")
    return int(text)


_BATCH_VARIABLES = {
    "AWS_BATCH_JOB_ID": JOB_ID,
    "AWS_BATCH_JOB_ATTEMPT": ATTEMPT,
    "AWS_BATCH_JOB_ARRAY_INDEX": ARRAY_INDEX,
    "AWS_BATCH_JOB_NUM_NODES": NUM_NODES,
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": MAIN_ADDRESS,
}


def batch_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Translate the variables of AWS Batch, if any. Raises ConfigError if they are inconsistent.

    Nodes are renumbered so that the main node is node 0. The job ids of nodes end in `#<node index>`.
    """
    variables = {name: env[batch_name] for batch_name, name in _BATCH_VARIABLES.items() if batch_name in env}
    if JOB_ID in variables:
        variables[JOB_ID] = variables[JOB_ID].partition("#")[0]
    if NUM_NODES in variables:
        try:
            nodes, index = int(variables[NUM_NODES]), int(env["AWS_BATCH_JOB_NODE_INDEX"])
            variables[NODE] = str((index - int(env["AWS_BATCH_JOB_MAIN_NODE_INDEX"])) % nodes)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"AWS_BATCH_JOB_* variables of this multi-node job are incomplete: {error}") from error
    return variables


# A node of a SageMaker training job. Source: SageMaker developer guide, "How Amazon SageMaker provides training
# information" (resourceconfig.json: hosts sorted by name as text, the network interface, and names that may not resolve
# immediately) and "how Amazon SageMaker signals algorithm success and failure" (`/opt/ml/output/failure`, of which
# 1,024 characters are shown).

TRAINING_JOB = "TRAINING_JOB_NAME"  # set by SageMaker in every container
ML_ROOT = "TRNJOBS_ML_ROOT"  # folder to use instead of /opt/ml, for tests on other machines
MAX_FAILURE_BYTES = 1024
RESOLVE_PAUSE_S = 1.0
_NAMES = {rule.exit_code: rule.name for rule in EXIT_TABLE}


def sagemaker_variables(env: Mapping[str, str], *, gather_s: float) -> dict[str, str]:
    """Return the variables of a node and its network. Empty if this is not a SageMaker training job.

    Waits up to `gather_s` for the name of the main node to resolve. Every attempt is a separate training job, numbered
    by TRNJOBS_ATTEMPT or by `count_start`. Raises ConfigError if the files are inconsistent, TransientError if the name
    does not resolve in time.
    """
    if TRAINING_JOB not in env:
        return {}
    variables, path = {JOB_ID: env[TRAINING_JOB]}, _ml_root(env) / "input" / "config" / "resourceconfig.json"
    try:
        config = json.loads(path.read_bytes())
        hosts, interface = sorted(map(str, config["hosts"])), str(config.get("network_interface_name", ""))
        node = hosts.index(str(config["current_host"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not identify this host: {type(error).__name__}: {error}",
            expected="current_host, hosts and network_interface_name, as SageMaker writes them",
        ) from error
    if len(hosts) == 1:
        return variables
    until, address = time.monotonic() + gather_s, ""
    while not address:
        try:
            address = socket.gethostbyname(hosts[0])
        except OSError as error:
            if time.monotonic() >= until:
                raise TransientError(
                    f"the main node {hosts[0]} has no address after {gather_s:g} s: {error}",
                    expected="a name that resolves within TRNJOBS_GATHER_S",
                    next_command="trnjobs retry",
                ) from error
            time.sleep(RESOLVE_PAUSE_S)
    variables |= {NUM_NODES: str(len(hosts)), NODE: str(node), MAIN_ADDRESS: address, "MASTER_ADDR": address}
    if interface:  # overrides the image, because the interface differs between machines
        variables |= dict.fromkeys(("CCOM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return variables


def write_failure(env: Mapping[str, str], code: int, reason: str) -> None:
    """Write the exit code and reason to SageMaker's failure file, just before a node exits. Does nothing elsewhere.

    The code is first, because SageMaker shows the beginning of the text and AWS Batch retries by it. All nodes write
    the file, because it is not documented which one counts. If writing fails (a user other than root may lack the
    permission), a line is logged and the exit code does not change.
    """
    if TRAINING_JOB not in env or code == EXIT_OK:
        return
    detail, file = quotable(" ".join(reason.split())), _ml_root(env) / "output" / "failure"
    text = f"exit {code} {_NAMES.get(code, 'error')}" + (f": {detail}" if detail else "")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode()[:MAX_FAILURE_BYTES].decode(errors="ignore").encode())
    except OSError as error:
        message = f"trnjobs-entry: cannot write {file}: {error}. Not reported to SageMaker: {text}"
        print(message, file=sys.stderr, flush=True)


def _ml_root(env: Mapping[str, str]) -> Path:
    return Path(env.get(ML_ROOT, "/opt/ml"))


# Some platforms restart the same job by themselves (Spot capacity, service jobs), and two starts would share tokens,
# barriers and names. The main node counts starts in the workspace, one object each with the platform's job id, and
# sends the result to the other nodes with the `go` message.

STARTS = "TRNJOBS_STARTS"
"""Set at submission of such a job: the name under which its starts are counted, the same for all attempts."""


@dataclass(frozen=True)
class Start:
    """One start of a job: a `job_id` that is unique to it, and the number of its attempt, from 1."""

    job_id: str
    attempt: int

    @property
    def variables(self) -> dict[str, str]:
        return {JOB_ID: self.job_id, ATTEMPT: str(self.attempt)}


def count_start(storage: Storage, cycle: str, env: Mapping[str, str]) -> Start:
    """Record one more start. After an interruption a number may stay unused, but none is used twice.

    Each platform job id is an attempt, unless TRNJOBS_ATTEMPT is set.
    """
    job_id, earlier = env[JOB_ID], list[str]()
    folder = f"cycles/{cycle}/jobs/starts/{env[STARTS]}"
    while not storage.write_if_absent(f"{folder}/{len(earlier) + 1}", job_id.encode()):
        earlier.append(storage.read_bytes(f"{folder}/{len(earlier) + 1}").decode())
    restarts = earlier.count(job_id)
    attempt = int(env[ATTEMPT]) if ATTEMPT in env else len({*earlier, job_id})
    return Start(f"{job_id}-start{restarts + 1}" if restarts else job_id, attempt)
