"""Jobs that exist already, found by their names: of a driver that died before it could record them."""

from dataclasses import dataclass

from jobs.cycle.records import JobState
from jobs.plan.spec import CyclePlan, JobSpec
from jobs.targets.batch.client import BatchClient, Detail
from jobs.targets.batch.errors import UnknownOutcome
from jobs.targets.batch.requests import Request, job_name

PLAN_TAG = "plan"
CLOCK_SKEW_S = 300.0


def name_in_round(plan: CyclePlan, job: JobSpec, round_: int) -> str:
    """The name of a job in AWS Batch: the same on every try to submit it, another one in every round."""
    return job_name(plan, job) + (f"-round-{round_}" if round_ > 1 else "")


@dataclass(frozen=True)
class Finder:
    """Finds the jobs of one plan. `since`: seconds since 1970; what is older belongs to an earlier life of the cycle
    (the workspace was emptied and the same plan submitted again)."""

    client: BatchClient
    plan_id: str
    since: float

    def live(self, queue: str, name: str) -> list[Detail]:
        """Jobs of this name that have not failed, the oldest first.

        Another workspace may use the same names in the same queue: the tag tells whose a job is. Raises
        UnknownOutcome while AWS Batch lists a job that it does not describe yet.
        """
        listed = [one for one in self.client.jobs_named(queue, name) if self._may_be_ours(one)]
        described = self.client.describe_jobs([one["jobId"] for one in listed])
        unknown = [one["jobId"] for one in listed if one["jobId"] not in described]
        if unknown:
            raise UnknownOutcome(
                f"job {unknown[0]} ({name}) is listed and not described", next_command="trnjobs submit, in a minute"
            )
        ours = [one for one in described.values() if one.get("tags", {}).get(PLAN_TAG) == self.plan_id]
        return sorted(ours, key=lambda one: (one["createdAt"], one["jobId"]))

    def adopt_or_submit(self, request: Request) -> str:
        """The id of the one job of this name. It asks before every SubmitJob, since one cannot be told from two."""

        def find_or_submit() -> str:
            found = self.live(request["jobQueue"], request["jobName"])
            return str(found[0]["jobId"]) if found else self.client.submit_job(request)

        return self.client.repeat(find_or_submit, doing=f"submitting {request['jobName']}", retryable=_is_unknown)

    def live_ids(self, queue: str, name: str) -> list[str]:
        """Ids of the jobs of this name that have not ended."""
        found = self.client.repeat(lambda: self.live(queue, name), doing=f"looking for {name}", retryable=_is_unknown)
        return [str(one["jobId"]) for one in found if not JobState(one["status"]).is_final]

    def _may_be_ours(self, summary: Detail) -> bool:
        is_new = float(summary["createdAt"]) / 1000 >= self.since - CLOCK_SKEW_S
        return is_new and summary["status"] != JobState.FAILED


def _is_unknown(error: BaseException) -> bool:
    return isinstance(error, UnknownOutcome)
