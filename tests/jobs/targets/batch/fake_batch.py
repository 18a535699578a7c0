"""AWS Batch in memory, behind boto3's client: what it refuses, lists, describes and forgets; nothing runs by itself.

`start`, `finish` and `settle` move jobs as Batch would.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import count

from tests.jobs.targets.faults import ACCOUNT, FakeService, Faults, Request, client_error

ENDED = ("SUCCEEDED", "FAILED")
ARN = f"arn:aws:batch:{ACCOUNT}"


class FakeBatch(FakeService):
    """One account and region with a fair-share queue `relevance`. `lag`: calls until a new job is listed and
    described. `clock`: seconds since 1970."""

    service = "batch"

    def __init__(self, clock: Callable[[], float], *, lag: int = 0, page: int = 2) -> None:
        self.clock, self.faults, self.lag, self.page = clock, Faults(), lag, page
        self.jobs: dict[str, Request] = {}
        self.definitions: list[Request] = []
        self.submitted: list[Request] = []
        shares = [{"shareIdentifier": one, "weightFactor": 1.0} for one in ("production", "experiment*")]
        self.policies = [{"arn": f"{ARN}:scheduling-policy/fair", "fairsharePolicy": {"shareDistribution": shares}}]
        usable = {"state": "ENABLED", "status": "VALID"}
        environment = {
            "computeEnvironmentName": "trn1",
            "computeEnvironmentArn": f"{ARN}:compute-environment/trn1",
            "type": "MANAGED",
            "computeResources": {"type": "EC2", "maxvCpus": 1280, "instanceTypes": ["trn1.32xlarge"]},
        }
        queue = {
            "jobQueueName": "relevance",
            "jobQueueArn": f"{ARN}:job-queue/relevance",
            "schedulingPolicyArn": self.policies[0]["arn"],
            "computeEnvironmentOrder": [{"order": 0, "computeEnvironment": environment["computeEnvironmentArn"]}],
        }
        self.environments: list[Request] = [environment | usable]
        self.queues: list[Request] = [queue | usable]
        self._ids, self._seen_at = count(1), dict[str, int]()

    # What happens to jobs.

    def start(self, job_id: str) -> None:
        job = self.jobs[job_id]
        job |= {"status": "RUNNING", "startedAt": self._now()}
        job["container"] = job.get("container", {}) | {"logStreamName": f"stream/{job_id}/{len(job['attempts'])}"}

    def finish(self, job_id: str, exit_code: int, *, retry: bool = False, reason: str = "") -> None:
        """An attempt ends; `retry`: another one follows."""
        job = self.jobs[job_id]
        container = {"exitCode": exit_code, "logStreamName": job["container"].get("logStreamName", "")}
        container |= {"reason": reason} if reason else {}
        ended = {"stoppedAt": self._now(), "statusReason": "Essential container in task exited"}
        job["attempts"].append({"startedAt": job["startedAt"], "container": container, **ended})
        job["status"] = "RUNNABLE" if retry else "SUCCEEDED" if exit_code == 0 else "FAILED"
        if not retry:
            job |= ended

    def settle(self) -> None:
        """Dependencies: what may start becomes RUNNABLE."""
        for job in self.jobs.values():
            if job["status"] in ("SUBMITTED", "PENDING") and "arrayProperties" not in job:
                states = {self.jobs[one["jobId"]]["status"] for one in job["dependsOn"]}
                job["status"] = "RUNNABLE" if states <= {"SUCCEEDED"} else "PENDING"

    def forget(self, job_id: str) -> None:
        """As after a week."""
        for one in [one for one in self.jobs if re.split("[:#]", one)[0] == job_id]:
            del self.jobs[one]

    def add(self, job: Request) -> None:
        self.jobs[job["jobId"]] = job
        self._seen_at[job["jobId"]] = self.calls + self.lag

    # How.

    def _register_job_definition(self, request: Request) -> Request:
        name = request["jobDefinitionName"]
        made = {"jobDefinitionName": name, "revision": 1 + sum(name in one.values() for one in self.definitions)}
        defaults = {"parameters": {}, "containerOrchestrationType": "ECS", "status": "ACTIVE"}
        self.definitions.append(defaults | json.loads(json.dumps(request)) | made)
        return made

    def _describe_job_definitions(self, request: Request) -> Request:
        found = [one for one in self.definitions if one["jobDefinitionName"] == request["jobDefinitionName"]]
        return self._page("jobDefinitions", found, request)

    def _submit_job(self, request: Request) -> Request:
        queue = [one for one in self.queues if one["jobQueueName"] == request["jobQueue"]]
        known = {f"{one['jobDefinitionName']}:{one['revision']}": one for one in self.definitions}
        waits_for = [one["jobId"] for one in request["dependsOn"]]
        size = request.get("arrayProperties", {}).get("size", 0)
        is_refused = (
            not queue
            or request["jobDefinition"] not in known
            or bool(queue[0]["schedulingPolicyArn"]) != ("shareIdentifier" in request)
            or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", request["jobName"])
            or size == 1
            or not {*waits_for} <= self.jobs.keys()
        )
        if is_refused:
            raise client_error("ClientException", "malformed, or something that does not exist", operation="SubmitJob")
        self.submitted.append(request)
        job_id = f"{next(self._ids):08x}-0000-4000-8000-000000000000"
        job = {
            "jobId": job_id,
            "jobName": request["jobName"],
            "jobQueue": queue[0]["jobQueueArn"],
            "status": "SUBMITTED",
            "createdAt": self._now(),
            "dependsOn": request["dependsOn"],
            "tags": request.get("tags", {}),
            "attempts": [],
        }
        self.add(job)
        definition = known[request["jobDefinition"]]
        if "nodeProperties" in definition:
            nodes = request["nodeOverrides"]["numNodes"]
            for i in range(nodes):
                self.add({**job, "jobId": f"{job_id}#{i}", "attempts": []})
            job["nodeProperties"] = definition["nodeProperties"] | {"numNodes": nodes}
        elif size:
            job["status"] = "PENDING"
            for i in range(size):
                child = {**job, "jobId": f"{job_id}:{i}", "attempts": [], "container": {}}
                self.add(child | {"arrayProperties": {"index": i}})
            job["arrayProperties"] = {"size": size}
        else:
            job["container"] = {}
        return {"jobId": job_id, "jobName": request["jobName"]}

    def _described(self, ids: list[str]) -> Iterator[Request]:
        yield from (self.jobs[one] for one in ids if one in self.jobs and self.calls > self._seen_at[one])

    def _describe_jobs(self, request: Request) -> Request:
        if not 1 <= len(request["jobs"]) <= 100:
            raise client_error("ClientException", "1 to 100 jobs")
        return {"jobs": [*self._described(request["jobs"])]}

    def _list_jobs(self, request: Request) -> Request:
        jobs = [one for one in self._described([*self.jobs]) if one["jobQueue"].endswith(f"/{request['jobQueue']}")]
        (only,) = request["filters"]
        found = [one for one in jobs if one[{"JOB_NAME": "jobName"}[only["name"]]].lower() == only["values"][0].lower()]
        fields = ("jobId", "jobName", "status", "createdAt")
        newest_first = sorted(found, key=lambda one: (-one["createdAt"], one["jobId"]))
        return self._page("jobSummaryList", [{name: one[name] for name in fields} for one in newest_first], request)

    def _terminate_job(self, request: Request) -> Request:
        for one, job in self.jobs.items():
            if re.split("[:#]", one)[0] == request["jobId"] and job["status"] not in ENDED:
                job |= {"status": "FAILED", "statusReason": request["reason"], "stoppedAt": self._now()}
        return {}

    def _describe_job_queues(self, request: Request) -> Request:
        found = [one for one in self.queues if {one["jobQueueName"], one["jobQueueArn"]} & {*request["jobQueues"]}]
        return self._page("jobQueues", found, request)

    def _describe_compute_environments(self, request: Request) -> Request:
        wanted = request["computeEnvironments"]
        found = [one for one in self.environments if one["computeEnvironmentArn"] in wanted]
        return self._page("computeEnvironments", found, request)

    def _describe_scheduling_policies(self, request: Request) -> Request:
        return {"schedulingPolicies": [one for one in self.policies if one["arn"] in request["arns"]]}

    def _page(self, members: str, found: list[Request], request: Request) -> Request:
        first = int(request.get("nextToken", 0))
        more = {"nextToken": str(first + self.page)} if len(found) > first + self.page else {}
        return {members: found[first : first + self.page], **more}

    def _now(self) -> int:
        return int(self.clock() * 1000)
