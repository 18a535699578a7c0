"""SageMaker in memory, behind boto3's client: what it refuses, describes and forgets; nothing runs by itself.

Requests are checked against botocore's model, and then against the bounds of it. `start`, `finish`, `interrupt`, `stop`
and `delete` move training jobs as SageMaker, its Spot capacity and people at the console would.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import ClientError

from jobs.targets.sagemaker.requests import request_problems
from tests.jobs.targets.batch.fake_batch import client_error
from tests.jobs.targets.batch.faults import Faults

Request = dict[str, Any]
ENDED = ("Completed", "Failed", "Stopped")


class FakeSageMaker:
    """One account and region. `lag`: calls until a new job is described. `quota`: jobs that may live at once."""

    def __init__(self, clock: Callable[[], float], *, faults: Faults | None = None, lag: int = 0) -> None:
        self.clock, self.faults, self.lag = clock, faults or Faults(), lag
        self.quota: int | None = None
        self.jobs: dict[str, Request] = {}
        self.created: list[Request] = []
        """Every request that made a job."""
        self.stopped: list[str] = []
        self.on_create: Callable[[Request], object] = lambda request: None
        self.calls = 0

    # What boto3's client offers.

    def create_training_job(self, **request: Any) -> Request:
        return self._api("CreateTrainingJob", request, lambda: self._create(request))

    def describe_training_job(self, **request: Any) -> Request:
        return self._api("DescribeTrainingJob", request, lambda: self._describe(request["TrainingJobName"]))

    def stop_training_job(self, **request: Any) -> Request:
        return self._api("StopTrainingJob", request, lambda: self._stop(request["TrainingJobName"]))

    # What happens to training jobs.

    def live(self) -> list[str]:
        return [name for name, job in self.jobs.items() if job["TrainingJobStatus"] not in ENDED]

    def start(self, name: str) -> None:
        job = self.jobs[name]
        job.setdefault("TrainingStartTime", self._now())
        self._move(job, "InProgress", "Training")

    def finish(self, name: str, exit_code: int, said: str = "") -> None:
        """Its entry has ended; `said`: what stands in the failure file behind the code."""
        self.start(name)
        failure = f"AlgorithmError: exit {exit_code} {said}, exit code: {exit_code}"
        self.end(name, "Failed" if exit_code else "Completed", failure if exit_code else "")

    def fail(self, name: str, reason: str) -> None:
        """SageMaker itself ends it, before or while it runs."""
        self.end(name, "Failed", reason)

    def interrupt(self, name: str) -> None:
        """Spot capacity is taken; the job comes back by itself."""
        self._move(self.jobs[name], "InProgress", "Interrupted")

    def end(self, name: str, status: str, failure: str = "", secondary: str = "") -> None:
        job = self.jobs[name]
        self._move(job, status, secondary or status)
        job["TrainingEndTime"] = self._now()
        if failure:
            job["FailureReason"] = failure[:1024]
        if "TrainingStartTime" in job:
            seconds = (job["TrainingEndTime"] - job["TrainingStartTime"]).total_seconds()
            job["BillableTimeInSeconds"] = max(1, round(seconds))

    def delete(self, name: str) -> None:
        assert self.jobs[name]["TrainingJobStatus"] in ENDED
        del self.jobs[name]

    # How.

    def count_call(self) -> None:
        """Of this service, or of one whose calls make the same time pass."""
        self.calls += 1

    def _api(self, operation: str, request: Request, work: Callable[[], Request]) -> Request:
        problems = [*request_problems("sagemaker", operation, request)]
        assert not problems, problems
        self.count_call()
        answer: Request = self.faults.run(operation, work)
        return answer

    def _create(self, request: Request) -> Request:
        name = request["TrainingJobName"]
        if name in self.jobs:
            raise refused("ResourceInUse", f"Training job names must be unique. {name}", "CreateTrainingJob")
        if self.quota is not None and len(self.live()) >= self.quota:
            raise refused(
                "ResourceLimitExceeded", "The account-level service limit is 0 Instances", "CreateTrainingJob"
            )
        self.on_create(request)
        self.created.append(request)
        kept = {key: value for key, value in request.items() if key != "Tags"}
        self.jobs[name] = kept | {"CreationTime": self._now(), "_visible": self.calls + self.lag}
        self._move(self.jobs[name], "InProgress", "Starting")
        return {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"}

    def _describe(self, name: str) -> Request:
        if name not in self.jobs or self.calls <= self.jobs[name]["_visible"]:
            raise refused("ValidationException", "Requested resource not found.", "DescribeTrainingJob")
        return {key: value for key, value in self.jobs[name].items() if key != "_visible"}

    def _stop(self, name: str) -> Request:
        if name not in self.jobs:
            raise refused("ValidationException", "Requested resource not found.", "StopTrainingJob")
        if self.jobs[name]["TrainingJobStatus"] in ENDED:
            text = f"The request was rejected because the training job is in status {name}."
            raise refused("ValidationException", text, "StopTrainingJob")
        self.stopped.append(name)
        self._move(self.jobs[name], "Stopping", "Stopping")
        return {}

    def _move(self, job: Request, status: str, secondary: str) -> None:
        job |= {"TrainingJobStatus": status, "SecondaryStatus": secondary, "LastModifiedTime": self._now()}

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)


def refused(code: str, message: str, operation: str) -> ClientError:
    return client_error(code, message, operation=operation)
