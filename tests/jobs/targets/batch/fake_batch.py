"""AWS Batch in memory, behind boto3's client: what it refuses, lists, describes and forgets; nothing runs by itself.

Requests are checked against botocore's model. `start`, `finish` and `settle` move jobs as Batch would.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any

from botocore.exceptions import ClientError
from botocore.model import ServiceModel
from botocore.session import Session
from botocore.validate import validate_parameters

from tests.jobs.targets.batch.faults import Faults

Request = dict[str, Any]
ENDED = ("SUCCEEDED", "FAILED")
ARN = "arn:aws:batch:us-east-1:123456789012"


def client_error(code: str, message: str = "", status: int = 400, operation: str = "") -> ClientError:
    answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)  # type: ignore[arg-type,unused-ignore]


@cache
def service() -> ServiceModel:
    return Session().get_service_model("batch")


class FakeBatch:
    """One account and region with a fair-share queue `relevance`. `lag`: calls until a new job is listed and
    described. `clock`: seconds since 1970."""

    def __init__(
        self, clock: Callable[[], float], *, faults: Faults | None = None, lag: int = 0, page: int = 2
    ) -> None:
        self.clock, self.faults, self.lag, self.page = clock, faults or Faults(), lag, page
        self.jobs: dict[str, Request] = {}
        self.definitions: list[Request] = []
        self.submitted: list[Request] = []
        self.policies = [self._policy("production", "experiment*")]
        self.environments = [self._environment("trn1", ["trn1.32xlarge"], 1280)]
        self.queues = [self._queue("relevance", self.policies[0]["arn"])]
        self._ids, self._seen_at, self._calls = count(1), dict[str, int](), 0

    # What boto3's client offers.

    def register_job_definition(self, **request: Any) -> Request:
        return self._api("RegisterJobDefinition", request, self._register)

    def describe_job_definitions(self, **request: Any) -> Request:
        def describe() -> Request:
            found = [one for one in self.definitions if one["jobDefinitionName"] == request["jobDefinitionName"]]
            return self._page("jobDefinitions", found, request)

        return self._api("DescribeJobDefinitions", request, describe)

    def submit_job(self, **request: Any) -> Request:
        return self._api("SubmitJob", request, lambda: self._submit(request))

    def describe_jobs(self, **request: Any) -> Request:
        if not 1 <= len(request["jobs"]) <= 100:
            raise client_error("ClientException", "1 to 100 jobs")
        return self._api("DescribeJobs", request, lambda: {"jobs": [*self._described(request["jobs"])]})

    def list_jobs(self, **request: Any) -> Request:
        return self._api("ListJobs", request, lambda: self._list(request))

    def terminate_job(self, **request: Any) -> Request:
        return self._api("TerminateJob", request, lambda: self._terminate(request["jobId"], request["reason"]))

    def describe_job_queues(self, **request: Any) -> Request:
        wanted = request["jobQueues"]
        found = [one for one in self.queues if one["jobQueueName"] in wanted or one["jobQueueArn"] in wanted]
        return self._api("DescribeJobQueues", request, lambda: self._page("jobQueues", found, request))

    def describe_compute_environments(self, **request: Any) -> Request:
        wanted = request["computeEnvironments"]
        found = [one for one in self.environments if one["computeEnvironmentArn"] in wanted]
        return self._api(
            "DescribeComputeEnvironments", request, lambda: self._page("computeEnvironments", found, request)
        )

    def describe_scheduling_policies(self, **request: Any) -> Request:
        found = [one for one in self.policies if one["arn"] in request["arns"]]
        return self._api("DescribeSchedulingPolicies", request, lambda: {"schedulingPolicies": found})

    # What happens to jobs.

    def job(self, name: str) -> Request:
        """The one live job of this name."""
        (found,) = [one for one in self.jobs.values() if one["jobName"] == name and one["status"] != "FAILED"]
        return found

    def start(self, job_id: str) -> None:
        job = self.jobs[job_id]
        job |= {"status": "RUNNING", "startedAt": self._now()}
        job["container"] = job.get("container", {}) | {"logStreamName": f"stream/{job_id}/{len(job['attempts'])}"}

    def finish(self, job_id: str, exit_code: int, *, retry: bool = False, reason: str = "") -> None:
        """An attempt ends; `retry`: another one follows."""
        job = self.jobs[job_id]
        container = {"exitCode": exit_code, "logStreamName": job["container"].get("logStreamName", "")}
        attempt = {
            "startedAt": job["startedAt"],
            "stoppedAt": self._now(),
            "statusReason": "Essential container in task exited",
        }
        job["attempts"].append(attempt | {"container": container | ({"reason": reason} if reason else {})})
        job["status"] = "RUNNABLE" if retry else "SUCCEEDED" if exit_code == 0 else "FAILED"
        if not retry:
            job |= {"stoppedAt": self._now(), "statusReason": attempt["statusReason"]}

    def settle(self) -> None:
        """Dependencies: what may start becomes RUNNABLE, what can never start fails."""
        for job in self.jobs.values():
            if job["status"] not in ("SUBMITTED", "PENDING") or "arrayProperties" in job:
                continue
            states = [self.jobs[one["jobId"]]["status"] for one in job["dependsOn"] if "jobId" in one]
            if "FAILED" in states:
                job |= {"status": "FAILED", "statusReason": "Dependent Job failed", "stoppedAt": self._now()}
            else:
                job["status"] = "RUNNABLE" if all(one == "SUCCEEDED" for one in states) else "PENDING"

    def forget(self, job_id: str) -> None:
        """As after a week."""
        for one in [one for one in self.jobs if re.split("[:#]", one)[0] == job_id]:
            del self.jobs[one]

    # How.

    def _api(self, operation: str, request: Request, work: Callable[..., Request]) -> Request:
        shape = service().operation_model(operation).input_shape
        assert shape is not None
        validate_parameters(request, shape)
        self._calls += 1
        answer = self.faults.run(operation, (lambda: work(request)) if work == self._register else work)
        return json.loads(json.dumps(answer))  # type: ignore[no-any-return]

    def _register(self, request: Request) -> Request:
        name = request["jobDefinitionName"]
        revision = 1 + sum(one["jobDefinitionName"] == name for one in self.definitions)
        made = {"jobDefinitionArn": f"{ARN}:job-definition/{name}:{revision}", "revision": revision, "status": "ACTIVE"}
        empty = {"parameters": {}, "containerOrchestrationType": "ECS"}
        self.definitions.append(empty | json.loads(json.dumps(request)) | made)
        return {"jobDefinitionName": name, "revision": revision, "jobDefinitionArn": made["jobDefinitionArn"]}

    def _submit(self, request: Request) -> Request:
        queue = [one for one in self.queues if one["jobQueueName"] == request["jobQueue"]]
        known = {f"{one['jobDefinitionName']}:{one['revision']}": one for one in self.definitions}
        waits_for = [one["jobId"] for one in request.get("dependsOn", ()) if "jobId" in one]
        size = request.get("arrayProperties", {}).get("size", 0)
        if not queue or request["jobDefinition"] not in known:
            raise client_error("ClientException", "queue or definition does not exist", operation="SubmitJob")
        if bool(queue[0]["schedulingPolicyArn"]) != ("shareIdentifier" in request):
            raise client_error("ClientException", "shareIdentifier", operation="SubmitJob")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", request["jobName"]) or len(waits_for) > 20 or size == 1:
            raise client_error("ClientException", "malformed", operation="SubmitJob")
        if not all(one in self.jobs for one in waits_for):
            raise client_error("ClientException", "unknown dependency", operation="SubmitJob")
        self.submitted.append(request)
        job_id = f"{next(self._ids):08x}-0000-4000-8000-000000000000"
        job = {
            "jobId": job_id,
            "jobName": request["jobName"],
            "jobQueue": queue[0]["jobQueueArn"],
            "jobDefinition": f"{ARN}:job-definition/{request['jobDefinition']}",
            "status": "SUBMITTED",
            "createdAt": self._now(),
            "dependsOn": request.get("dependsOn", []),
            "tags": request.get("tags", {}),
            "attempts": [],
        }
        self._add(job)
        definition = known[request["jobDefinition"]]
        if "nodeProperties" in definition:
            nodes = request.get("nodeOverrides", {}).get("numNodes", definition["nodeProperties"]["numNodes"])
            job["nodeProperties"] = definition["nodeProperties"] | {"numNodes": nodes}
            for i in range(nodes):
                self._add({**job, "jobId": f"{job_id}#{i}", "attempts": []}, is_part=True)
        elif size:
            job |= {"arrayProperties": {"size": size}, "status": "PENDING"}
            for i in range(size):
                child = {**job, "jobId": f"{job_id}:{i}", "attempts": [], "container": {}, "status": "PENDING"}
                self._add(child | {"arrayProperties": {"index": i}}, is_part=True)
        else:
            job["container"] = {}
        return {"jobId": job_id, "jobName": request["jobName"]}

    def _add(self, job: Request, *, is_part: bool = False) -> None:
        if is_part:
            job.pop("nodeProperties", None)
        self.jobs[job["jobId"]] = job
        self._seen_at[job["jobId"]] = self._calls + self.lag

    def _described(self, ids: list[str]) -> Iterator[Request]:
        yield from (self.jobs[one] for one in ids if one in self.jobs and self._calls > self._seen_at[one])

    def _list(self, request: Request) -> Request:
        jobs = [one for one in self._described([*self.jobs]) if one["jobQueue"].endswith(f"/{request['jobQueue']}")]
        (only,) = request["filters"]
        assert only["name"] == "JOB_NAME"
        found = [one for one in jobs if one["jobName"].lower() == only["values"][0].lower()]
        fields = ("jobId", "jobName", "status", "createdAt")
        newest_first = sorted(found, key=lambda one: (-one["createdAt"], one["jobId"]))
        return self._page("jobSummaryList", [{name: one[name] for name in fields} for one in newest_first], request)

    def _terminate(self, job_id: str, reason: str) -> Request:
        for one, job in self.jobs.items():
            if re.split("[:#]", one)[0] == job_id and job["status"] not in ENDED:
                job |= {"status": "FAILED", "statusReason": reason, "stoppedAt": self._now()}
        return {}

    def _page(self, members: str, found: list[Request], request: Request) -> Request:
        first = int(request.get("nextToken", 0))
        more = {"nextToken": str(first + self.page)} if len(found) > first + self.page else {}
        return {members: found[first : first + self.page], **more}

    def _now(self) -> int:
        return int(self.clock() * 1000)

    def _policy(self, *shares: str) -> Request:
        distribution = [{"shareIdentifier": one, "weightFactor": 1.0} for one in shares]
        arn = f"{ARN}:scheduling-policy/fair"
        return {"arn": arn, "name": "fair", "fairsharePolicy": {"shareDistribution": distribution}}

    def _environment(self, name: str, kinds: list[str], max_vcpus: int) -> Request:
        return {
            "computeEnvironmentName": name,
            "computeEnvironmentArn": f"{ARN}:compute-environment/{name}",
            "type": "MANAGED",
            "state": "ENABLED",
            "status": "VALID",
            "computeResources": {"type": "EC2", "maxvCpus": max_vcpus, "instanceTypes": kinds},
        }

    def _queue(self, name: str, policy: str) -> Request:
        order = [
            {"order": i, "computeEnvironment": one["computeEnvironmentArn"]} for i, one in enumerate(self.environments)
        ]
        return {
            "jobQueueName": name,
            "jobQueueArn": f"{ARN}:job-queue/{name}",
            "state": "ENABLED",
            "status": "VALID",
            "schedulingPolicyArn": policy,
            "computeEnvironmentOrder": order,
        }
