"""The environment of a node, as AWS Batch sets it; what this process inherited of jobs and ranks is left out."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.cycle.states import Leaf
from jobs.plan.spec import CyclePlan

COMPUTE_ENVIRONMENT = "local"
LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below those the kernel hands out to clients
# Ours, of a job around this one, and of torchrun.
LEFT_OUT = ("TRNPIPE_", "TRNJOBS_", "AWS_BATCH_", "TORCHELASTIC_")
LEFT_OUT_NAMES = frozenset(
    [f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")]
    + ["ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TRN_EXIT_DIR", "TRN_STACKS_DIR"]
)
_MODULES = {"trnjobs-entry": "jobs.node", "trnpipe": "pipeline", "trnjobs": "jobs"}


def node_environment(
    base: Mapping[str, str], plan: CyclePlan, leaf: Leaf, leaf_id: str, attempt: int, node: int, address: str
) -> dict[str, str]:
    """`base`: of this process. `leaf_id`: of an array's child `id:index`. `address`: of the main node."""
    spec = leaf.spec
    environment = {
        name: value for name, value in base.items() if not name.startswith(LEFT_OUT) and name not in LEFT_OUT_NAMES
    }
    # As an image has its commands on the path.
    environment["PATH"] = f"{Path(sys.executable).parent}:{base.get('PATH', '/usr/bin:/bin')}"
    environment |= spec.environment
    environment |= {"TRNPIPE_WORKSPACE": plan.workspace, "TRNPIPE_CYCLE": plan.cycle, "TRNJOBS_JOB": spec.name}
    environment |= {
        "AWS_BATCH_JOB_ID": f"{leaf_id}#{node}" if spec.num_nodes else leaf_id,
        "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        "AWS_BATCH_JQ_NAME": spec.queue or COMPUTE_ENVIRONMENT,
        "AWS_BATCH_CE_NAME": COMPUTE_ENVIRONMENT,
    }
    if leaf.index is not None:
        environment["AWS_BATCH_JOB_ARRAY_INDEX"] = str(leaf.index)
    if spec.num_nodes:
        environment |= {
            "AWS_BATCH_JOB_NUM_NODES": str(spec.num_nodes),
            "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "MASTER_PORT": str(gang_port(leaf_id, attempt)),
        }
        if address == LOOPBACK:  # the main node would look in vain for another one of its own
            environment["MASTER_ADDR"] = address
        if node:
            environment["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = address
    return environment


def gang_port(leaf_id: str, attempt: int) -> int:
    """Where the nodes of one try meet (and the port after it): other gangs of this machine, and what an earlier try
    left, use others. An even number, the same whoever asks."""
    digest = hashlib.sha256(f"{leaf_id}/{attempt}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % (NUM_PORTS // 2) * 2


def local_command(words: Sequence[str]) -> list[str]:
    """Our own commands run with this interpreter, whatever is on the path."""
    module = _MODULES.get(words[0])
    return [sys.executable, "-m", module, *words[1:]] if module else list(words)
