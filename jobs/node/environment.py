"""Which job this is, which node and which start of it; and how long things may take.

What runs below `trnjobs-entry` reads these variables, the same on every platform, beside those that whoever submits the
job sets (`job_variables`) and torchrun's MASTER_ADDR and MASTER_PORT. The local engine sets them itself; here the
variables of AWS Batch and the files of SageMaker become them.

    TRNJOBS_JOB_ID   the same on all nodes of a job, another one for each child of an array
    TRNJOBS_ATTEMPT  which try, from 1
    TRNJOBS_NODE     0 is the main node
    TRNJOBS_NODES    not set: no multi-node job
    TRNJOBS_MAIN     address of the main node, for the others
    TRNJOBS_INDEX    of a child of an array, from 0
    TRNJOBS_ROUND    how often the job was submitted, from 2; not set: once
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

ROUND = "TRNJOBS_ROUND"
LOOPBACK = ("127.0.0.1", "localhost")  # of a group on one machine, which may have no network


@dataclass(frozen=True)
class NodeIdentity:
    """One node of one try of a job. `job`: as in the plan; of a child of an array: name-index. `round_`: of submission;
    attempts count from 1 in each.

    Node 0 is the main node, which listens at `port`. `main_address` is empty there, and it listens on all interfaces,
    unless MASTER_ADDR says where.
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
    round_: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Raises ConfigError when the variables do not fit together."""
        node, num_nodes = node_from_env(env)
        address = env.get("MASTER_ADDR") or (env.get(MAIN_ADDRESS, "") if node > 0 else "")  # as for torchrun
        if node > 0 and not address:
            seen = f"node {node} of {num_nodes} does not know the main node"
            raise ConfigError(seen, expected=f"its address in {MAIN_ADDRESS}")
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
            port=_whole(env, "MASTER_PORT", MASTER_PORT) + 1,  # beside torchrun's
            round_=_whole(env, ROUND, 1),
        )

    @property
    def token(self) -> str:
        """Known to the nodes of this try alone: a node left over from an earlier one has another."""
        return hashlib.sha256(f"{self.job_id}\n{self.attempt}".encode()).hexdigest()

    @property
    def is_in_cycle(self) -> bool:
        return bool(self.workspace and self.cycle)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Timing(Record):
    """How long things may take, in seconds. `TRNJOBS_GATHER_S` in the environment sets `gather_s`, and so on."""

    heartbeat_s: Seconds = 5.0
    lost_after_s: Seconds = 30.0
    """A node that has not been heard of for so long is lost."""
    gather_s: Seconds = 900.0
    """For all nodes to come: AWS Batch starts them in any order, minutes apart."""
    grace_s: Seconds = COMMAND_S
    """From SIGTERM to SIGKILL of the command; AWS Batch kills the container after 30."""
    bundle_s: Seconds = 10.0
    """For the post-mortem."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Raises ConfigError for what is no positive number."""
        names = {name: f"TRNJOBS_{name.upper()}" for name in cls.model_fields}
        try:
            return cls.model_validate({name: env[of] for name, of in names.items() if of in env})
        except ValidationError as error:
            variable = names[str(error.errors()[0]["loc"][0])]
            raise ConfigError(f"{variable}={env[variable]!r}", expected="a number of seconds above 0") from error


def job_variables(plan: JobPlan, job: JobSpec, round_: int) -> dict[str, str]:
    """Return the variables that whoever submits a job sets on every platform."""
    words = {"TRNPIPE_CYCLE": plan.cycle, "TRNPIPE_WORKSPACE": plan.workspace, "TRNJOBS_JOB": job.name}
    return words | ({ROUND: str(round_)} if round_ > 1 else {})


def _whole(env: Mapping[str, str], variable: str, default: int) -> int:
    text = env.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r}", expected="a whole number")
    return int(text)


_OF_BATCH = {
    "AWS_BATCH_JOB_ID": JOB_ID,
    "AWS_BATCH_JOB_ATTEMPT": ATTEMPT,
    "AWS_BATCH_JOB_ARRAY_INDEX": ARRAY_INDEX,
    "AWS_BATCH_JOB_NUM_NODES": NUM_NODES,
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": MAIN_ADDRESS,
}


def batch_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Translate the variables of AWS Batch, if any. Raises ConfigError when they do not fit together.

    The main node is node 0 wherever it stands in the job. Ids of nodes end in `#<node index>`.
    """
    words = {ours: env[theirs] for theirs, ours in _OF_BATCH.items() if theirs in env}
    if JOB_ID in words:
        words[JOB_ID] = words[JOB_ID].partition("#")[0]
    if NUM_NODES in words:
        try:
            nodes, index = int(words[NUM_NODES]), int(env["AWS_BATCH_JOB_NODE_INDEX"])
            words[NODE] = str((index - int(env["AWS_BATCH_JOB_MAIN_NODE_INDEX"])) % nodes)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"a multi-node job without a whole set of AWS_BATCH_JOB_* variables: {error}") from error
    return words


# A node of a training job of SageMaker. Source: SageMaker developer guide, "How Amazon SageMaker provides training
# information" (resourceconfig.json: hosts in the order of their names as text, the interface between them, names that
# may not resolve at once) and "how Amazon SageMaker signals algorithm success and failure" (`/opt/ml/output/failure`,
# of which 1,024 characters are shown).

TRAINING_JOB = "TRAINING_JOB_NAME"
"""SageMaker sets it in every container."""
ML_ROOT = "TRNJOBS_ML_ROOT"
"""Another folder than /opt/ml, for machines that are not SageMaker's."""
MAX_FAILURE_BYTES = 1024
RESOLVE_PAUSE_S = 1.0
_NAMES = {rule.exit_code: rule.name for rule in EXIT_TABLE}


def sagemaker_variables(env: Mapping[str, str], *, gather_s: float) -> dict[str, str]:
    """Return the variables of a place and of its network; none where this is no training job.

    Waits up to `gather_s` for the name of the main node to resolve. Every attempt is a training job of its own: which,
    TRNJOBS_ATTEMPT tells, or its nodes count (`count_start`). Raises ConfigError for files that do not fit together,
    TransientError for a name that never resolves.
    """
    if TRAINING_JOB not in env:
        return {}
    words, path = {JOB_ID: env[TRAINING_JOB]}, _ml_root(env) / "input" / "config" / "resourceconfig.json"
    try:
        config = json.loads(path.read_bytes())
        hosts, interface = sorted(map(str, config["hosts"])), str(config.get("network_interface_name", ""))
        node = hosts.index(str(config["current_host"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say which host this is: {type(error).__name__}: {error}",
            expected="current_host, hosts and network_interface_name, as SageMaker writes them",
        ) from error
    if len(hosts) == 1:
        return words
    until, address = time.monotonic() + gather_s, ""
    while not address:
        try:
            address = socket.gethostbyname(hosts[0])
        except OSError as error:
            if time.monotonic() >= until:
                seen = f"the main node {hosts[0]} has no address after {gather_s:g} s: {error}"
                raise TransientError(
                    seen, expected="a name that resolves within TRNJOBS_GATHER_S", next_command="trnjobs retry"
                ) from error
            time.sleep(RESOLVE_PAUSE_S)
    words |= {NUM_NODES: str(len(hosts)), NODE: str(node), MAIN_ADDRESS: address, "MASTER_ADDR": address}
    if interface:  # over what the image says: it differs between machines
        words |= dict.fromkeys(("CCOM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return words


def write_failure(env: Mapping[str, str], code: int, reason: str) -> None:
    """Tell SageMaker the exit code and why, as the last thing that a node does; nothing where this is no such node.

    The code stands first: SageMaker shows the beginning of the text, and AWS Batch retries by it. All nodes write it,
    since nobody says whose file counts. A file that cannot be written, as a user other than root may not be allowed to,
    is a line in the log and must not change the exit code.
    """
    if TRAINING_JOB not in env or code == EXIT_OK:
        return
    why, file = quotable(" ".join(reason.split())), _ml_root(env) / "output" / "failure"
    text = f"exit {code} {_NAMES.get(code, 'error')}" + (f": {why}" if why else "")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode()[:MAX_FAILURE_BYTES].decode(errors="ignore").encode())
    except OSError as error:
        said = f"cannot write {file}: {error}. SageMaker is not told: {text}"
        print(f"trnjobs-entry: {said}", file=sys.stderr, flush=True)


def _ml_root(env: Mapping[str, str]) -> Path:
    return Path(env.get(ML_ROOT, "/opt/ml"))


# Where the platform starts the same job again by itself (Spot capacity, service jobs), two starts would share tokens,
# barriers and names. The main node counts them in the workspace, one object a start, which holds the id of the job as
# the platform knows it; the other nodes hear it with the word to start.

STARTS = "TRNJOBS_STARTS"
"""Set by whoever submits such a job: under which name its starts are counted, the same for all its tries."""


@dataclass(frozen=True)
class Start:
    """`job_id`: of this start alone. `attempt`: which try it is part of, from 1."""

    job_id: str
    attempt: int

    @property
    def words(self) -> dict[str, str]:
        return {JOB_ID: self.job_id, ATTEMPT: str(self.attempt)}


def count_start(storage: Storage, cycle: str, env: Mapping[str, str]) -> Start:
    """Put one more start on record. Killed after that, or answered late, a number stays unused; none is used twice.

    Each id of a job is a try, unless TRNJOBS_ATTEMPT says which it is.
    """
    own, earlier = env[JOB_ID], list[str]()
    folder = f"cycles/{cycle}/jobs/starts/{env[STARTS]}"
    while not storage.write_if_absent(f"{folder}/{len(earlier) + 1}", own.encode()):
        earlier.append(storage.read_bytes(f"{folder}/{len(earlier) + 1}").decode())
    again = earlier.count(own)
    attempt = int(env[ATTEMPT]) if ATTEMPT in env else len({*earlier, own})
    return Start(f"{own}-start{again + 1}" if again else own, attempt)
