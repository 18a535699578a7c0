"""Ranks and nodes: this process's rank, its worker slice, the network between nodes, and waiting for other nodes."""

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

from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, Storage, join_key

# Environment variables of a job, the same on every platform. `trnjobs-entry` derives them from the platform's own.
JOB_ID = "TRNJOBS_JOB_ID"
ATTEMPT = "TRNJOBS_ATTEMPT"
NODE = "TRNJOBS_NODE"
NUM_NODES = "TRNJOBS_NODES"
"""Unset in a job of a single node."""
MAIN_ADDRESS = "TRNJOBS_MAIN"
ARRAY_INDEX = "TRNJOBS_INDEX"


@dataclass(frozen=True)
class World:
    """Rank, local rank and node rank of this process and the sizes of the world, as in torch.distributed."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def node_from_env(env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (node rank, number of nodes) of a multi-node job, else (0, 1). Raises ConfigError for invalid values."""
    if NUM_NODES not in env:
        return 0, 1
    node, nodes = env.get(NODE, ""), env[NUM_NODES]
    if node.isdecimal() and nodes.isdecimal() and int(node) < int(nodes):
        return int(node), int(nodes)
    raise ConfigError(
        f"a multi-node job with {NODE}={node!r} and {NUM_NODES}={nodes!r}",
        expected=f"0 <= {NODE} < {NUM_NODES}, as trnjobs-entry sets them",
    )


def world_from_env(env: Mapping[str, str] = os.environ) -> World:
    """Return the world of torchrun's variables, or of one process per node. Raises ConfigError if some are missing."""
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
            f"WORLD_SIZE is set but the launch environment is incomplete or inconsistent: {error}",
            expected="RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them",
            next_command="start with --launch.processes N or torchrun, or unset WORLD_SIZE",
        ) from error
    return world


def check_world(world: World, *, runtime_world_size: int, reduces_in_graph: bool, device: str) -> None:
    """Raise ConfigError if the world sizes of torchrun and of the device runtime differ.

    Several PJRT-CPU processes each report a world size of 1, which is correct because gloo reduces their gradients. On
    any other device a difference means that every rank would silently train alone.
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
    """Return whether an error of a collective means that another rank exited or timed out."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(pattern in str(error) for pattern in _LOST_RANK_PATTERNS)


# In plain RuntimeErrors of gloo, its store, and streams that wait for other ranks (torch 2.9).
_LOST_RANK_PATTERNS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "timed out in monitored")

# Not TRNPIPE_: those are settings.
TRACE_FILE = "TRN_TRACE_FILE"
"""Environment variable of a trial run: the file to which rank 0 writes its graph manifest instead of publishing it."""
RANK_REPORTS = "TRN_HEALTH_DIR"
"""Environment variable of ranks started for health checks: the folder to which each writes its report."""


# Worker slices: one of several jobs, and one of several ranks in it.


def worker_of(jobs: int, world: World, env: Mapping[str, str], stage: str, job: int | None = None) -> tuple[int, int]:
    """Return (worker, workers) among the ranks of `jobs` jobs. Raises ConfigError as `job_index` does."""
    index = job_index(jobs, env, stage, job)
    return index * world.world_size + world.rank, jobs * world.world_size


def job_index(jobs: int, env: Mapping[str, str], stage: str, job: int | None = None) -> int:
    """Return this job's index: `job` or the array index. Raises ConfigError if it is unknown or not below `jobs`."""
    array_index = env.get(ARRAY_INDEX, "")
    if job is None and not array_index and jobs == 1:
        return 0
    index = job if job is not None else int(array_index) if array_index.isdecimal() else jobs
    if index >= jobs or (job is None and jobs == 1):  # otherwise every job of an array would do all the work
        raise ConfigError(
            f"{stage}: worker {(array_index or 'unknown') if job is None else job} of {jobs}",
            expected=f"in {ARRAY_INDEX} of an array job, or --{stage}.worker, an index below --{stage}.workers",
            next_command=f"--{stage}.workers SIZE, the size of the array",
        )
    return index


# The network interface through which other nodes reach this machine, and the rendezvous of ranks.

EFA_DEVICES = Path("/dev/infiniband")
# Loopback, bridges and links to containers on the same machine. ecs-*: every task of an AWS Batch multi-node job has
# one in addition to its own interface (amazon-ecs-agent, agent/ecscni/types_linux.go).
_LOCAL_ONLY = re.compile(r"lo\d*|(docker|ecs-|br-|veth|virbr|cni|flannel|podman|lxcbr|lxdbr).*")
_FORK_SAFE_KERNEL = (5, 15)


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine with one of its IPv4 addresses."""

    name: str
    address: str


def own_interface() -> Interface:
    """Return the interface of the default route, else the first reachable one. Raises ConfigError if there is none."""
    routed = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737): selects a route but sends nothing
        routed = probe.getsockname()[0]
    interfaces = [
        Interface(name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return choose_interface(interfaces, routed)


def own_address() -> str:
    """Return the IPv4 address at which other machines reach this one. Raises ConfigError if it has none."""
    return own_interface().address


def choose_interface(interfaces: Sequence[Interface], routed: str) -> Interface:
    """Return an interface that other machines can reach. `routed`: address of the default route, empty if none.

    The first interface may be the wrong one: in an Amazon ECS task the link to the agent (169.254.172.0/22) precedes
    the interface of the task. Raises ConfigError if no interface is reachable from other machines.
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
        f"no network interface that other machines can reach: {addresses}",
        expected="an IPv4 address that is not loopback or link-local, on an interface that is not a container bridge",
        next_command="ip -4 address; ip -4 route",
    )


def network_variables(interface: Interface, *, has_efa: bool, kernel: str) -> dict[str, str]:
    """Return the environment variables of collectives between machines. Do not set them on a single machine.

    CCOM: bootstrap of Neuron's collectives. GLOO: PyTorch's collectives on the host. EFA variables follow the AWS
    Neuron documentation. FI_EFA_FORK_SAFE is required by kernels before 5.15 and slows down newer ones.
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
MASTER_PORT = 41000  # differs from the Neuron runtime's root port 62182, which it derives from MASTER_ADDR


def torchrun_arguments(processes: int, env: Mapping[str, str], own: Callable[[], str] = own_address) -> list[str]:
    """Return torchrun's arguments for `processes` ranks on each node.

    A multi-node job has the node rank and, except on the main node, the main node's address in its environment.
    MASTER_ADDR and MASTER_PORT override the defaults, because node groups on one machine need different ports.
    Raises ConfigError if a variable is missing or invalid.
    """
    ranks = [f"--nproc-per-node={processes}", "--max-restarts=0"]
    rank, nodes = node_from_env(env)
    if nodes == 1:  # not the host name, which may have no address or that of another interface
        return ["--standalone", f"--local-addr={ALONE}", *ranks]
    master = env.get("MASTER_ADDR") or (own() if rank == 0 else env.get(MAIN_ADDRESS))
    if not master:
        raise ConfigError(
            f"node {rank} of {nodes} has no address of the main node",
            expected=f"the address in {MAIN_ADDRESS}",
        )
    return [
        *ranks,
        f"--nnodes={nodes}",
        f"--node-rank={rank}",
        f"--master-addr={master}",
        f"--master-port={env.get('MASTER_PORT', MASTER_PORT)}",
    ]


# The nodes of one run wait for each other through small objects in the workspace. No node trains while another one
# compiles, because a compile in the middle of a collective looks like a hang to other nodes. In each phase a node
# writes `<phase>/node-<rank>.yes` or `.no`, its flag for this phase. A node that fails writes `node-<rank>.failed` with
# its error as text. A single listing returns all of them.

FIRST_POLL_S, MAX_POLL_S = 0.5, 10.0


@dataclass(frozen=True)
class Nodes:
    """The nodes of one attempt of a job, as used by one of them. A single node never waits and writes nothing.

    `folder` must be unique to the attempt (Batch: job id and attempt number), otherwise markers of an earlier attempt
    would be read. `storage` must ignore `stop`, because a stopped node still reports its failure to the others.
    """

    storage: Storage
    folder: str
    rank: int
    num_nodes: int
    timeout_s: float
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic

    def wait(self, phase: str) -> None:
        """Wait until all nodes have reached this phase. Each node calls it once per phase.

        Raises TransientError if a node failed or did not arrive within `timeout_s`, and Preempted when stopped.
        """
        self.any(phase, False)

    def any(self, phase: str, flag: bool, *, timeout_s: float = math.inf) -> bool:
        """Wait as `wait` does, for at most `timeout_s`, and return whether `flag` was true on any node."""
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
            if len(flags) == self.num_nodes:  # a node that fails after this is reported in the next phase
                return any(flags.values())
            if any(name.endswith(".failed") for name in names):
                self.check()
            missing = ", ".join(str(rank) for rank in range(self.num_nodes) if rank not in flags)
            if self.clock() > deadline:
                raise TransientError(
                    f"node {missing} of {self.num_nodes} not ready after {format_duration(limit_s)}",
                    expected=f"a marker of each node in {self.storage.uri(self._key(phase))}",
                    next_command="check the log of that node, then run the job again",
                )
            if self.stop.wait(min(poll_s, limit_s)):
                self.stop.raise_if_set(f"waiting for node {missing}")
            poll_s = min(MAX_POLL_S, poll_s * 1.5)

    def exchange(self, phase: str, data: bytes, *, timeout_s: float) -> tuple[dict[int, bytes], dict[int, str]]:
        """Send `data` and return the data of all nodes by rank, and the reasons of missing nodes by rank.

        If a node has failed, only failed nodes are listed as missing, since the others may be waiting for them.
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
        missing = [
            rank for rank in keys if timeout and rank not in received
        ]  # the last one may arrive after the timeout
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
        """Report an error of the block to the other nodes, which ends their wait."""
        try:
            yield
        except BaseException as error:
            if self.num_nodes > 1:
                try:
                    self.fail(str(error) if isinstance(error, Preempted) else f"{type(error).__name__}: {error}")
                except Exception as second:
                    error.add_note(f"this failure could not be reported to the other nodes: {second}")
            raise

    def _failure(self, rank: int) -> str:
        """Return why a node has failed, empty if it has not."""
        return (self._read(self._key(f"node-{rank}.failed")) or b"").decode(errors="replace")

    def _read(self, key: str) -> bytes | None:
        with suppress(KeyNotFound):
            return self.storage.read_bytes(key)
        return None

    def _key(self, name: str) -> str:
        return join_key(self.folder, name)
