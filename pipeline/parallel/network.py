"""The interface through which the other nodes of a job reach this machine, and the variables that name it."""

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.core.errors import ConfigError
from pipeline.parallel.world import MAIN_ADDRESS, node_from_env

ROUTES = Path("/proc/net/route")
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
    """The interface of the default route; the first reachable one where there is no such route. Raises ConfigError."""
    routes = ROUTES.read_text() if ROUTES.exists() else ""  # Linux alone has it
    found = [
        Interface(name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return choose_interface(found, default_routes(routes))


def own_address() -> str:
    """The IPv4 address at which other machines reach this one. Raises ConfigError when it has none."""
    return own_interface().address


def choose_interface(found: Sequence[Interface], routed: Sequence[str]) -> Interface:
    """Of `found`, in the order of the system; `routed`: names of interfaces with a default route, the best first.

    The order of the system says nothing: in a task of Amazon ECS the link to the agent (169.254.172.0/22) comes before
    the interface of the task. Raises ConfigError when no interface is reachable from other machines.
    """
    reachable = []  # from other machines
    for interface in found:
        address = ipaddress.IPv4Address(interface.address)
        if not (_LOCAL_ONLY.fullmatch(interface.name) or address.is_link_local or address.is_loopback):
            reachable.append(interface)
    for name in routed:
        for interface in reachable:
            if interface.name == name:
                return interface
    if reachable:
        return reachable[0]
    seen = ", ".join(f"{interface.name} {interface.address}" for interface in found) or "no IPv4 address"
    raise ConfigError(
        f"no network interface that other machines can reach: {seen}",
        expected="an IPv4 address that is neither loopback nor link-local, on an interface that is no container bridge",
        next_command="ip -4 address; ip -4 route",
    )


def default_routes(table: str) -> list[str]:
    """Interfaces with a default route in the text of /proc/net/route, the lowest metric first."""
    found = []
    for line in table.splitlines()[1:]:
        name, destination, _, _, _, _, metric, mask, *_ = line.split()
        if destination == mask == "00000000":
            found.append((int(metric), name))
    return [name for _, name in sorted(found, key=lambda one: one[0])]


def gang_variables(interface: Interface, *, has_efa: bool, kernel: str) -> dict[str, str]:
    """What collectives between machines read. A machine alone must not have them: its interface has another name.

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


# Where the nodes of one run meet: this machine alone, or the nodes of a multi-node job.

ALONE = "127.0.0.1"
MASTER_PORT = 41000  # apart from the Neuron runtime's own root port 62182, derived from MASTER_ADDR


def torchrun_arguments(processes: int, env: Mapping[str, str], own: Callable[[], str] = own_address) -> list[str]:
    """torchrun's arguments for `processes` ranks on each node.

    Ranks of one node meet at 127.0.0.1. Of several every node is told its number and, on all but the main one, the main
    node's address; the main node is its own address. MASTER_ADDR (of the main node) and MASTER_PORT replace ours: gangs
    on one machine need ports of their own.
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
