"""Utilities for ranks and nodes.

These determine the rank and worker slice of this process, select the network interface to use between nodes, and
synchronize the nodes of a job.
"""

import ipaddress
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.core.errors import ConfigError, Preempted, TransientError, reported_name
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, Storage, join_key

# Environment variables of a job, which are the same on every platform. `trnjobs-entry` sets them from the
# platform-specific ones.
JOB_ID = "TRNJOBS_JOB_ID"
ATTEMPT = "TRNJOBS_ATTEMPT"
NODE = "TRNJOBS_NODE"
NUM_NODES = "TRNJOBS_NODES"
"""Not set for single-node jobs."""
MAIN_ADDRESS = "TRNJOBS_MAIN"
ARRAY_INDEX = "TRNJOBS_INDEX"


@dataclass(frozen=True)
class World:
    """The ranks of this process and the corresponding world sizes, as defined by torch.distributed."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def node_from_env(env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the node rank and the number of nodes, which are (0, 1) unless this is a multi-node job.

    Raises ConfigError if the environment variables are invalid.
    """
    if NUM_NODES not in env:
        return 0, 1
    node, nodes = env.get(NODE, ""), env[NUM_NODES]
    if node.isdecimal() and nodes.isdecimal() and int(node) < int(nodes):
        return int(node), int(nodes)
    raise ConfigError(
        f"the environment of this multi-node job is invalid: {NODE}={node!r}, {NUM_NODES}={nodes!r}",
        expected=f"0 <= {NODE} < {NUM_NODES}, as set by trnjobs-entry",
    )


def world_from_env(env: Mapping[str, str] = os.environ) -> World:
    """Read the world from torchrun's environment variables, or assume one process per node if they are not set.

    Raises ConfigError if only some of the variables are set.
    """
    if "WORLD_SIZE" not in env:
        node_rank, nodes = node_from_env(env)
        return World(rank=node_rank, world_size=nodes, node_rank=node_rank)
    try:
        world = World(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
            node_rank=int(env.get("GROUP_RANK", "0")),
        )
        if not 0 <= world.rank < world.world_size:
            raise ValueError(f"RANK {world.rank} of WORLD_SIZE {world.world_size}")
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"WORLD_SIZE is set, but the launch environment is incomplete or inconsistent: {error}",
            expected="RANK, WORLD_SIZE and LOCAL_RANK as set by torchrun",
            next_command="launch with --launch.processes N or torchrun, or unset WORLD_SIZE",
        ) from error
    return world


def check_world(world: World, *, runtime_world_size: int, reduces_in_graph: bool, device: str) -> None:
    """Raise ConfigError if torchrun and the device runtime disagree about the world size.

    On most devices, a mismatch means that every rank would silently train a model independently of the others. PJRT-CPU
    always reports a world size of 1, which is fine because gradients are reduced by gloo.
    """
    expected = world.world_size if reduces_in_graph else 1
    if runtime_world_size != expected:
        raise ConfigError(
            f"torchrun reports world size {world.world_size}, but the {device} runtime reports {runtime_world_size}",
            expected=f"a runtime world size of {expected}",
            next_command="launch one process per device (--launch.processes, or torchrun --nproc-per-node) and unset"
            " CPU_NUM_DEVICES, NEURON_PJRT_WORLD_SIZE and NEURON_PJRT_PROCESSES_NUM_DEVICES; if the runtime still"
            " reports 1, its world size was queried before replication was initialized",
        )


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error raised by a collective indicates that another rank exited or timed out."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(pattern in str(error) for pattern in _LOST_RANK_PATTERNS)


# These appear in RuntimeErrors raised by gloo, by its store, and by streams that wait for other ranks (torch 2.9).
_LOST_RANK_PATTERNS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "timed out in monitored")

# The prefix TRNPIPE_ is reserved for settings.
TRACE_FILE = "TRN_TRACE_FILE"
"""Environment variable set in trial runs. Rank 0 writes its graph manifest to this file instead of publishing it."""
RANK_REPORTS = "TRN_HEALTH_DIR"
"""Environment variable set in health checks. Each rank writes its report to this folder."""


# Worker slices. Work is divided between the jobs of an array and then between the ranks of each job.


def worker_of(jobs: int, world: World, env: Mapping[str, str], stage: str, job: int | None = None) -> tuple[int, int]:
    """Return the index of this worker and the number of workers, counting every rank of all `jobs` jobs.

    Raises ConfigError, as `job_index` does.
    """
    index = job_index(jobs, env, stage, job)
    return index * world.world_size + world.rank, jobs * world.world_size


def job_index(jobs: int, env: Mapping[str, str], stage: str, job: int | None = None) -> int:
    """Return the index of this job, which is `job` if set and otherwise the index within the array job.

    Raises ConfigError if the index is unknown, or not less than `jobs`.
    """
    array_index = env.get(ARRAY_INDEX, "")
    if job is None and not array_index and jobs == 1:
        return 0
    index = job if job is not None else int(array_index) if array_index.isdecimal() else jobs
    if index >= jobs or (job is None and jobs == 1):  # if jobs is 1 in an array, every job would do all of the work
        source = ARRAY_INDEX if job is None else f"--{stage}.worker"
        raise ConfigError(
            f"{stage}: worker {(array_index or 'unknown') if job is None else job} of {jobs}",
            expected=f"{source} from 0 to {jobs - 1} (array jobs set {ARRAY_INDEX})",
            next_command=f"set --{stage}.workers to the size of the array",
        )
    return index


# Selecting the network interface that other nodes connect to, and the rendezvous of ranks.

EFA_DEVICES = Path("/dev/infiniband")
# Loopback interfaces, bridges, and links to containers on the same machine. Note that every task in an AWS Batch
# multi-node job has an ecs-* interface in addition to its actual one (amazon-ecs-agent,
# agent/ecscni/types_linux.go).
_LOCAL_ONLY = re.compile(r"lo\d*|(docker|ecs-|br-|veth|virbr|cni|flannel|podman|lxcbr|lxdbr).*")
_FORK_SAFE_KERNEL = (5, 15)


@dataclass(frozen=True)
class Interface:
    """A network interface on this machine, with one of its IPv4 addresses."""

    name: str
    address: str


def own_interface() -> Interface:
    """Return the interface of the default route, or the first one that other machines can reach.

    Raises ConfigError if there is none.
    """
    routed = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # selects a route without sending anything (address reserved by RFC 5737)
        routed = probe.getsockname()[0]
    interfaces = [
        Interface(name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return choose_interface(interfaces, routed)


def own_address() -> str:
    """Return the IPv4 address that other machines can use to reach this one. Raises ConfigError if there is none."""
    return own_interface().address


def choose_interface(interfaces: Sequence[Interface], routed: str) -> Interface:
    """Choose an interface that other machines can reach, preferring the one with the address `routed`.

    We can't just use the first interface, because in an Amazon ECS task the link to the agent (169.254.172.0/22) comes
    before the interface of the task. Raises ConfigError if no interface is reachable from other machines.
    """
    reachable = []
    for interface in interfaces:
        address = ipaddress.IPv4Address(interface.address)
        if not (_LOCAL_ONLY.fullmatch(interface.name) or address.is_link_local or address.is_loopback):
            reachable.append(interface)
    if reachable:
        return next((interface for interface in reachable if interface.address == routed), reachable[0])
    addresses = ", ".join(f"{interface.name} {interface.address}" for interface in interfaces) or "no IPv4 address"
    raise ConfigError(
        f"no network interface can be reached from other machines: {addresses}",
        expected="an IPv4 address that is not loopback or link-local, on an interface that is not a container bridge",
        next_command="ip -4 address; ip -4 route",
    )


def network_variables(interface: Interface, *, has_efa: bool, kernel: str) -> dict[str, str]:
    """Return the environment variables that collectives between machines require.

    These should not be set if there is only one machine. CCOM is used to bootstrap Neuron's collectives, and GLOO for
    collectives on the host. The EFA variables are those recommended in the AWS Neuron documentation. FI_EFA_FORK_SAFE
    is only set for kernels before 5.15, which require it, because it reduces performance on newer kernels.
    """
    variables = {"CCOM_SOCKET_IFNAME": interface.name, "GLOO_SOCKET_IFNAME": interface.name}
    if has_efa:
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
        if tuple(int(part) for part in re.findall(r"\d+", kernel)[:2]) < _FORK_SAFE_KERNEL:
            variables["FI_EFA_FORK_SAFE"] = "1"
    return variables


def has_efa(devices: Path = EFA_DEVICES) -> bool:
    return any(devices.glob("uverbs*"))


ALONE = "127.0.0.1"
MASTER_PORT = 41000  # must not be 62182, which the Neuron runtime uses as its root port on MASTER_ADDR


def torchrun_arguments(processes: int, env: Mapping[str, str], own: Callable[[], str] = own_address) -> list[str]:
    """Return the torchrun arguments for launching `processes` ranks on each node.

    In multi-node jobs, the environment contains the node rank and, on all nodes except the main node, the address of
    the main node. MASTER_ADDR and MASTER_PORT override the defaults, since multiple node groups on the same machine
    need to use different ports. Raises ConfigError if a variable is missing or invalid.
    """
    ranks = [f"--nproc-per-node={processes}", "--max-restarts=0"]
    rank, nodes = node_from_env(env)
    if nodes == 1:  # don't use the host name, which may not resolve, or may resolve to a different interface
        return ["--standalone", f"--local-addr={ALONE}", *ranks]
    master = env.get("MASTER_ADDR") or (own() if rank == 0 else env.get(MAIN_ADDRESS))
    if not master:
        raise ConfigError(
            f"node {rank} of {nodes} doesn't know the address of the main node",
            expected=f"the address to be set in {MAIN_ADDRESS}",
        )
    return [
        *ranks,
        f"--nnodes={nodes}",
        f"--node-rank={rank}",
        f"--master-addr={master}",
        f"--master-port={env.get('MASTER_PORT', MASTER_PORT)}",
    ]


# Synchronization between the nodes of a job, which use small marker objects in the workspace to wait for each other.
# Nodes must not start training while another node is still compiling, because a compilation in the middle of a
# collective looks like a hang to the other nodes. When a node reaches a phase, it writes `<phase>/node-<rank>.yes` or
# `.no`, depending on its flag for that phase. If a node fails, it writes the error message to `node-<rank>.failed`. All
# of these are returned by a single listing.

FIRST_POLL_S, MAX_POLL_S = 0.5, 10.0


@dataclass(frozen=True)
class Nodes:
    """Synchronization between the nodes of a job attempt. If there is only one node, nothing needs to be done.

    `folder` must be unique to the attempt (on AWS Batch, it includes the job ID and attempt number), since nodes would
    otherwise read the markers of an earlier attempt. `storage` must ignore `stop`, because a node that is stopped still
    needs to report its failure to the other nodes.
    """

    storage: Storage
    folder: str
    rank: int
    num_nodes: int
    timeout_s: float
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic

    def wait(self, phase: str) -> None:
        """Wait until all nodes have reached this phase. This must be called once per phase on every node.

        Raises TransientError if a node fails or doesn't reach the phase within `timeout_s`, and Preempted when stopped.
        """
        self.any(phase, False)

    def any(self, phase: str, flag: bool, *, timeout_s: float = math.inf) -> bool:
        """Wait for all nodes, as `wait` does, and return whether `flag` was set on any node.

        `timeout_s`: maximum time to wait, in addition to the timeout for all phases.
        """
        if self.num_nodes == 1:
            return flag
        self.storage.write_bytes(self._key(f"{phase}/node-{self.rank}.{'yes' if flag else 'no'}"), b"")
        limit_s = min(timeout_s, self.timeout_s)
        deadline, poll_s = self.clock() + limit_s, FIRST_POLL_S
        while True:
            names = {stat.key[len(self.folder) + 1 :] for stat in self.storage.list(self.folder)}
            flags = {
                rank: f"{phase}/node-{rank}.yes" in names
                for rank in range(self.num_nodes)
                if names & {f"{phase}/node-{rank}.yes", f"{phase}/node-{rank}.no"}
            }
            if len(flags) == self.num_nodes:  # if a node fails after this, it is detected in the next phase
                return any(flags.values())
            if any(name.endswith(".failed") for name in names):
                self.check()
            missing = ", ".join(str(rank) for rank in range(self.num_nodes) if rank not in flags)
            if self.clock() > deadline:
                raise TransientError(
                    f"node {missing} of {self.num_nodes} not ready after {format_duration(limit_s)}",
                    expected=f"a marker from each node in {self.storage.uri(self._key(phase))}",
                    next_command="check the log of that node, then rerun the job",
                )
            if self.stop.wait(min(poll_s, limit_s)):
                self.stop.raise_if_set(f"waiting for node {missing}")
            poll_s = min(MAX_POLL_S, poll_s * 1.5)

    def exchange(self, phase: str, data: bytes, *, timeout_s: float) -> tuple[dict[int, bytes], dict[int, str]]:
        """Send `data` to the other nodes and return the data received from each node, keyed by node rank.

        Also returns the reason for each missing node. If any node has failed, only failed nodes are included, since the
        other nodes may be waiting for them.
        """
        if self.num_nodes == 1:
            return {self.rank: data}, {}
        keys = {rank: self._key(f"{phase}/node-{rank}.json") for rank in range(self.num_nodes)}
        self.storage.write_bytes(keys[self.rank], data)
        timeout = ""
        try:
            self.any(phase, False, timeout_s=timeout_s)
        except TransientError as error:
            timeout = error.seen
        received = {rank: content for rank, key in keys.items() if (content := self._read(key)) is not None}
        # Ignore the timeout for nodes whose data has arrived since then.
        missing = [rank for rank in keys if timeout and rank not in received]
        failed = {rank: f"it failed: {why}" for rank in missing if (why := self._failure(rank))}
        return received, failed or dict.fromkeys(missing, timeout)

    def fail(self, reason: str) -> None:
        self.storage.write_bytes(self._key(f"node-{self.rank}.failed"), reason.encode())

    def check(self) -> None:
        """Raise TransientError if another node has failed."""
        for rank in range(self.num_nodes):
            if rank != self.rank and (why := self._failure(rank)):
                raise TransientError(
                    f"node {rank} failed: {why}",
                    expected="all nodes to finish compiling before any of them trains",
                    next_command=f"check the log of node {rank}; this node did not fail",
                )

    @contextmanager
    def report_failure(self) -> Iterator[None]:
        """Report any error raised in the block to the other nodes, so that they stop waiting."""
        try:
            yield
        except BaseException as error:
            if self.num_nodes > 1:
                try:
                    self.fail(str(error) if isinstance(error, Preempted) else f"{reported_name(error)}: {error}")
                except Exception as second:
                    error.add_note(f"this failure could not be reported to the other nodes: {second}")
            raise

    def _failure(self, rank: int) -> str:
        """Return the reason why a node has failed, or an empty string if it hasn't."""
        return (self._read(self._key(f"node-{rank}.failed")) or b"").decode(errors="replace")

    def _read(self, key: str) -> bytes | None:
        with suppress(KeyNotFound):
            return self.storage.read_bytes(key)
        return None

    def _key(self, name: str) -> str:
        return join_key(self.folder, name)
