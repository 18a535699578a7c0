"""AWS Batch in memory, which also runs the jobs: queues, machines, dependencies, retries and time limits.

`Platform` is what it shares with the simulation of SageMaker.

The requests and their answers are those of the fake that the tests of the target use. What is added here is time: a new
job is listed and described only after a while, waits for a machine, and its container is a simulated process.
"""

import re
from collections.abc import Callable
from random import Random
from typing import Any

from jobs.cycle.job_states import EXITED, TASK_NOT_STARTED, TIMED_OUT
from tests.jobs.targets.batch.fake_batch import ENDED, FakeBatch
from tests.jobs.targets.faults import Request
from tests.simulation.faults import Service
from tests.simulation.world import Process

MACHINE_S = (40.0, 300.0)
"""Seconds until a runnable job has a machine and its container runs."""
GRACE_S = 30.0
CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity request for instance type"
MISCONFIGURED = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement is too high for the CE"
Container = Callable[[Request, int], Callable[[Process], int | None]]
"""Returns the work of the container for the description of a task and the number of its attempt."""


class Platform:
    """A service that runs jobs in the world, behind boto3's client.

    `jobs` contains all tasks in the form of AWS Batch, `processes` the containers that run, and `target` is the name of
    the product's target for this service.
    """

    target: str
    jobs: dict[str, Request]

    def __init__(self, service: Service, container: Container) -> None:
        self.world, self.calls_to, self._container = service.world, service, container
        self.rng: Random = self.world.faults_rng
        self._shown_at, self.processes = dict[str, float](), dict[str, Process]()
        self.submitters = dict[str, Process | None]()
        """The process that has submitted each job."""
        self.on_submit: Callable[[Request], object] = lambda job: None
        self.on_start: Callable[[Request], object] = lambda job: None
        self.on_end: Callable[[Request], object] = lambda job: None

    def __getattr__(self, name: str) -> Callable[..., Request]:
        if name.startswith("_"):
            raise AttributeError(name)
        work = getattr(self, f"_{name}")

        def call(**request: Any) -> Request:
            what = next((request[key] for key in ("jobName", "jobId", "TrainingJobName") if key in request), "")
            answer: Request = self.calls_to.request(name, what, lambda: work(request))
            return answer

        setattr(self, name, call)
        return call

    def show_later(self, job_id: str) -> None:
        """Let a job that the current process has submitted be listed and described only after a while."""
        self.submitters[job_id] = self.world.current
        self._shown_at[job_id] = self.world.now + self.calls_to.weather.lag_s * self.world.rng.random()

    def is_shown(self, job_id: str) -> bool:
        return self.world.now >= self._shown_at[job_id]

    def has_fault(self, kind: str, job: Request) -> bool:
        weather = self.calls_to.weather
        return weather.happens(self.world, f"{kind} of {job['tags']['job']}", weather.jobs.get(kind, 0.0))

    def run(self, job: Request, attempt: int, on_exit: Callable[[Process, int | None], object]) -> Process:
        """Start the container of a task."""
        job_id, index = job["jobId"], job.get("arrayProperties", {}).get("index")

        def exited(code: int | None) -> None:
            del self.processes[job_id]
            on_exit(process, code)

        process = self.processes[job_id] = Process(
            f"{job['tags']['job']}{'' if index is None else f':{index}'}-{attempt}",
            self._container(job, attempt),
            on_exit=exited,
            skew_s=self.rng.uniform(-2, 2),
            is_node=True,
        )
        self.world.start(process)
        return process

    def stop(self, process: Process, grace_s: float) -> None:
        process.stop.set("SIGTERM")
        self.world.at(grace_s, lambda: self.world.kill(process))


class SimulatedBatch(Platform, FakeBatch):
    """One account with a fair-share queue, whose jobs run in the world."""

    target = "batch"

    def __init__(self, service: Service, container: Container) -> None:
        Platform.__init__(self, service, container)
        FakeBatch.__init__(self, lambda: service.world.now, page=service.weather.page_size)
        self._named, self._strategies = dict[str, list[str]](), dict[str, Request]()

    # Requests.

    def add(self, job: Request) -> None:
        self.jobs[job["jobId"]] = job
        self._named.setdefault(job["jobName"], []).append(job["jobId"])
        self.show_later(job["jobId"])

    def _list_jobs(self, request: Request) -> Request:
        (name,) = request["filters"][0]["values"]
        found = [*self._described(self._named.get(name, []))][::-1]
        fields = ("jobId", "jobName", "status", "createdAt")
        return self._page("jobSummaryList", [{field: job[field] for field in fields} for job in found], request)

    def _described(self, ids: list[str]) -> Any:
        yield from (self.jobs[one] for one in ids if one in self.jobs and self.is_shown(one))

    def _submit_job(self, request: Request) -> Request:
        answer = super()._submit_job(request)
        job = self.jobs[answer["jobId"]]
        definition = next(
            one
            for one in self.definitions
            if f"{one['jobDefinitionName']}:{one['revision']}" == request["jobDefinition"]
        )
        self._strategies[job["jobId"]] = {"retry": definition["retryStrategy"], **definition["timeout"]}
        self.on_submit(job)
        self.world.at(1.0, self.settle)
        return answer

    def _terminate_job(self, request: Request) -> Request:
        if self.jobs[request["jobId"]]["status"] not in ENDED:
            self.jobs[request["jobId"]]["isTerminated"] = True  # the parent of an array waits for its children
        for job in self._tasks(request["jobId"]):
            if job["status"] not in ENDED:
                job |= {"isTerminated": True, "_reason": request["reason"]}
                if process := self.processes.get(job["jobId"]):
                    self.stop(process, GRACE_S)
                else:
                    self._fail(job, request["reason"])
        self.settle()
        return {}

    # What happens by itself.

    def settle(self) -> None:
        """Let jobs follow their dependencies, and parents of arrays their children."""
        for job in self.jobs.values():
            if job["status"] in ENDED or {":", "#"} & {*job["jobId"]}:
                continue
            children = self._tasks(job["jobId"])
            if children[0] is not job:
                states = {child["status"] for child in children}
                if states <= {*ENDED}:
                    job |= {"status": "FAILED" if "FAILED" in states else "SUCCEEDED", "stoppedAt": self._now()}
                    if "FAILED" in states:
                        job["statusReason"] = "Array Child Job failed"
                    self.world.at(1.0, self.settle)
                    self.on_end(job)
                    continue
            if job["status"] not in ("SUBMITTED", "PENDING"):
                continue
            states = {self.jobs[one["jobId"]]["status"] for one in job["dependsOn"]}
            if "FAILED" in states:
                for child in children:
                    if child["status"] not in ENDED:
                        self._fail(child, "Dependent Job failed")
                self.world.at(1.0, self.settle)
            elif states <= {"SUCCEEDED"}:
                job["status"] = "RUNNABLE" if children[0] is job else "PENDING"
                for child in children:
                    if child["status"] in ("SUBMITTED", "PENDING", "RUNNABLE") and "_queued" not in child:
                        self._queue(child)
            elif children[0] is job:
                job["status"] = "PENDING"

    def _queue(self, job: Request) -> None:
        """Let a task wait for a machine."""
        job |= {"status": "RUNNABLE", "_queued": True}
        low, high = MACHINE_S
        wait_s = low * (high / low) ** self.rng.random()
        if self.has_fault("no_capacity", job):
            job["statusReason"], wait_s = CAPACITY, wait_s + 3600 * self.rng.random()
        elif self.has_fault("misconfigured", job):
            job["statusReason"], wait_s = MISCONFIGURED, wait_s + 7200 * self.rng.random()
        self.world.at(wait_s, lambda: self._start(job))

    def _start(self, job: Request) -> None:
        if job["status"] != "RUNNABLE":
            return
        job_id, number = job["jobId"], len(job["attempts"]) + 1
        job.pop("statusReason", None)
        if self.has_fault("no_start", job):
            self._attempt_ended(job, None, f"{TASK_NOT_STARTED}: CannotPullContainerError")
            return
        self.on_start(job)
        self.start(job_id)
        process = self.run(job, number, lambda _, code: self._exited(job, code))
        self.world.at(self._strategies[_parent(job_id)]["attemptDurationSeconds"], lambda: self._time_out(job, process))
        if self.has_fault("host_lost", job):
            self.world.at(200 * self.rng.random(), lambda: self._lose_host(job, process))
        if self.has_fault("sigterm", job):  # of a Spot machine, two minutes before it is lost
            self.world.at(200 * self.rng.random(), lambda: self._interrupt(job, process))

    def _interrupt(self, job: Request, process: Process) -> None:
        if not process.has_ended:
            process.stop.set("SIGTERM")
            self.world.at(120.0, lambda: self._lose_host(job, process))

    def _lose_host(self, job: Request, process: Process) -> None:
        if not process.has_ended:
            job["_status_reason"] = "Host EC2 (instance i-0abc) terminated."
            self.world.kill(process)

    def _time_out(self, job: Request, process: Process) -> None:
        if not process.has_ended:
            job["_status_reason"] = TIMED_OUT
            self.stop(process, GRACE_S)

    def _exited(self, job: Request, code: int | None) -> None:
        self._attempt_ended(job, 137 if code is None else code, job.pop("_status_reason", EXITED))

    def _attempt_ended(self, job: Request, code: int | None, status_reason: str) -> None:
        container: Request = {} if code is None else {"exitCode": code}
        if code is None:
            container["reason"] = "CannotPullContainerError"
        if status_reason.startswith("Host EC2"):
            container = {}
        job["attempts"].append(
            {
                "startedAt": job.get("startedAt"),
                "stoppedAt": self._now(),
                "statusReason": status_reason,
                "container": container,
            }
        )
        succeeded = code == 0 and status_reason == EXITED
        if not succeeded and "_reason" not in job and self._will_retry(job, code, status_reason):
            self._queue(job)
            job["statusReason"] = status_reason
            return
        job |= {"stoppedAt": self._now(), "status": "SUCCEEDED" if succeeded else "FAILED"}
        job["statusReason"] = job.get("_reason", status_reason) if not succeeded else status_reason
        self.on_end(job)
        self.world.at(1.0, self.settle)

    def _will_retry(self, job: Request, code: int | None, status_reason: str) -> bool:
        """Apply the retry strategy of the job definition: the first rule that matches, where * matches any rest."""
        strategy = self._strategies[_parent(job["jobId"])]["retry"]
        if status_reason == TIMED_OUT or len(job["attempts"]) >= strategy["attempts"]:
            return False
        container_reason = "CannotPullContainerError" if code is None else ""
        seen = {
            "onStatusReason": status_reason,
            "onReason": container_reason,
            "onExitCode": "" if code is None else str(code),
        }
        for rule in strategy["evaluateOnExit"]:
            conditions = [(seen[name], pattern) for name, pattern in rule.items() if name != "action"]
            if all(_matches(text, pattern) for text, pattern in conditions):
                return bool(rule["action"].upper() == "RETRY")
        return True

    def _fail(self, job: Request, reason: str) -> None:
        job |= {"status": "FAILED", "statusReason": reason, "stoppedAt": self._now()}
        self.on_end(job)

    def _tasks(self, job_id: str) -> list[Request]:
        """Return the children of an array, or the job itself."""
        job = self.jobs[job_id]
        size = job.get("arrayProperties", {}).get("size", 0)
        return [self.jobs[f"{job_id}:{index}"] for index in range(size)] or [job]


def _parent(job_id: str) -> str:
    return re.split("[:#]", job_id)[0]


def _matches(text: str, pattern: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern
