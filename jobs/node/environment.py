"""The environment of a node, from which it learns its job, node rank, attempt and time limits.

Processes that are started by `trnjobs-entry` can rely on the following variables on every platform, in addition to
those that are set at submission (see `job_variables`) and to torchrun's MASTER_ADDR and MASTER_PORT. The local engine
sets them itself. On AWS Batch and SageMaker, this module derives them from the variables and files of the platform.

    TRNJOBS_JOB_ID   id of the job, which is the same on all nodes but different for each task of an array
    TRNJOBS_ATTEMPT  number of the attempt, starting at 1
    TRNJOBS_NODE     rank of the node, where 0 is the main node
    TRNJOBS_NODES    number of nodes (not set for single-node jobs)
    TRNJOBS_MAIN     address of the main node (only needed on the other nodes)
    TRNJOBS_INDEX    index of the array task, starting at 0
    TRNJOBS_ROUND    number of the submission (not set for the first one)
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
from pipeline.core.errors import EXIT_NAMES, EXIT_OK, AttemptsExhausted, ConfigError, TransientError
from pipeline.core.format import quotable
from pipeline.core.record import Record
from pipeline.io.storage import Storage, list_names
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
LOOPBACK = ("127.0.0.1", "localhost")  # main address if all nodes run on one machine, which may not have a network


@dataclass(frozen=True)
class NodeIdentity:
    """Identifies a node of one attempt of a job.

    `job` is the name of the job in the plan, followed by `-INDEX` for an array task. `attempt` starts at 1 for each
    submission. Node 0 is the main node, which listens at `port` of `main_address`, or on all interfaces if the address
    is empty.
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
        """Determine the identity from environment variables. Raises ConfigError if they are inconsistent."""
        node, num_nodes = node_from_env(env)
        address = env.get("MASTER_ADDR") or (env.get(MAIN_ADDRESS, "") if node > 0 else "")  # same as torchrun
        if node > 0 and not address:
            raise ConfigError(
                f"node {node} of {num_nodes} does not know the address of the main node",
                expected=f"the address in {MAIN_ADDRESS}",
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
        """Return a token that only the nodes of this attempt share, which rules out nodes of an earlier attempt."""
        return hashlib.sha256(f"{self.job_id}\n{self.attempt}".encode()).hexdigest()

    @property
    def is_in_cycle(self) -> bool:
        return bool(self.workspace and self.cycle)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Timing(Record):
    """Time limits in seconds, which can be set by environment variables such as TRNJOBS_GATHER_S for `gather_s`."""

    heartbeat_s: Seconds = 5.0
    lost_after_s: Seconds = 30.0  # a node is considered lost after this long without a heartbeat
    gather_s: Seconds = 900.0  # Limit for all nodes to connect. AWS Batch may start them several minutes apart.
    grace_s: Seconds = COMMAND_S  # Time between SIGTERM and SIGKILL. AWS Batch kills the whole container after 30 s.
    bundle_s: Seconds = 10.0  # limit for writing the post-mortem

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read the time limits from environment variables. Raises ConfigError if one is not a positive number."""
        variables = {name: f"TRNJOBS_{name.upper()}" for name in cls.model_fields}
        try:
            return cls.model_validate({name: env[text] for name, text in variables.items() if text in env})
        except ValidationError as error:
            variable = variables[str(error.errors()[0]["loc"][0])]
            raise ConfigError(f"{variable}={env[variable]!r}", expected="a positive number of seconds") from error


def job_variables(plan: JobPlan, job: JobSpec, submission: int, *, is_batch: bool = False) -> dict[str, str]:
    """Return the environment variables to set for a job at submission. `is_batch`: AWS Batch retries the job."""
    variables = {"TRNPIPE_CYCLE": plan.cycle, "TRNPIPE_WORKSPACE": plan.workspace, "TRNJOBS_JOB": job.name}
    variables |= {SUBMISSION: str(submission)} if submission > 1 else {}
    return variables | ({MAX_FAILURES: str(job.retry.attempts)} if is_batch and job.retry.preemptions else {})


def _whole(env: Mapping[str, str], variable: str, default: int) -> int:
    text = env.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r}", expected="an integer")
    return int(text)


_BATCH_VARIABLES = {
    "AWS_BATCH_JOB_ID": JOB_ID,
    "AWS_BATCH_JOB_ATTEMPT": ATTEMPT,
    "AWS_BATCH_JOB_ARRAY_INDEX": ARRAY_INDEX,
    "AWS_BATCH_JOB_NUM_NODES": NUM_NODES,
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": MAIN_ADDRESS,
}


def batch_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Translate the environment variables of AWS Batch, if there are any.

    AWS Batch appends `#<node index>` to the job id of each node, which is removed. Nodes are renumbered so that the
    main node is node 0. Raises ConfigError if the variables are inconsistent.
    """
    variables = {name: env[batch_name] for batch_name, name in _BATCH_VARIABLES.items() if batch_name in env}
    if JOB_ID in variables:
        variables[JOB_ID] = variables[JOB_ID].partition("#")[0]
    if NUM_NODES in variables:
        try:
            nodes, index = int(variables[NUM_NODES]), int(env["AWS_BATCH_JOB_NODE_INDEX"])
            variables[NODE] = str((index - int(env["AWS_BATCH_JOB_MAIN_NODE_INDEX"])) % nodes)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"the AWS_BATCH_JOB_* variables of this multi-node job are invalid: {error}") from error
    return variables


# SageMaker training jobs. See the SageMaker developer guide, "How Amazon SageMaker provides training information", for
# resourceconfig.json, which lists the hosts sorted by name and the network interface, and which warns that host names
# may not resolve immediately. "How Amazon SageMaker signals algorithm success and failure" describes the file
# /opt/ml/output/failure, of which the first 1,024 characters are shown to users.

TRAINING_JOB = "TRAINING_JOB_NAME"  # set by SageMaker in every container
ML_ROOT = "TRNJOBS_ML_ROOT"  # a folder to use instead of /opt/ml, which allows tests on other machines
MAX_FAILURE_BYTES = 1024
RESOLVE_PAUSE_S = 1.0


def sagemaker_variables(env: Mapping[str, str], *, gather_s: float) -> dict[str, str]:
    """Return the variables of a node of a SageMaker training job, or an empty dict on other platforms.

    Every attempt is a separate training job, so the attempt is not included. Its number is set at submission
    (TRNJOBS_ATTEMPT) or determined by `count_start`.

    Raises ConfigError if SageMaker's files do not identify this host, and TransientError if the name of the main node
    does not resolve within `gather_s`.
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
                    f"the name of the main node {hosts[0]} has not resolved within {gather_s:g} s: {error}",
                    expected="a name that resolves within TRNJOBS_GATHER_S",
                    next_command="trnjobs retry",
                ) from error
            time.sleep(RESOLVE_PAUSE_S)
    variables |= {NUM_NODES: str(len(hosts)), NODE: str(node), MAIN_ADDRESS: address, "MASTER_ADDR": address}
    if interface:  # overrides the interface set in the image, because machines have different interfaces
        variables |= dict.fromkeys(("CCOM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return variables


def write_failure(env: Mapping[str, str], code: int, reason: str) -> None:
    """Report a failure to SageMaker by writing the exit code and the reason to its failure file.

    This does nothing on other platforms. The text starts with the exit code, because SageMaker only shows the beginning
    and AWS Batch decides by the exit code whether to retry. Since it is not documented which node's file is used, all
    nodes write it. If this fails (users other than root may not have the permission), an error is logged and the exit
    code stays the same.
    """
    if TRAINING_JOB not in env or code == EXIT_OK:
        return
    detail, file = quotable(" ".join(reason.split())), _ml_root(env) / "output" / "failure"
    text = f"exit {code} {EXIT_NAMES.get(code, 'error')}" + (f": {detail}" if detail else "")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode()[:MAX_FAILURE_BYTES].decode(errors="ignore").encode())
    except OSError as error:
        message = f"trnjobs-entry: cannot write {file}: {error}. SageMaker was not notified of: {text}"
        print(message, file=sys.stderr, flush=True)


def _ml_root(env: Mapping[str, str]) -> Path:
    return Path(env.get(ML_ROOT, "/opt/ml"))


# Some platforms restart a job automatically, for example on Spot capacity or as a service job. Without further
# measures, two starts of the same job would use the same tokens, barriers and names. We therefore count starts by
# writing one object per start to the workspace. This is done by the main node, which then sends the number to the other
# nodes with the `go` message.

STARTS = "TRNJOBS_STARTS"
"""Set at submission if the platform may restart the job. The value is the name under which its starts are counted."""


@dataclass(frozen=True)
class Start:
    """A start of a job, with a `job_id` that is different for each start and the number of its attempt."""

    job_id: str
    attempt: int

    @property
    def variables(self) -> dict[str, str]:
        return {JOB_ID: self.job_id, ATTEMPT: str(self.attempt)}


def count_start(storage: Storage, cycle: str, env: Mapping[str, str]) -> Start:
    """Record a start of this job and determine its job id and attempt number.

    Each job id of the platform counts as one attempt, unless TRNJOBS_ATTEMPT is set. If a start is interrupted, its
    number may never be used, but no number is used twice.
    """
    job_id, earlier = env[JOB_ID], list[str]()
    folder = f"cycles/{cycle}/jobs/starts/{env[STARTS]}"
    while not storage.write_if_absent(f"{folder}/{len(earlier) + 1}", job_id.encode()):
        earlier.append(storage.read_bytes(f"{folder}/{len(earlier) + 1}").decode())
    restarts = earlier.count(job_id)
    attempt = int(env[ATTEMPT]) if ATTEMPT in env else len({*earlier, job_id})
    return Start(f"{job_id}-start{restarts + 1}" if restarts else job_id, attempt)


# AWS Batch counts preemptions as attempts, so the jobs that it retries have more attempts than the settings allow for
# failures. The main node therefore counts the failures, by writing one object for each to the workspace.

MAX_FAILURES = "TRNJOBS_ATTEMPTS"
"""Set at submission if the platform counts preemptions as attempts. The value is the maximum number of attempts."""


def final_exit_code(storage: Storage, identity: NodeIdentity, env: Mapping[str, str]) -> int:
    """Record an attempt that failed with a TransientError, and return the exit code of the job.

    This is the code of AttemptsExhausted if as many attempts have failed as the settings allow.
    """
    folder = f"cycles/{identity.cycle}/jobs/post-mortem-failures/{identity.job}/{identity.submission}"
    storage.write_if_absent(f"{folder}/{identity.attempt}", b"")
    is_last = len(list_names(storage, folder)) >= _whole(env, MAX_FAILURES, 1)
    return AttemptsExhausted.exit_code if is_last else TransientError.exit_code
