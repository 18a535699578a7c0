"""Service jobs of AWS Batch in memory, behind boto3's client, over a fake of SageMaker; nothing runs by itself.

`dispatch` hands a service job over to SageMaker, `fall_back` takes it back for want of capacity, and `settle` lets
Batch see what became of training jobs: it tries again by the rules of each service job.
"""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

from botocore.exceptions import ClientError

from jobs.targets.sagemaker.requests import request_problems
from tests.jobs.targets.batch.fake_batch import ARN, client_error
from tests.jobs.targets.sagemaker.fake_sagemaker import ENDED, FakeSageMaker

Request = dict[str, Any]
OVER = ("SUCCEEDED", "FAILED")
RECEIVED = "Received status from SageMaker: "


class FakeServiceJobs:
    """One account with a fair-share queue `ml`. Faults, lag and clock are those of `ml`.

    `rejects_twins`: the second of two equal requests is rejected, else answered as the first.
    """

    def __init__(self, ml: FakeSageMaker, *, rejects_twins: bool = True) -> None:
        self.ml, self.rejects_twins = ml, rejects_twins
        self.jobs: dict[str, Request] = {}
        self.submitted: list[Request] = []
        """Every request that made a job."""
        self.tries: dict[str, tuple[str, int]] = {}
        """Of training jobs by name: which service job, and which try of it."""
        self.on_submit: Callable[[Request], object] = lambda request: None
        self.policies: list[Request] = [
            {"arn": f"{ARN}:scheduling-policy/fair", "fairsharePolicy": {"shareDistribution": [PRODUCTION]}}
        ]
        self.queue: Request = {
            "jobQueueName": "ml",
            "jobQueueArn": f"{ARN}:job-queue/ml",
            "jobQueueType": "SAGEMAKER_TRAINING",
            "state": "ENABLED",
            "status": "VALID",
            "schedulingPolicyArn": self.policies[0]["arn"],
        }
        self._numbers, self._visible = count(1), dict[str, int]()

    # What boto3's client offers.

    def submit_service_job(self, **request: Any) -> Request:
        return self._api("SubmitServiceJob", request, lambda: self._submit(request))

    def describe_service_job(self, **request: Any) -> Request:
        return self._api("DescribeServiceJob", request, lambda: self._describe(request["jobId"]))

    def list_service_jobs(self, **request: Any) -> Request:
        return self._api("ListServiceJobs", request, lambda: self._list(request))

    def terminate_service_job(self, **request: Any) -> Request:
        return self._api("TerminateServiceJob", request, lambda: self._terminate(request["jobId"], request["reason"]))

    def describe_job_queues(self, **request: Any) -> Request:
        found = [self.queue] if self.queue["jobQueueName"] in request["jobQueues"] else []
        return self._api("DescribeJobQueues", request, lambda: {"jobQueues": found})

    def describe_scheduling_policies(self, **request: Any) -> Request:
        found = [one for one in self.policies if one["arn"] in request["arns"]]
        return self._api("DescribeSchedulingPolicies", request, lambda: {"schedulingPolicies": found})

    # What happens to service jobs.

    def job(self, name: str) -> Request:
        """The one service job whose name has this in it."""
        (found,) = [one for one in self.jobs.values() if name in one["jobName"]]
        return found

    def waiting(self) -> list[Request]:
        return [one for one in self.jobs.values() if one["status"] in ("SUBMITTED", "RUNNABLE")]

    def dispatch(self, job: Request) -> str:
        """To SageMaker; the name of the training job."""
        payload = json.loads(job["serviceRequestPayload"])
        name = f"AWSBatch{payload['TrainingJobName']}{next(self._numbers):032x}"
        request = payload | {"TrainingJobName": name}
        assert not [*request_problems("sagemaker", "CreateTrainingJob", request)]
        self.ml._create(request)
        self.ml.jobs[name]["_visible"] = 0  # long before anybody else hears of it
        self.tries[name] = (job["jobId"], len(job["attempts"]) + 1)
        job |= {"status": "SCHEDULED", "latestAttempt": {"serviceResourceId": _resource(name)}}
        job.pop("statusReason", None)
        return name

    def fall_back(self, job: Request) -> None:
        """No capacity: back to the queue, which costs no try."""
        name = _name(job["latestAttempt"])
        self.ml.end(name, "Stopped")
        job |= {"status": "RUNNABLE", "statusReason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"}

    def settle(self) -> None:
        for job in self.jobs.values():
            if job["status"] not in ("SCHEDULED", "STARTING", "RUNNING"):
                continue
            training = self.ml.jobs[_name(job["latestAttempt"])]
            if training["TrainingJobStatus"] in ENDED:
                self._try_ended(job, training)
            elif "TrainingStartTime" in training:
                job |= {"status": "RUNNING"}
                job.setdefault("startedAt", self._now())

    # How.

    def _api(self, operation: str, request: Request, work: Callable[[], Request]) -> Request:
        problems = [*request_problems("batch", operation, request)]
        assert not problems, problems
        self.ml.count_call()
        answer: Request = self.ml.faults.run(operation, work)
        return json.loads(json.dumps(answer))  # type: ignore[no-any-return]

    def _submit(self, request: Request) -> Request:
        for job in self.jobs.values():
            if job["_token"] == request["clientToken"]:
                if self.rejects_twins:
                    raise _refused("The request has a client token that was used before", "SubmitServiceJob")
                return {"jobName": job["jobName"], "jobId": job["jobId"]}
        if self.queue["jobQueueName"] != request["jobQueue"] or "shareIdentifier" not in request:
            raise _refused("JobQueue or share identifier", "SubmitServiceJob")
        assert len(request["serviceRequestPayload"]) <= 10 * 1024
        self.on_submit(request)
        self.submitted.append(request)
        job_id = f"{next(self._numbers):08x}-0000-4000-8000-000000000000"
        kept = {name: request[name] for name in ("jobName", "serviceRequestPayload", "retryStrategy", "tags")}
        self.jobs[job_id] = kept | {
            "jobId": job_id,
            "jobQueue": self.queue["jobQueueArn"],
            "serviceJobType": request["serviceJobType"],
            "status": "SUBMITTED",
            "createdAt": self._now(),
            "startedAt": 0,
            "attempts": [],
            "_token": request["clientToken"],
        }
        self._visible[job_id] = self.ml.calls + self.ml.lag
        return {"jobName": request["jobName"], "jobId": job_id}

    def _describe(self, job_id: str) -> Request:
        if job_id not in self.jobs or self.ml.calls <= self._visible[job_id]:
            raise _refused(f"Service job {job_id} does not exist", "DescribeServiceJob")
        return {name: value for name, value in self.jobs[job_id].items() if name[0] != "_"}

    def _list(self, request: Request) -> Request:
        (only,) = request["filters"]
        (name,) = only["values"]
        assert only["name"] == "JOB_NAME"
        listed = [one for one in self.jobs.values() if self.ml.calls > self._visible[one["jobId"]]]
        fields = ("jobId", "jobName", "status", "createdAt", "serviceJobType")
        found = [{key: one[key] for key in fields} for one in listed if one["jobName"].lower() == name.lower()]
        return {"jobSummaryList": found}

    def _terminate(self, job_id: str, reason: str) -> Request:
        job = self.jobs[job_id]
        if job["status"] in ("SUBMITTED", "RUNNABLE"):
            job |= {"status": "FAILED", "statusReason": reason, "stoppedAt": self._now(), "isTerminated": True}
        elif job["status"] not in OVER:
            job |= {"isTerminated": True, "_reason": reason}
            self.ml._move(self.ml.jobs[_name(job["latestAttempt"])], "Stopping", "Stopping")
        return {}

    def _try_ended(self, job: Request, training: Request) -> None:
        status = training["TrainingJobStatus"]
        said: Request = {"Completed": "Training job completed", "Stopped": "Training job stopped"}
        reason = str(job.get("_reason") or RECEIVED + str(said.get(status) or training.get("FailureReason", "")))
        times = {"startedAt": job["startedAt"] or self._now(), "stoppedAt": self._now()}
        job["attempts"].append({**job["latestAttempt"], "statusReason": reason, **times})
        if status == "Completed":
            job |= {"status": "SUCCEEDED", "statusReason": reason, "stoppedAt": self._now()}
        elif "_reason" not in job and self.tries_again(job, reason):
            job |= {"status": "RUNNABLE"}
        else:
            job |= {"status": "FAILED", "statusReason": reason, "stoppedAt": self._now()}

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


PRODUCTION = {"shareIdentifier": "production", "weightFactor": 1.0}


def _resource(name: str) -> Request:
    return {"name": "TrainingJobArn", "value": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"}


def _name(attempt: Request) -> str:
    return str(attempt["serviceResourceId"]["value"]).rpartition("/")[2]


def _refused(message: str, operation: str) -> ClientError:
    return client_error("ClientException", message, operation=operation)
