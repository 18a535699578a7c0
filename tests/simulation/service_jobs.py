"""SageMaker behind queues of AWS Batch, which start training jobs for service jobs and decide about retries.

The requests and their answers are those of the fake that the tests of the target use. What is added here is time, as in
sagemaker.py: a service job is listed only after a while, waits in its queue, and AWS Batch notices only after a while
that a training job has ended. Requests to SageMaker itself are answered as before.
"""

from tests.jobs.targets.faults import Request
from tests.jobs.targets.sagemaker.fake_sagemaker import WAITING, WITH_SAGEMAKER, FakeServiceJobs
from tests.simulation.batch import GRACE_S, MACHINE_S, Container
from tests.simulation.faults import Service
from tests.simulation.sagemaker import NO_CAPACITY, SimulatedSageMaker
from tests.simulation.world import Process

NOTICE_S = 60.0
"""Most seconds until AWS Batch notices that a training job has started or ended."""


class SimulatedServiceJobs(SimulatedSageMaker):
    """One account with a queue, whose service jobs and training jobs run in the world."""

    def __init__(self, service: Service, container: Container) -> None:
        super().__init__(service, container)
        self.batch = FakeServiceJobs(self)
        self.batch.rejects_twins = self.world.seed % 3 > 0  # which of the two is not documented

    # Requests.

    def _submit_service_job(self, request: Request) -> Request:
        known = len(self.batch.submitted)
        answer = self.batch.submit_service_job(**request)
        if len(self.batch.submitted) > known:
            self.show_later(answer["jobId"])
            self._queue(self.batch.jobs[answer["jobId"]])
        return answer

    def _list_service_jobs(self, request: Request) -> Request:
        found = self.batch.list_service_jobs(**request)["jobSummaryList"]
        return {"jobSummaryList": [job for job in found if self.is_shown(job["jobId"])]}

    def _describe_service_job(self, request: Request) -> Request:
        return self.batch.describe_service_job(**request)

    def _terminate_service_job(self, request: Request) -> Request:
        return self.batch.terminate_service_job(**request)

    def _describe_job_queues(self, request: Request) -> Request:
        return self.batch.describe_job_queues(**request)

    def _describe_scheduling_policies(self, request: Request) -> Request:
        return self.batch.describe_scheduling_policies(**request)

    # What happens by itself.

    def show_later(self, job_id: str) -> None:
        super().show_later(job_id)
        if job_id in self.batch.tries:  # a training job, which was submitted as a service job
            self.submitters[job_id] = self.submitters[self.batch.tries[job_id][0]]

    def _queue(self, job: Request) -> None:
        low, high = MACHINE_S
        self.world.at(low * (high / low) ** self.rng.random(), lambda: self._dispatch(job))

    def _dispatch(self, job: Request) -> None:
        if job["status"] in WAITING:
            self.batch.dispatch(job)

    def _start(self, job: Request) -> None:
        super()._start(job)
        self._notice_later(job["jobId"])

    def _interrupt(self, name: str, process: Process) -> None:
        """Preempt a job of a quota share. Another job gets the notice of its Spot machine."""
        if "preemptionConfiguration" not in self._service_job(name):
            super()._interrupt(name, process)
        elif not process.has_ended:
            self.training[name]["_is_preempted"] = True
            self.move(name, "Stopping")
            self.stop(process, GRACE_S)

    def _end(self, name: str, status: str, failure: str = "", secondary: str = "") -> None:
        if failure == NO_CAPACITY and name in self.batch.tries:
            self.training[name]["_has_no_capacity"] = True
            status, failure = "Stopped", ""
        super()._end(name, status, failure, secondary)
        self._notice_later(name)

    def _notice_later(self, name: str) -> None:
        if name in self.batch.tries:
            self.world.at(NOTICE_S * self.rng.random(), lambda: self._notice(name))

    def _notice(self, name: str) -> None:
        job, training = self._service_job(name), self.training[name]
        is_latest = job["latestAttempt"]["serviceResourceId"]["value"].endswith(f"/{name}")
        if job["status"] not in WITH_SAGEMAKER or not is_latest:
            return
        if training.pop("_has_no_capacity", False):
            self.batch.queue_again(job)
        elif training.pop("_is_preempted", False) and "isTerminated" not in job:
            self.batch.count_preemption(job)
        else:
            self.batch.look(job, training)
        if job["status"] == "RUNNABLE":
            self._queue(job)

    def _service_job(self, name: str) -> Request:
        job_id, _ = self.batch.tries.get(name, ("", 0))
        return self.batch.jobs.get(job_id, {})
