"""Training jobs made with SageMaker's own calls: one for each try."""

from dataclasses import dataclass

from jobs.cycle.states import Leaf
from jobs.targets.sagemaker.client import SageMakerClient
from jobs.targets.sagemaker.describe import Seen, seen_of
from jobs.targets.sagemaker.requests import Cycle, training_job_request


@dataclass(frozen=True)
class DirectRoad:
    """Implements `Road`."""

    client: SageMakerClient

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        detail = self.client.describe(cycle.training_job(leaf, round_, attempt))
        return None if detail is None else seen_of(detail)

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> str:
        name = cycle.training_job(leaf, round_, attempt)
        return self.client.create(training_job_request(cycle, leaf, name=name, attempt=attempt))

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        self.client.stop(cycle.training_job(leaf, round_, attempt))

    def stream_prefixes(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> tuple[str, ...]:
        return host_prefixes(cycle.training_job(leaf, round_, attempt), leaf.spec.num_nodes)


def host_prefixes(training_job: str, num_nodes: int) -> tuple[str, ...]:
    """By node: hosts are numbered from 1, and nodes follow the order of their names as text (jobs/node/sagemaker.py).

    Source: SageMaker developer guide, log groups and streams: `<training job>/algo-<number>-<seconds>`.
    """
    return tuple(f"{training_job}/{host}-" for host in sorted(f"algo-{n + 1}" for n in range(max(1, num_nodes))))
