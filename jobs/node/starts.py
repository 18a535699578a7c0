"""Which start of a job this is, where the platform starts the same one again by itself: Spot capacity, service jobs.

Without it two starts would share tokens, barriers and names. The main node counts in the workspace, one object a start,
which holds the id of the job as the platform knows it; the other nodes hear it with the word to start.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.io.storage import Storage
from pipeline.parallel.world import ATTEMPT, JOB_ID

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
