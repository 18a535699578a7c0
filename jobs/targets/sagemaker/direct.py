"""Training jobs made with SageMaker's own calls: one for each try."""

from dataclasses import dataclass

from jobs.cycle.states import Leaf
from jobs.plan.dag import Plan
from jobs.targets.sagemaker.client import SageMakerClient
from jobs.targets.sagemaker.describe import Seen, host_prefixes, seen_of
from jobs.targets.sagemaker.requests import Cycle, direct_request


@dataclass(frozen=True)
class DirectRoad:
    """Implements `Road`."""

    client: SageMakerClient

    def check(self, plan: Plan) -> None:
        """The account is not asked: SageMaker refuses a request that does not fit it."""

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        name = cycle.training_job(leaf, round_, attempt)
        detail = self.client.describe(name)
        return None if detail is None else seen_of(detail, host_prefixes(name, leaf.spec.num_nodes))

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen:
        name = cycle.training_job(leaf, round_, attempt)
        refused = self.client.create(direct_request(cycle, leaf, round_, attempt))
        if refused:
            return Seen(is_queued=True, note=refused)
        return Seen(streams=host_prefixes(name, leaf.spec.num_nodes))

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        self.client.stop(cycle.training_job(leaf, round_, attempt))
