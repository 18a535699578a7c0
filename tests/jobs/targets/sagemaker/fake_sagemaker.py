"""SageMaker in memory, behind boto3's client, and service jobs of AWS Batch over it; nothing runs by itself.

`start`, `finish`, `end` and `delete` move training jobs as SageMaker, its Spot capacity and people at a console would.
`dispatch` hands a service job over to SageMaker, `fall_back` takes it back for want of capacity, and `settle` lets
Batch see what became of training jobs: it tries again by the rules of each service job.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count

from botocore.exceptions import ClientError

from jobs.targets.sagemaker.requests import RECEIVED, request_problems
from tests.jobs.targets.batch.fake_batch import ARN
from tests.jobs.targets.faults import ACCOUNT, FakeService, Faults, Request, client_error

ENDED, OVER = ("Completed", "Failed", "Stopped"), ("SUCCEEDED", "FAILED")
WAITING, WITH_SAGEMAKER = ("SUBMITTED", "RUNNABLE"), ("SCHEDULED", "STARTING", "RUNNING")
TRAINING_JOB = f"arn:aws:sagemaker:{ACCOUNT}:training-job"


class FakeSageMaker(FakeService):
    """One account and region. `lag`: calls until a new job is described. `quota`: jobs that may live at once."""

    service = "sagemaker"

    def __init__(self, clock: Callable[[], float], *, lag: int = 0) -> None:
        self.clock, self.faults, self.lag, self.quota = clock, Faults(), lag, 10**9
        self.jobs: dict[str, Request] = {}
        self.created: list[Request] = []
        """Every request that made a job."""
        self.stopped: list[str] = []
        self.on_create: Callable[[Request], object] = lambda request: None

    # What happens to training jobs.

    def live(self) -> list[str]:
        return [name for name, job in self.jobs.items() if job["TrainingJobStatus"] not in ENDED]

    def start(self, name: str) -> None:
        self.jobs[name].setdefault("TrainingStartTime", self._now())
        self.move(name, "InProgress", "Training")

    def finish(self, name: str, exit_code: int, said: str = "") -> None:
        """Its entry has ended; `said`: what stands in the failure file behind the code."""
        self.start(name)
        failure = f"AlgorithmError: exit {exit_code} {said}, exit code: {exit_code}"
        self.end(name, "Failed" if exit_code else "Completed", failure if exit_code else "")

    def end(self, name: str, status: str, failure: str = "", secondary: str = "") -> None:
        job = self.jobs[name]
        self.move(name, status, secondary)
        job["TrainingEndTime"] = self._now()
        if failure:
            job["FailureReason"] = failure[:1024]
        if "TrainingStartTime" in job:
            seconds = (job["TrainingEndTime"] - job["TrainingStartTime"]).total_seconds()
            job["BillableTimeInSeconds"] = max(1, round(seconds))

    def move(self, name: str, status: str, secondary: str = "") -> None:
        now = {"TrainingJobStatus": status, "SecondaryStatus": secondary or status, "LastModifiedTime": self._now()}
        self.jobs[name] |= now

    def stop_training(self, name: str) -> None:
        self.move(name, "Stopping")

    def delete(self, name: str) -> None:
        assert self.jobs[name]["TrainingJobStatus"] in ENDED
        del self.jobs[name]

    # How.

    def _create_training_job(self, request: Request) -> Request:
        name, operation = request["TrainingJobName"], "CreateTrainingJob"
        if name in self.jobs:
            raise refused("ResourceInUse", f"Training job names must be unique. {name}", operation)
        if len(self.live()) >= self.quota:
            raise refused("ResourceLimitExceeded", "The account-level service limit is 0 Instances", operation)
        self.on_create(request)
        self.created.append(request)
        self.make(request, visible=self.calls + self.lag)
        return {"TrainingJobArn": f"{TRAINING_JOB}/{name}"}

    def make(self, request: Request, *, visible: int) -> None:
        kept = {key: value for key, value in request.items() if key != "Tags"}
        self.jobs[request["TrainingJobName"]] = kept | {"CreationTime": self._now(), "_visible": visible}
        self.move(request["TrainingJobName"], "InProgress", "Starting")

    def _describe_training_job(self, request: Request) -> Request:
        job = self.jobs.get(request["TrainingJobName"])
        if job is None or self.calls <= job["_visible"]:
            raise refused("ValidationException", "Requested resource not found.", "DescribeTrainingJob")
        return {key: value for key, value in job.items() if key != "_visible"}

    def _stop_training_job(self, request: Request) -> Request:
        name = request["TrainingJobName"]
        if name not in self.jobs or self.calls <= self.jobs[name].get("_visible", 0):
            raise refused("ValidationException", "Requested resource not found.", "StopTrainingJob")
        if self.jobs[name]["TrainingJobStatus"] in ENDED:
            text = f"The request was rejected because the training job is in status {name}."
            raise refused("ValidationException", text, "StopTrainingJob")
        self.stopped.append(name)
        self.stop_training(name)
        return {}

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)


class FakeServiceJobs(FakeService):
    """One account with a fair-share queue `ml`. Faults, calls, lag and clock are those of `ml`.

    `rejects_twins`: the second of two equal requests is rejected, else answered as the first.
    """

    service = "batch"

    def __init__(self, ml: FakeSageMaker) -> None:
        self.ml, self.rejects_twins = ml, True
        self.jobs: dict[str, Request] = {}
        self.submitted: list[Request] = []
        """Every request that made a job."""
        self.tries: dict[str, tuple[str, int]] = {}
        """Of training jobs by name: which service job, and which try of it."""
        self.on_submit: Callable[[Request], object] = lambda request: None
        self.queue: Request = {
            "jobQueueName": "ml",
            "jobQueueArn": f"{ARN}:job-queue/ml",
            "jobQueueType": "SAGEMAKER_TRAINING",
            "state": "ENABLED",
            "status": "VALID",
            "schedulingPolicyArn": f"{ARN}:scheduling-policy/fair",
        }
        self._numbers = count(1)

    @property
    def faults(self) -> Faults:  # type: ignore[override]
        return self.ml.faults

    def _count_call(self) -> None:
        self.ml.calls += 1

    # What happens to service jobs.

    def waiting(self) -> list[Request]:
        return [one for one in self.jobs.values() if one["status"] in WAITING]

    def dispatch(self, job: Request) -> str:
        """To SageMaker; the name of the training job."""
        payload = json.loads(job["serviceRequestPayload"])
        name = f"AWSBatch{payload['TrainingJobName']}{next(self._numbers):032x}"
        request = payload | {"TrainingJobName": name}
        assert not [*request_problems("sagemaker", "CreateTrainingJob", request)]
        self.ml.make(request, visible=0)  # long before anybody else hears of it
        self.tries[name] = (job["jobId"], len(job["attempts"]) + 1)
        resource = {"name": "TrainingJobArn", "value": f"{TRAINING_JOB}/{name}"}
        job |= {"status": "SCHEDULED", "latestAttempt": {"serviceResourceId": resource}}
        job.pop("statusReason", None)
        return name

    def fall_back(self, job: Request) -> None:
        """No capacity: back to the queue, which costs no try."""
        self.ml.end(_name(job["latestAttempt"]), "Stopped")
        self.queue_again(job)

    @staticmethod
    def queue_again(job: Request) -> None:
        job |= {"status": "RUNNABLE", "statusReason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"}

    def preempt(self, job: Request) -> None:
        """For a job of higher priority: back to the queue. The attempt is only listed among the preempted ones."""
        self.ml.end(_name(job["latestAttempt"]), "Stopped")
        self.count_preemption(job)

    def count_preemption(self, job: Request) -> None:
        limit = job["preemptionConfiguration"]["preemptionRetriesBeforeTermination"]
        summary = job.setdefault("preemptionSummary", {"preemptedAttemptCount": 0, "recentPreemptedAttempts": []})
        summary["preemptedAttemptCount"] += 1
        attempt = {**job["latestAttempt"], "startedAt": self._now(), "stoppedAt": self._now()}
        attempt["statusReason"] = "Preempted by a job with a higher priority"
        summary["recentPreemptedAttempts"] = [*summary["recentPreemptedAttempts"], attempt][-2:]
        is_over = summary["preemptedAttemptCount"] > limit
        job |= {"status": "FAILED" if is_over else "RUNNABLE", "statusReason": "preempted"}

    def settle(self) -> None:
        for job in self.jobs.values():
            if job["status"] in WITH_SAGEMAKER:
                self.look(job, self.ml.jobs[_name(job["latestAttempt"])])

    def look(self, job: Request, training: Request) -> None:
        """See what became of the training job of the latest attempt."""
        if training["TrainingJobStatus"] in ENDED:
            self._try_ended(job, training)
        elif "TrainingStartTime" in training:
            job |= {"status": "RUNNING"}
            job.setdefault("startedAt", self._now())

    # How.

    def _submit_service_job(self, request: Request) -> Request:
        for job in self.jobs.values():
            if job["_token"] == request["clientToken"]:
                if self.rejects_twins:
                    raise _refused("The request has a client token that was used before", "SubmitServiceJob")
                return {"jobName": job["jobName"], "jobId": job["jobId"]}
        assert (request["jobQueue"], "shareIdentifier" in request) == ("ml", "quotaShareName" not in request)
        assert len(request["serviceRequestPayload"]) <= 10 * 1024
        self.on_submit(request)
        self.submitted.append(request)
        job_id = f"{next(self._numbers):08x}-0000-4000-8000-000000000000"
        names = ("jobName", "serviceRequestPayload", "retryStrategy", "preemptionConfiguration", "tags")
        kept = {name: request[name] for name in names if name in request}
        self.jobs[job_id] = kept | {
            "jobId": job_id,
            "jobQueue": self.queue["jobQueueArn"],
            "serviceJobType": request["serviceJobType"],
            "status": "SUBMITTED",
            "createdAt": self._now(),
            "startedAt": 0,
            "attempts": [],
            "_token": request["clientToken"],
            "_visible": self.ml.calls + self.ml.lag,
        }
        return {"jobName": request["jobName"], "jobId": job_id}

    def _describe_service_job(self, request: Request) -> Request:
        job = self.jobs.get(request["jobId"])
        if job is None or self.ml.calls <= job["_visible"]:
            raise _refused(f"Service job {request['jobId']} does not exist", "DescribeServiceJob")
        return {name: value for name, value in job.items() if name[0] != "_"}

    def _list_service_jobs(self, request: Request) -> Request:
        (only,) = request["filters"]
        (name,) = only["values"]
        listed = [one for one in self.jobs.values() if self.ml.calls > one["_visible"]]
        found = [one for one in listed if one[{"JOB_NAME": "jobName"}[only["name"]]].lower() == name.lower()]
        fields = ("jobId", "jobName", "status", "createdAt", "serviceJobType")
        return {"jobSummaryList": [{key: one[key] for key in fields} for one in found]}

    def _terminate_service_job(self, request: Request) -> Request:
        job, reason = self.jobs[request["jobId"]], request["reason"]
        if job["status"] in WAITING:
            job |= {"status": "FAILED", "statusReason": reason, "stoppedAt": self._now(), "isTerminated": True}
        elif job["status"] not in OVER:
            job |= {"isTerminated": True, "_reason": reason}
            self.ml.stop_training(_name(job["latestAttempt"]))
        return {}

    def _describe_job_queues(self, request: Request) -> Request:
        return {"jobQueues": [self.queue] if self.queue["jobQueueName"] in request["jobQueues"] else []}

    def _describe_scheduling_policies(self, request: Request) -> Request:
        share = {"shareIdentifier": "production", "weightFactor": 1.0}
        policies = [{"arn": arn, "fairsharePolicy": {"shareDistribution": [share]}} for arn in request["arns"]]
        return {"schedulingPolicies": policies}

    def _try_ended(self, job: Request, training: Request) -> None:
        status, now = training["TrainingJobStatus"], self._now()
        said = {"Completed": "Training job completed", "Stopped": "Training job stopped"}.get(status)
        reason = str(job.get("_reason") or RECEIVED + str(said or training.get("FailureReason", "")))
        times = {"startedAt": job["startedAt"] or now, "stoppedAt": now}
        job["attempts"].append({**job["latestAttempt"], "statusReason": reason, **times})
        if status != "Completed" and "_reason" not in job and self.tries_again(job, reason):
            job |= {"status": "RUNNABLE"}
        else:
            end = "SUCCEEDED" if status == "Completed" else "FAILED"
            job |= {"status": end, "statusReason": reason, "stoppedAt": now}

    @staticmethod
    def tries_again(job: Request, reason: str) -> bool:
        """As the user guide says: the first rule that matches; a trailing * matches any rest, capital letters count."""
        strategy = job["retryStrategy"]
        if len(job["attempts"]) >= strategy["attempts"]:
            return False
        for rule in strategy["evaluateOnExit"]:
            pattern = rule["onStatusReason"]
            if reason == pattern or (pattern.endswith("*") and reason.startswith(pattern[:-1])):
                return bool(rule["action"] == "RETRY")
        return True

    def _now(self) -> int:
        return int(self.ml.clock() * 1000)


def _name(attempt: Request) -> str:
    return str(attempt["serviceResourceId"]["value"]).rpartition("/")[2]


def _refused(message: str, operation: str) -> ClientError:
    return client_error("ClientException", message, operation=operation)


def refused(code: str, message: str, operation: str) -> ClientError:
    return client_error(code, message, operation=operation)
