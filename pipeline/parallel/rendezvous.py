"""Where the nodes of one run meet: this machine alone, or the nodes of an AWS Batch multi-node job."""

from collections.abc import Callable, Mapping

from pipeline.core.errors import ConfigError
from pipeline.parallel.network import own_address
from pipeline.parallel.world import node_from_env

MASTER_PORT = 41000  # apart from the Neuron runtime's own root port 62182, derived from MASTER_ADDR


def torchrun_arguments(processes: int, env: Mapping[str, str], own: Callable[[], str] = own_address) -> list[str]:
    """torchrun's arguments for `processes` ranks on each node.

    Batch gives every node its index and, on all but the main one, the main node's address; the main node is its own
    address. MASTER_ADDR (of the main node) and MASTER_PORT replace ours: gangs on one machine need ports of their own.
    Raises ConfigError when the variables do not fit together.
    """
    ranks = [f"--nproc-per-node={processes}", "--max-restarts=0"]
    if "AWS_BATCH_JOB_NUM_NODES" not in env:
        return ["--standalone", *ranks]
    rank, nodes = node_from_env(env)
    of_batch = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    master = env.get("MASTER_ADDR") or (own() if rank == 0 else env.get(of_batch))
    if master is None:
        raise ConfigError(
            f"node {rank} of {nodes} does not know the main node",
            expected=f"its address in {of_batch}",
        )
    return [
        *ranks,
        f"--nnodes={nodes}",
        f"--node-rank={rank}",
        f"--master-addr={master}",
        f"--master-port={env.get('MASTER_PORT', MASTER_PORT)}",
    ]
