"""The calls to AWS Batch that we use: pages, chunks, retries and the meaning of errors in one place.

Rights: batch:RegisterJobDefinition, SubmitJob, TagResource, TerminateJob on the pipeline's definitions, queues and
jobs; DescribeJobDefinitions, DescribeJobs, ListJobs, DescribeJobQueues, DescribeComputeEnvironments and
DescribeSchedulingPolicies on *.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jobs.targets.batch.errors import AWS_ERRORS, UnknownOutcome, is_retryable, translate, was_not_done
from jobs.targets.batch.requests import Request
from pipeline.core.stop import StopSignal
from pipeline.io.retry import RetryPolicy, call_with_retry

MAX_DESCRIBED = 100  # ids or names in one Describe call
MAX_REASON_CHARACTERS = 1024
Detail = Mapping[str, Any]
"""One job, definition, queue ... as AWS describes it."""
T = TypeVar("T")


class BatchClient:
    """AWS Batch. `raw` is boto3's client, or what answers like it."""

    def __init__(self, raw: Any, *, policy: RetryPolicy | None = None, stop: StopSignal | None = None) -> None:
        self._raw, self._policy, self._stop = raw, policy or RetryPolicy(), stop or StopSignal()

    def repeat(self, work: Callable[[], T], *, doing: str, retryable: Callable[[BaseException], bool]) -> T:
        """`work()` under the retry policy of this client."""
        return call_with_retry(
            work, self._policy, retryable=retryable, stop=self._stop, doing=doing, on_retry=lambda: None
        )

    def register(self, request: Request) -> str:
        """A new revision of a job definition, as `name:revision`."""
        answer = self._call("registering a job definition", "register_job_definition", **request)
        return f"{answer['jobDefinitionName']}:{answer['revision']}"

    def active_definitions(self, name: str) -> list[Detail]:
        """Revisions of one name that were not deregistered."""
        wanted = {"jobDefinitionName": name, "status": "ACTIVE"}
        return list(self._pages("describing job definitions", "describe_job_definitions", "jobDefinitions", wanted))

    def submit_job(self, request: Request) -> str:
        """The id of a new job. SubmitJob has no client token, so it is repeated only when it surely was not done.

        Raises UnknownOutcome when it may have been done: look for the job by its name then.
        """
        doing = f"submitting {request['jobName']}"
        try:
            answer = self.repeat(lambda: self._raw.submit_job(**request), doing=doing, retryable=was_not_done)
        except AWS_ERRORS as error:
            if is_retryable(error) and not was_not_done(error):
                raise UnknownOutcome(f"{type(error).__name__} while {doing}", next_command="trnjobs submit") from error
            raise translate(error, doing) from error
        return str(answer["jobId"])

    def describe_jobs(self, ids: Sequence[str]) -> dict[str, Detail]:
        """By id. Jobs that AWS Batch does not know (not yet, or no more) are left out."""
        found: dict[str, Detail] = {}
        for chunk in _chunks(ids):
            answer = self._call("describing jobs", "describe_jobs", jobs=chunk)
            found |= {one["jobId"]: one for one in answer["jobs"]}
        return found

    def jobs_named(self, queue: str, name: str) -> list[Detail]:
        """Whole jobs of exactly this name in any state. (The filter ignores case; some list the children too.)"""
        wanted = {"jobQueue": queue, "filters": [{"name": "JOB_NAME", "values": [name]}]}
        jobs = self._pages("listing jobs", "list_jobs", "jobSummaryList", wanted)
        return [one for one in jobs if one["jobName"] == name and not {":", "#"} & {*one["jobId"]}]

    def terminate_job(self, job_id: str, reason: str) -> None:
        """End a job in whatever state; one that has ended stays as it is."""
        text = reason[:MAX_REASON_CHARACTERS]
        self._call(f"ending job {job_id}", "terminate_job", jobId=job_id, reason=text)

    def queues(self, names: Sequence[str]) -> list[Detail]:
        """Those of the queues, given by name or ARN, that exist."""
        return self._described("describing queues", "describe_job_queues", "jobQueues", names)

    def compute_environments(self, names: Sequence[str]) -> list[Detail]:
        """Those of the compute environments, given by name or ARN, that exist."""
        doing, operation = "describing compute environments", "describe_compute_environments"
        return self._described(doing, operation, "computeEnvironments", names)

    def scheduling_policies(self, arns: Sequence[str]) -> list[Detail]:
        """Those of the policies that exist."""
        found: list[Detail] = []
        for chunk in _chunks(arns):
            answer = self._call("describing scheduling policies", "describe_scheduling_policies", arns=chunk)
            found += answer["schedulingPolicies"]
        return found

    def _described(self, doing: str, operation: str, members: str, names: Sequence[str]) -> list[Detail]:
        found: list[Detail] = []
        for chunk in _chunks(names):
            found += self._pages(doing, operation, members, {members: chunk})
        return found

    def _pages(self, doing: str, operation: str, members: str, request: Request) -> Iterator[Detail]:
        page: Request = {}
        while True:
            answer = self._call(doing, operation, **request, **page)
            yield from answer.get(members, ())
            if not answer.get("nextToken"):
                return
            page = {"nextToken": answer["nextToken"]}

    def _call(self, doing: str, operation: str, **request: Any) -> Detail:
        call: Callable[..., Detail] = getattr(self._raw, operation)
        try:
            return self.repeat(lambda: call(**request), doing=doing, retryable=is_retryable)
        except AWS_ERRORS as error:
            raise translate(error, doing) from error


def _chunks(names: Sequence[str]) -> Iterator[list[str]]:
    for first in range(0, len(names), MAX_DESCRIBED):
        yield list(names[first : first + MAX_DESCRIBED])
