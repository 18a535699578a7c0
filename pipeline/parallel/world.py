"""Who we are among ranks and nodes, which part of shared work is ours, and how nodes reach and wait for each other."""

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

# The words of a place, on every platform the same: `trnjobs-entry` makes them of the platform's own.
JOB_ID = "TRNJOBS_JOB_ID"
ATTEMPT = "TRNJOBS_ATTEMPT"
NODE = "TRNJOBS_NODE"
NUM_NODES = "TRNJOBS_NODES"
"""Without it a process is one of a single machine."""
MAIN_ADDRESS = "TRNJOBS_MAIN"
ARRAY_INDEX = "TRNJOBS_INDEX"


@dataclass(frozen=True)
class World:
    """Ranks as in torch.distributed."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def node_from_env(env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (node rank, number of nodes) of a multi-node job, else (0, 1).

    Raises ConfigError when the variables do not fit together.
    """
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
    """Return the world torchrun describes; without it, one process on each node. Raises ConfigError for half of one."""
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
            f"WORLD_SIZE is set but the launch environment is not whole: {error}",
            expected="RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them",
            next_command="start through --launch.processes N or torchrun, or unset WORLD_SIZE",
        ) from error
    return world


def check_world(world: World, *, runtime_world_size: int, reduces_in_graph: bool, device: str) -> None:
    """Compare torchrun's world with what the device runtime believes.

    Two PJRT-CPU processes each report a world of one; then gradients go through gloo and that is right. Anywhere else a
    difference means every rank would train alone without a word. Raises ConfigError.
    """
    expected = world.world_size if reduces_in_graph else 1
    if runtime_world_size != expected:
        raise ConfigError(
            f"torchrun says world size {world.world_size}, the {device} runtime says {runtime_world_size}",
            expected=f"a runtime world size of {expected}",
            next_command="launch one process per device (--launch.processes, or torchrun --nproc-per-node), and unset"
            " CPU_NUM_DEVICES, NEURON_PJRT_WORLD_SIZE and NEURON_PJRT_PROCESSES_NUM_DEVICES; a runtime that still says"
            " 1 was asked for its world size before its replication was initialised",
        )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error of a collective says that another rank is gone, or does not come."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_LOST_PEERS)


# In plain RuntimeErrors of gloo, its store, and streams that wait for others (torch 2.9).
_OF_LOST_PEERS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "timed out in monitored")

# Not TRNPIPE_: those are settings.
TRACE_FILE = "TRN_TRACE_FILE"
"""Environment of a trial run that is driven: where rank 0 leaves its graph manifest instead of publishing it."""
RANK_REPORTS = "TRN_HEALTH_DIR"
"""Environment of the ranks that a node starts for its checks: where each leaves its report."""


# Which part of the work is ours: one of several jobs, one of several ranks in it.


def worker_of(jobs: int, world: World, env: Mapping[str, str], stage: str, job: int | None = None) -> tuple[int, int]:
    """Return (worker, workers) among the ranks of `jobs` jobs. Raises ConfigError if index and number do not fit."""
    index = job_index(jobs, env, stage, job)
    return index * world.world_size + world.rank, jobs * world.world_size


def job_index(jobs: int, env: Mapping[str, str], stage: str, job: int | None = None) -> int:
    """Return the index of this job among `jobs`: `job` if it is given, else that of the array. Raises ConfigError."""
    given = env.get(ARRAY_INDEX, "")
    if job is None and not given and jobs == 1:
        return 0
    index = job if job is not None else int(given) if given.isdecimal() else jobs
    if index >= jobs or (job is None and jobs == 1):  # every job of an array would do all the work
        raise ConfigError(
            f"{stage}: worker {(given or 'unknown') if job is None else job} of {jobs}",
            expected=f"in {ARRAY_INDEX} of an array job, or --{stage}.worker, an index below --{stage}.workers",
            next_command=f"--{stage}.workers SIZE, the size of the array",
        )
    return index


# The interface through which the other nodes of a job reach this machine, and where ranks meet.

EFA_DEVICES = Path("/dev/infiniband")
# Bridges, and the ends of them, that lead to containers of the same machine. ecs-*: every task of an AWS Batch
# multi-node job has one beside its own interface (amazon-ecs-agent, agent/ecscni/types_linux.go).
_LOCAL_ONLY = re.compile(r"lo\d*|(docker|ecs-|br-|veth|virbr|cni|flannel|podman|lxcbr|lxdbr).*")
_FORK_SAFE_KERNEL = (5, 15)


@dataclass(frozen=True)
class Interface:
    """One IPv4 address of this machine, and the interface that holds it."""

    name: str
    address: str


def own_interface() -> Interface:
    """Return the interface of the default route, else the first reachable one. Raises ConfigError if none is."""
    routed = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # of documentation (RFC 5737): nothing is sent, the system chooses the route
        routed = probe.getsockname()[0]
    found = [
        Interface(name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return choose_interface(found, routed)


def own_address() -> str:
    """Return the IPv4 address at which other machines reach this one. Raises ConfigError when it has none."""
    return own_interface().address


def choose_interface(found: Sequence[Interface], routed: str) -> Interface:
    """Choose one that other machines reach; `routed`: the address of the default route, if there is one.

    The order of the system says nothing: in a task of Amazon ECS the link to the agent (169.254.172.0/22) comes before
    the interface of the task. Raises ConfigError when no interface is reachable from other machines.
    """
    reachable = []
    for one in found:
        address = ipaddress.IPv4Address(one.address)
        if not (_LOCAL_ONLY.fullmatch(one.name) or address.is_link_local or address.is_loopback):
            reachable.append(one)
    if reachable:
        return next((one for one in reachable if one.address == routed), reachable[0])
    seen = ", ".join(f"{interface.name} {interface.address}" for interface in found) or "no IPv4 address"
    raise ConfigError(
        f"no network interface that other machines can reach: {seen}",
        expected="an IPv4 address that is neither loopback nor link-local, on an interface that is no container bridge",
        next_command="ip -4 address; ip -4 route",
    )


def network_variables(interface: Interface, *, has_efa: bool, kernel: str) -> dict[str, str]:
    """Return what collectives between machines read. A machine alone must not have it: its interface differs.

    CCOM: the bootstrap of Neuron's collectives; GLOO: PyTorch's collectives between processors. EFA as the AWS Neuron
    documentation sets it up; its FI_EFA_FORK_SAFE is for kernels before 5.15 and costs elsewhere.
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
MASTER_PORT = 41000  # apart from the Neuron runtime's own root port 62182, derived from MASTER_ADDR


def torchrun_arguments(processes: int, env: Mapping[str, str], own: Callable[[], str] = own_address) -> list[str]:
    """Return torchrun's arguments for `processes` ranks on each node.

    Ranks of one node meet at 127.0.0.1. Of several every node is told its number and, on all but the main one, the main
    node's address; the main node is its own address. MASTER_ADDR (of the main node) and MASTER_PORT replace ours: node
    groups on one machine need ports of their own.
    Raises ConfigError when the variables do not fit together.
    """
    ranks = [f"--nproc-per-node={processes}", "--max-restarts=0"]
    rank, nodes = node_from_env(env)
    if nodes == 1:  # not at the name of this machine, which may have no address, or that of another interface
        return ["--standalone", f"--local-addr={ALONE}", *ranks]
    master = env.get("MASTER_ADDR") or (own() if rank == 0 else env.get(MAIN_ADDRESS))
    if not master:
        raise ConfigError(
            f"node {rank} of {nodes} does not know the main node",
            expected=f"its address in {MAIN_ADDRESS}",
        )
    return [
        *ranks,
        f"--nnodes={nodes}",
        f"--node-rank={rank}",
        f"--master-addr={master}",
        f"--master-port={env.get('MASTER_PORT', MASTER_PORT)}",
    ]


# The nodes of one run wait for each other through small objects in the workspace. No node trains while another
# compiles: a compile in the middle of a collective looks like a hang to its peers. In each phase a node leaves
# `<phase>/node-<rank>.yes` or `.no`, its answer to the question of the phase; a node that will not come leaves
# `node-<rank>.failed` with its error as text. One listing shows all.

FIRST_POLL_S, MAX_POLL_S = 0.5, 10.0


@dataclass(frozen=True)
class Nodes:
    """All nodes of one try of one job, seen from one of them. A node alone waits for nobody and writes nothing.

    `folder` must differ for every try of every job (Batch: job id and attempt number), or markers of an earlier one
    would be taken for this one's. `storage` must not heed `stop`: who is stopped still tells the others.
    """

    storage: Storage
    folder: str
    rank: int
    num_nodes: int
    timeout_s: float
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic

    def wait(self, phase: str) -> None:
        """Return when all nodes have come to this phase; each is to come to it once.

        Raises TransientError when a node failed or is not there after `timeout_s`, and Preempted when stopped.
        """
        self.any(phase, False)

    def any(self, phase: str, mine: bool, *, timeout_s: float = math.inf) -> bool:
        """Wait as `wait` does, here perhaps less long. Return whether `mine` was true on one node at least."""
        if self.num_nodes == 1:
            return mine
        self.storage.write_bytes(self._key(f"{phase}/node-{self.rank}.{'yes' if mine else 'no'}"), b"")
        limit_s = min(timeout_s, self.timeout_s)
        deadline, poll_s = self.clock() + limit_s, FIRST_POLL_S
        while True:
            names = {stat.key[len(self.folder) + 1 :] for stat in self.storage.list(self.folder)}
            answers = {
                rank: f"{phase}/node-{rank}.yes" in names
                for rank in range(self.num_nodes)
                if names & {f"{phase}/node-{rank}.yes", f"{phase}/node-{rank}.no"}
            }
            if len(answers) == self.num_nodes:  # what failed after all had come is for the next phase
                return any(answers.values())
            if any(name.endswith(".failed") for name in names):
                self.check()
            missing = ", ".join(str(rank) for rank in range(self.num_nodes) if rank not in answers)
            if self.clock() > deadline:
                raise TransientError(
                    f"node {missing} of {self.num_nodes} not ready after {format_duration(limit_s)}",
                    expected=f"a marker of each in {self.storage.uri(self._key(phase))}",
                    next_command="look at the log of that node; then run the job again",
                )
            if self.stop.wait(min(poll_s, limit_s)):
                self.stop.raise_if_set(f"waiting for node {missing}")
            poll_s = min(MAX_POLL_S, poll_s * 1.5)

    def exchange(self, phase: str, mine: bytes, *, timeout_s: float) -> tuple[dict[int, bytes], dict[int, str]]:
        """Return (what each node brings to this phase, by rank; why those that are absent did not come in time).

        Where one has failed, it alone is named: the others may only be waiting, too.
        """
        if self.num_nodes == 1:
            return {self.rank: mine}, {}
        keys = {rank: self._key(f"{phase}/node-{rank}.json") for rank in range(self.num_nodes)}
        self.storage.write_bytes(keys[self.rank], mine)
        late = ""
        try:
            self.any(phase, False, timeout_s=timeout_s)
        except TransientError as error:
            late = error.seen
        found = {rank: data for rank, key in keys.items() if (data := self._read(key)) is not None}
        absent = [rank for rank in keys if late and rank not in found]  # the last one may come while we give up
        failed = {rank: f"it failed: {why}" for rank in absent if (why := self._failure(rank))}
        return found, failed or dict.fromkeys(absent, late)

    def fail(self, reason: str) -> None:
        self.storage.write_bytes(self._key(f"node-{self.rank}.failed"), reason.encode())

    def check(self) -> None:
        """Raise TransientError when another node has failed."""
        for rank in range(self.num_nodes):
            if rank != self.rank and (why := self._failure(rank)):
                raise TransientError(
                    f"node {rank} failed: {why}",
                    expected="every node to finish compiling before one trains",
                    next_command=f"look at the log of node {rank}; this node is fine",
                )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """End the wait of the other nodes where the block raises."""
        try:
            yield
        except BaseException as error:
            if self.num_nodes > 1:
                try:
                    self.fail(str(error) if isinstance(error, Preempted) else f"{type(error).__name__}: {error}")
                except Exception as second:
                    error.add_note(f"and the other nodes could not be told: {second}")
            raise

    def _failure(self, rank: int) -> str:
        """Return why a node has failed; empty while it has not."""
        return (self._read(self._key(f"node-{rank}.failed")) or b"").decode(errors="replace")

    def _read(self, key: str) -> bytes | None:
        with suppress(KeyNotFound):
            return self.storage.read_bytes(key)
        return None

    def _key(self, name: str) -> str:
        return join_key(self.folder, name)
