"""A node of a training job of Amazon SageMaker: which one it is, and how SageMaker learns why it failed.

Source: SageMaker developer guide, "How Amazon SageMaker provides training information" (resourceconfig.json: hosts in
the order of their names as text, the interface between them, names that may not resolve at once) and "how Amazon
SageMaker signals algorithm success and failure" (`/opt/ml/output/failure`, of which 1,024 characters are shown).
"""

import ipaddress
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.core.errors import EXIT_OK, EXIT_TABLE, ConfigError, TransientError
from pipeline.core.format import quotable
from pipeline.parallel.world import JOB_ID, MAIN_ADDRESS, NODE, NUM_NODES

JOB_VARIABLE = "TRAINING_JOB_NAME"
"""SageMaker sets it in every container."""
ROOT_VARIABLE = "TRNJOBS_ML_ROOT"
"""Another folder than /opt/ml, for machines that are not SageMaker's."""
MAX_FAILURE_BYTES = 1024
PAUSE_S = 1.0
_NAMES = {rule.exit_code: rule.name for rule in EXIT_TABLE}


def root_of(env: Mapping[str, str]) -> Path | None:
    """Return the folder of SageMaker's files; None elsewhere."""
    return Path(env.get(ROOT_VARIABLE, "/opt/ml")) if JOB_VARIABLE in env else None


def sagemaker_variables(
    env: Mapping[str, str],
    *,
    gather_s: float,
    resolve: Callable[[str], str],
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Return the variables of a place and of its network; none where this is no training job.

    Waits up to `gather_s` for the name of the main node to resolve. Every attempt is a training job of its own: which,
    TRNJOBS_ATTEMPT tells, or its nodes count (`count_start`). Raises ConfigError for files that do not fit together,
    TransientError for a name that never resolves.
    """
    root = root_of(env)
    if root is None:
        return {}
    words = {JOB_ID: env[JOB_VARIABLE]}
    own, hosts, interface = _read_hosts(root / "input" / "config" / "resourceconfig.json")
    if len(hosts) == 1:
        return words
    until, address = clock() + gather_s, ""
    while not address:
        try:
            address = str(ipaddress.IPv4Address(resolve(hosts[0])))
        except OSError as error:
            if clock() >= until:
                seen = f"the main node {hosts[0]} has no address after {gather_s:g} s: {error}"
                raise TransientError(
                    seen, expected="a name that resolves within TRNJOBS_GATHER_S", next_command="trnjobs retry"
                ) from error
            sleep(PAUSE_S)
    words |= {NUM_NODES: str(len(hosts)), NODE: str(hosts.index(own)), MAIN_ADDRESS: address, "MASTER_ADDR": address}
    if interface:  # over what the image says: it differs between machines
        words |= dict.fromkeys(("CCOM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return words


def resolve_ipv4(host: str) -> str:
    """Resolve a name. Raises OSError while it is not known."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def write_failure(env: Mapping[str, str], code: int, reason: str) -> None:
    """Tell SageMaker the exit code and why, as the last thing that a node does; nothing where this is no such node.

    The code stands first: SageMaker shows the beginning of the text, and AWS Batch retries by it. All nodes write it,
    since nobody says whose file counts. A file that cannot be written, as a user other than root may not be allowed to,
    is a line in the log and must not change the exit code.
    """
    root = root_of(env)
    if root is None or code == EXIT_OK:
        return
    why = quotable(" ".join(reason.split()))
    text = f"exit {code} {_NAMES.get(code, 'error')}" + (f": {why}" if why else "")
    file = root / "output" / "failure"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode()[:MAX_FAILURE_BYTES].decode(errors="ignore").encode())
    except OSError as error:
        said = f"cannot write {file}: {error}. SageMaker is not told: {text}"
        print(f"trnjobs-entry: {said}", file=sys.stderr, flush=True)


def _read_hosts(path: Path) -> tuple[str, list[str], str]:
    """Return this host, all hosts by name as text, and the interface between them."""
    try:
        config = json.loads(path.read_bytes())
        own, hosts = str(config["current_host"]), sorted(str(host) for host in config["hosts"])
        if own not in hosts:
            raise ValueError(f"{own} is not among {', '.join(hosts)}")
        return own, hosts, str(config.get("network_interface_name", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not say which host this is: {type(error).__name__}: {error}",
            expected="current_host, hosts and network_interface_name, as SageMaker writes them",
        ) from error
