"""The nodes of the job that a stage is part of, met through the workspace."""

import os
from collections.abc import Mapping

from pipeline.compile.node_barrier import Nodes
from pipeline.stages.context import StageContext


def nodes_of(ctx: StageContext, place: str, timeout_s: float) -> Nodes:
    """All nodes of this try of the job, one process each; `place`: where in the cycle they meet."""
    return Nodes(
        ctx.workspace_after_stop,
        f"cycles/{ctx.cycle}/{place}/{attempt_name(os.environ)}",
        ctx.world.node_rank,
        ctx.world.world_size,  # one process a node: ranks are started by the stage
        timeout_s,
        ctx.stop,
    )


def attempt_name(env: Mapping[str, str]) -> str:
    """What all nodes of one try of one Batch job agree on; their own job ids end in `#<node index>`."""
    job = env.get("AWS_BATCH_JOB_ID", "local").partition("#")[0]
    return f"{job}-{env.get('AWS_BATCH_JOB_ATTEMPT', '1')}"
