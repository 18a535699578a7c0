"""SageMaker in memory, which also runs the training jobs: machines, Spot capacity, quotas, time limits and stops.

The requests and their answers are those of the fake that the tests of the target use. What is added here is time, as in
batch.py. Each training job also has an entry in `jobs` in the form of AWS Batch, which the invariants read.
"""

from datetime import UTC, datetime

from jobs.node.environment import SUBMISSION
from pipeline.parallel.world import ATTEMPT
from tests.jobs.targets.faults import Request
from tests.jobs.targets.sagemaker.fake_sagemaker import ENDED, FakeSageMaker, refused
from tests.simulation.batch import Container, Platform
from tests.simulation.faults import Service
from tests.simulation.world import Process

STARTS_S = (60.0, 400.0)
"""Seconds until a training job has its machines and its container runs."""
GRACE_S = 120.0
NO_CAPACITY = "CapacityError: Unable to provision requested ML compute capacity. Please retry."
INTERNAL_ERROR = "InternalServerError: We encountered an internal error. Please try again."


class SimulatedSageMaker(Platform, FakeSageMaker):
    """One account whose training jobs run in the world."""

    target = "sagemaker"

    def __init__(self, service: Service, container: Container) -> None:
        Platform.__init__(self, service, container)
        FakeSageMaker.__init__(self, lambda: service.world.now)
        self.training, self.jobs = self.jobs, dict[str, Request]()
        self._full_until = 0.0

    # Requests.

    def _create_training_job(self, request: Request) -> Request:
        name = request["TrainingJobName"]
        if name in self.training:
            raise refused("ResourceInUse", f"Training job names must be unique. {name}", "CreateTrainingJob")
        job = self._job_of(request)
        if self.has_fault("misconfigured", job):  # other jobs of the account use up the quota
            self._full_until = self.world.now + 7200 * self.rng.random()
        if self.world.now < self._full_until:
            raise refused(
                "ResourceLimitExceeded", "The account-level service limit is 0 Instances", "CreateTrainingJob"
            )
        self._begin(request, job)
        return {"TrainingJobArn": name}

    def make(self, request: Request, *, visible: int) -> None:
        self._begin(request, self._job_of(request))

    def _begin(self, request: Request, job: Request) -> None:
        self.jobs[job["jobId"]] = job
        self.training[job["jobId"]] = request | {"CreationTime": self._now()}
        self.move(job["jobId"], "InProgress", "Starting")
        self.show_later(job["jobId"])
        self.on_submit(job)
        self._wait_for_machines(job)

    def _job_of(self, request: Request) -> Request:
        environment = request["Environment"]
        task, _, index = next(tag["Value"] for tag in request["Tags"] if tag["Key"] == "job").partition(":")
        tags = {"cycle": environment["TRNPIPE_CYCLE"], "job": task, "round": environment.get(SUBMISSION, "1")}
        array = {"index": int(index)} if index else {}
        same = [other for other in self.jobs.values() if (other["tags"], other["arrayProperties"]) == (tags, array)]
        attempt = int(environment.get(ATTEMPT, len(same) + 1))
        name = request["TrainingJobName"]
        return {"jobId": name, "status": "RUNNABLE", "tags": tags, "attempt": attempt, "arrayProperties": array}

    def _describe_training_job(self, request: Request) -> Request:
        name = request["TrainingJobName"]
        if name not in self.training or not self.is_shown(name):
            raise refused("ValidationException", "Requested resource not found.", "DescribeTrainingJob")
        return {**self.training[name]}

    def _stop_training_job(self, request: Request) -> Request:
        name = request["TrainingJobName"]
        if name not in self.training or not self.is_shown(name):
            raise refused("ValidationException", "Requested resource not found.", "StopTrainingJob")
        if self.training[name]["TrainingJobStatus"] in ENDED:
            text = f"The request was rejected because the training job is in status {name}."
            raise refused("ValidationException", text, "StopTrainingJob")
        self.stop_training(name)
        return {}

    # What happens by itself.

    def move(self, name: str, status: str, secondary: str = "") -> None:
        now = {"TrainingJobStatus": status, "SecondaryStatus": secondary or status, "LastModifiedTime": self._now()}
        self.training[name] |= now

    def stop_training(self, name: str) -> None:
        self.move(name, "Stopping")
        self.jobs[name]["isTerminated"] = True
        if process := self.processes.get(name):
            self.stop(process, GRACE_S)
        else:
            self.world.at(30 * self.rng.random(), lambda: self._end(name, "Stopped"))

    def _wait_for_machines(self, job: Request) -> None:
        name, (low, high) = job["jobId"], STARTS_S
        wait_s, then = low * (high / low) ** self.rng.random(), lambda: self._start(job)
        if self.has_fault("no_capacity", job):
            wait_s += 3600 * self.rng.random()
            if self._is_spot(name):
                self.move(name, "InProgress", "Pending")
            else:
                then = lambda: self._end(name, "Failed", NO_CAPACITY)  # noqa: E731
        elif self.has_fault("no_start", job):
            then = lambda: self._end(name, "Failed", INTERNAL_ERROR)  # noqa: E731
        self.world.at(wait_s, then)

    def _start(self, job: Request) -> None:
        name = job["jobId"]
        if self.training[name]["TrainingJobStatus"] != "InProgress":
            return
        self.on_start(job)
        job["status"] = "RUNNING"
        self.training[name].setdefault("TrainingStartTime", self._now())
        self.move(name, "InProgress", "Training")
        limit_s = self.training[name]["StoppingCondition"]["MaxRuntimeInSeconds"]
        process = self.run(job, job["attempt"], lambda process, code: self._exited(job, process, code))
        self.world.at(limit_s, lambda: self._time_out(name, process))
        if self.has_fault("host_lost", job):
            self.world.at(200 * self.rng.random(), lambda: self._lose_host(name, process))
        if self.has_fault("sigterm", job):  # of a Spot machine, two minutes before it is lost
            self.world.at(200 * self.rng.random(), lambda: self._interrupt(name, process))

    def _interrupt(self, name: str, process: Process) -> None:
        if not process.has_ended:
            self.training[name]["_is_interrupted"] = True
            process.stop.set("SIGTERM")
            self.world.at(120.0, lambda: self._lose_host(name, process))

    def _lose_host(self, name: str, process: Process) -> None:
        if not process.has_ended:
            self.training[name]["_is_lost"] = True
            self.world.kill(process)

    def _time_out(self, name: str, process: Process) -> None:
        if not process.has_ended:
            self.training[name]["_is_late"] = True
            self.move(name, "Stopping")
            self.stop(process, GRACE_S)

    def _exited(self, job: Request, process: Process, code: int | None) -> None:
        name, training = job["jobId"], self.training[job["jobId"]]
        is_lost, is_interrupted = training.pop("_is_lost", False), training.pop("_is_interrupted", False)
        if training["TrainingJobStatus"] == "Stopping":
            self._end(name, "Stopped", secondary="MaxRuntimeExceeded" if training.pop("_is_late", False) else "")
        elif code == 0:
            self._end(name, "Completed")
        elif (is_lost or is_interrupted) and self._is_spot(name):
            job["status"] = "RUNNABLE"
            self.move(name, "InProgress", "Interrupted")
            self._wait_for_machines(job)
        elif is_lost:
            self._end(name, "Failed", INTERNAL_ERROR)
        else:
            code = 137 if code is None else code
            said = "" if code == 137 else f"exit {code} error"  # a killed entry point has not written its failure
            self._end(name, "Failed", f"AlgorithmError: {said}, exit code: {code}")

    def _end(self, name: str, status: str, failure: str = "", secondary: str = "") -> None:
        if self.training[name]["TrainingJobStatus"] in ENDED:
            return
        if self.training[name]["TrainingJobStatus"] == "Stopping":
            status, failure = "Stopped", ""
        self.move(name, status, secondary)
        self.training[name] |= {"TrainingEndTime": self._now()} | ({"FailureReason": failure} if failure else {})
        job = self.jobs[name]
        job["status"] = "SUCCEEDED" if status == "Completed" else "FAILED"
        self.on_end(job)

    def _is_spot(self, name: str) -> bool:
        return bool(self.training[name].get("EnableManagedSpotTraining"))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.world.now, UTC)
