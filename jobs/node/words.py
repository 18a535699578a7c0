"""The words of a place: which job this is and which node of it, in the same variables on every platform.

What runs below `trnjobs-entry` reads these and no others. The local engine sets them itself; here the variables of AWS
Batch become them, in jobs/node/sagemaker.py the files of SageMaker. Pure.

    TRNJOBS_JOB_ID   the same on all nodes of a job, another one for each child of an array
    TRNJOBS_ATTEMPT  which try, from 1
    TRNJOBS_NODE     0 is the main node
    TRNJOBS_NODES    not set: no multi-node job
    TRNJOBS_MAIN     address of the main node, for the others
    TRNJOBS_INDEX    of a child of an array, from 0
"""

from collections.abc import Mapping

from pipeline.core.errors import ConfigError
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT, JOB_ID, MAIN_ADDRESS, NODE, NUM_NODES

_OF_BATCH = {
    "AWS_BATCH_JOB_ID": JOB_ID,
    "AWS_BATCH_JOB_ATTEMPT": ATTEMPT,
    "AWS_BATCH_JOB_ARRAY_INDEX": ARRAY_INDEX,
    "AWS_BATCH_JOB_NUM_NODES": NUM_NODES,
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": MAIN_ADDRESS,
}


def words_of_batch(env: Mapping[str, str]) -> dict[str, str]:
    """From the variables of AWS Batch; empty where there are none. Raises ConfigError when they do not fit together.

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
            raise ConfigError(
                f"a multi-node job without a whole set of AWS_BATCH_JOB_* variables: {error}",
                expected="number of nodes, node index and main node index as AWS Batch sets them",
            ) from error
    return words
