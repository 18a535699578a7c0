"""What must hold at every moment of every history.

1.  No task runs twice at once: a container starts only if no other container of the same task of the cycle runs.
2.  The pointer to the production model and the deployed pair move once per verdict, and only forward or by roll-back:
    each new version has the next generation and names the version that it replaces, a promotion has a passing verdict
    that was not used before, and every other change was requested by a person.
3.  Nothing committed is lost: a manifest is only written when its files are stored, files of a manifest are neither
    changed nor deleted, the history of a model only grows, records of submissions are never replaced, a job that
    succeeded has left its result, and models that were in production keep their files.
4.  Nothing is submitted twice: only the process that holds the lease submits jobs, no job is created for a task that
    has a recorded job in the same submission or has succeeded in an earlier one, and when a driver ends well, each job
    of its submission exists once. There are two exceptions. A driver that stood still, so that meanwhile its lease
    has expired or its cycle was cancelled, may submit a job, which it ends before it ends itself. A job that its driver
    did not live to record may run again, which its stage notices. The next driver ends it, unless clocks differ by more
    than the lease and the job is not listed yet. On SageMaker, any process may create a training job, because all of
    them give it the same name, but each attempt of a task is created after all earlier ones have failed.
5.  Every cycle ends by retry alone: people only repeat commands, and by the end of the day the cycle has succeeded or
    was refused, after a bounded number of submissions.
"""

import json
import re
from collections.abc import Iterator, Mapping

from pipeline.core.manifest import MANIFEST_NAME
from tests.jobs.targets.batch.fake_batch import ENDED
from tests.jobs.targets.faults import Request
from tests.simulation.batch import Platform
from tests.simulation.nodes import MODEL, WORKERS
from tests.simulation.s3 import FakeS3
from tests.simulation.world import World

POINTER, PAIR, HISTORY = (f"registry/{MODEL}/{name}" for name in ("production.json", "serving.json", "history.jsonl"))
_FIXED = re.compile(
    r"cycles/[^/]+/jobs/(submitted/.*|records/.*|earlier/.*|plan\.json|settings\.json)|registry/[^/]+/pairs/.*"
)
_KEPT = re.compile(r"cycles/[^/]+/([^/]+/(result|verdict)\.json|jobs/(claim|records)\.json)|registry/.*")


class Invariants:
    """Watches every change of the bucket and every job. Reports to the world."""

    def __init__(self, world: World, s3: FakeS3, platform: Platform) -> None:
        self.world, self.s3, self.platform = world, s3, platform
        self.manifests = dict[str, dict[str, int]]()
        """Names and sizes of the files of every committed folder."""
        self.in_production = set[str]()
        self.used_verdicts = set[str]()
        self.recorded_ids = set[str]()
        self.recorded = dict[str, dict[int, dict[str, str]]]()
        """Ids of the recorded jobs by cycle, number of the submission and name. Their records are never deleted."""
        self.last_holders = dict[str, str]()
        """Name of the process that held the lease of a cycle last."""
        self.excused = list[tuple[Request, str]]()
        """Jobs that must end before the processes that have submitted them, with what is wrong else."""
        self.num_roll_backs = 0
        """Number of roll-backs that people have requested."""
        calm = not {"freeze", "outage"} & {kind for kind, _ in s3.service.weather.requests}
        self.leases_hold = calm and "clock_jump" not in s3.service.weather.people
        """Whether no process can outlive its lease in this history."""
        s3.on_write, s3.on_delete = self._written, self._deleted
        platform.on_submit = self._submitted if platform.target == "batch" else self._created
        platform.on_start, platform.on_end = self._started, self._ended

    def adopt(self, objects: Mapping[str, bytes]) -> None:
        """Take over what earlier cycles have committed."""
        for key, data in objects.items():
            if key.endswith(MANIFEST_NAME):
                self._committed(key.removesuffix(f"/{MANIFEST_NAME}"), data)
            elif key == HISTORY:
                for line in map(json.loads, data.splitlines()):
                    self.in_production.add(line["checkpoint"])
                    self.used_verdicts.add(line["verdict"])

    # Changes of the bucket.

    def _written(self, key: str, data: bytes, before: bytes | None) -> None:
        if key == POINTER:
            self._pointer_moved(json.loads(data), json.loads(before) if before else None)
        elif key == PAIR:
            self._pair_moved(json.loads(data), json.loads(before) if before else None)
        elif key == HISTORY and before is not None and not data.startswith(before):
            self.world.violate(3, "an entry of the history was lost")
        elif key.endswith(MANIFEST_NAME):
            self._committed(key.removesuffix(f"/{MANIFEST_NAME}"), data)
        elif key.endswith("/jobs/claim.json"):
            if owner := json.loads(data)["owner"]:
                self.last_holders[key.split("/")[1]] = owner
        elif before is None and "/jobs/submitted/" in key:
            self._recorded(key, json.loads(data))
        elif before is not None and before != data:
            if _FIXED.fullmatch(key):
                self.world.violate(3, f"{key} was replaced")
            elif folder := self._folder_of(key):
                self.world.violate(3, f"{key} was replaced, which is a file of the committed folder {folder}")

    def _recorded(self, key: str, stored: Request) -> None:
        _, cycle, _, _, folder, _ = key.split("/")
        self.recorded_ids.add(stored["id"])
        by_number = self.recorded.setdefault(cycle, {})
        by_number.setdefault(int(folder.removeprefix("round-")), {})[stored["job"]] = stored["id"]

    def _deleted(self, key: str) -> None:
        if key.endswith(MANIFEST_NAME):
            folder = key.removesuffix(f"/{MANIFEST_NAME}")
            self.manifests.pop(folder, None)
            if folder in self.in_production or folder.startswith("embeddings/"):
                self.world.violate(3, f"{folder} is deleted, although it was in production")
        elif folder := self._folder_of(key):
            self.world.violate(3, f"{key} is deleted, which is a file of the committed folder {folder}")
        elif _KEPT.fullmatch(key) or (_FIXED.fullmatch(key) and "/submitted/" in key):
            self.world.violate(3, f"{key} is deleted")

    def _committed(self, folder: str, data: bytes) -> None:
        files = {name: file["size_bytes"] for name, file in json.loads(data)["files"].items()}
        for name, size in files.items():
            stored = self.s3.read(f"{folder}/{name}")
            if stored is None or len(stored) != size:
                self.world.violate(3, f"{folder} is committed before its file {name}")
        self.manifests[folder] = files

    def _folder_of(self, key: str) -> str:
        folder, _, name = key.rpartition("/")
        return folder if name in self.manifests.get(folder, ()) else ""

    # The registry.

    def _pointer_moved(self, new: Request, old: Request | None) -> None:
        self._check_generation("the pointer", new, old)
        replaced = new["replaced"] and (new["replaced"]["digest"], new["replaced"]["generation"])
        if replaced != (old and (old["digest"], old["generation"])):
            self.world.violate(
                2, f"generation {new['generation']} of the pointer replaces a version that it did not see"
            )
        if new["checkpoint"] not in self.manifests:
            self.world.violate(2, f"{new['checkpoint']} is in production, but is not committed")
        self.in_production.add(new["checkpoint"])
        if new["action"] == "rolled_back":
            self.num_roll_backs -= 1
            if self.num_roll_backs < 0:
                self.world.violate(2, "production was rolled back twice for one request")
            return
        verdict = json.loads(self.s3.read(new["verdict"]) or b"{}")
        if not verdict.get("promote") or verdict["candidate"]["digest"] != new["digest"]:
            self.world.violate(2, f"{new['checkpoint']} is in production without a passing verdict")
        incumbent = verdict.get("incumbent")
        if (incumbent and incumbent["digest"]) != (old and old["digest"]):
            self.world.violate(2, f"{new['checkpoint']} was compared with a model that is not the one in production")
        if new["verdict"] in self.used_verdicts:
            self.world.violate(2, f"the pointer moved twice for {new['verdict']}")
        self.used_verdicts.add(new["verdict"])

    def _pair_moved(self, new: Request, old: Request | None) -> None:
        self._check_generation("the deployed pair", new, old)
        production = json.loads(self.s3.read(POINTER) or b"{}")
        vectors = new["vectors"]
        if f"embeddings/{vectors['cycle']}" not in self.manifests:
            self.world.violate(2, f"vectors of {vectors['cycle']} are deployed, but are not committed")
        if new["action"] == "verified" and new["digest"] != production.get("digest"):
            self.world.violate(2, f"vectors of {vectors['cycle']} are deployed without their model")
        is_same_model = old and new["action"] == "verified" and old["digest"] == new["digest"]
        if old and is_same_model and old["vectors"]["generation"] >= vectors["generation"]:
            self.world.violate(2, f"vectors of {vectors['cycle']} replace the same or newer ones")

    def _check_generation(self, what: str, new: Request, old: Request | None) -> None:
        before = old["generation"] if old else 0
        if new["generation"] != before + 1:
            self.world.violate(2, f"{what} moved from generation {before} to {new['generation']}")

    # Jobs.

    def _submitted(self, job: Request) -> None:
        cycle, name, number = _submission_of(job)
        owner, process = (
            json.loads(self.s3.read(f"cycles/{cycle}/jobs/claim.json") or b"{}").get("owner"),
            self.world.current,
        )
        if self.leases_hold and process is not None and owner != process.name:
            self.world.violate(
                4, f"{name} of {cycle} is submitted by {process.name}, while {owner or 'no process'} holds the lease"
            )
        recorded = self.s3.read(f"cycles/{cycle}/jobs/submitted/round-{number}/{name}.json")
        if recorded is not None and self.leases_hold:
            self.world.violate(4, f"{name} of {cycle} is submitted again, although submission {number} has recorded it")
        for other in self._jobs_of(cycle, name):
            is_recorded = other["jobId"] in self.recorded_ids
            if other is not job and other["status"] == "SUCCEEDED" and is_recorded:
                self.world.violate(4, f"{name} of {cycle} is submitted again, although it has succeeded")

    def _created(self, job: Request) -> None:
        """Check a training job. Any process may create it, but each attempt must follow one that has failed."""
        cycle, name, number = _submission_of(job)
        index = job["arrayProperties"].get("index")
        others = [other for other in self._jobs_of(cycle, name) if other is not job]
        for other in (other for other in others if other["arrayProperties"].get("index") == index):
            # A retry of an array repeats all of its children, unless all of them have succeeded.
            round_, succeeded = other["tags"]["round"], [one for one in others if one["status"] == "SUCCEEDED"]
            is_whole = index is None or len([one for one in succeeded if one["tags"]["round"] == round_]) == WORKERS
            is_repeated = not is_whole and int(round_) < number
            if other["status"] != "FAILED" and not (other["status"] == "SUCCEEDED" and is_repeated):
                self._excuse(other, f"{job['jobId']} is created, while {other['jobId']} is {other['status']}")
            if (number, job["attempt"]) <= (int(other["tags"]["round"]), other["attempt"]):
                self._excuse(job, f"{job['jobId']} is created after {other['jobId']}")

    def _started(self, job: Request) -> None:
        cycle, name, _ = _submission_of(job)
        index = job.get("arrayProperties", {}).get("index")
        for job_id in self.platform.processes:
            other = self.platform.jobs[job_id]
            is_same = _submission_of(other)[:2] == (cycle, name)
            is_lost = self._is_lost(job) or self._is_lost(other)
            if is_same and not is_lost and other.get("arrayProperties", {}).get("index") == index:
                self.world.violate(1, f"{name} of {cycle} starts as {job['jobId']}, while {job_id} runs")

    def _ended(self, job: Request) -> None:
        cycle, name, _ = _submission_of(job)
        is_whole = not job.get("arrayProperties", {}).keys() >= {"index"}
        if job["status"] == "SUCCEEDED" and is_whole and self.s3.read(f"cycles/{cycle}/{name}/result.json") is None:
            self.world.violate(3, f"{name} of {cycle} has succeeded, but has no result")

    def _jobs_of(self, cycle: str, name: str) -> Iterator[Request]:
        for job in self.platform.jobs.values():
            if not {":", "#"} & {*job["jobId"]} and _submission_of(job)[:2] == (cycle, name):
                yield job

    def check_submission(self, cycle: str, driver: str) -> None:
        """Check that each job of the newest submission exists once, after the process `driver` has ended well."""
        if self.platform.target != "batch" or self.last_holders.get(cycle) != driver:
            return
        recorded, _ = self.newest_submission(cycle)
        for name, job_id in recorded.items():
            for job in self._jobs_of(cycle, name):
                if _is_live(job) and job["jobId"] != job_id and not self._is_lost(job):
                    self._excuse(job, f"{name} of {cycle} was submitted twice: {job['jobId']} beside {job_id}")

    def _is_lost(self, job: Request) -> bool:
        """Return whether the process that has submitted a job of AWS Batch did not live to record it."""
        job_id = re.split("[:#]", job["jobId"])[0]
        submitter = self.platform.submitters.get(job_id)
        is_recorded = self.platform.target != "batch" or job_id in self.recorded_ids
        return not self.leases_hold and submitter is not None and submitter.is_dead and not is_recorded

    def _excuse(self, job: Request, text: str) -> None:
        """Report a job, unless the process that has submitted it may have stood still and can still end it."""
        submitter = self.platform.submitters[job["jobId"]]
        if self.leases_hold or submitter is None or submitter.has_ended:
            self.world.violate(4, text)
        self.excused.append((job, text))

    def check_excused(self) -> None:
        """Check that no process has ended before an excused job that it has submitted."""
        for job, text in self.excused:
            submitter = self.platform.submitters[job["jobId"]]
            if submitter is not None and submitter.has_ended and _is_live(job):
                self.world.violate(4, text)

    def newest_submission(self, cycle: str) -> tuple[dict[str, str], int]:
        """Return the ids of the recorded jobs by name, and the number of the newest submission."""
        recorded, by_number = dict[str, str](), self.recorded.get(cycle, {})
        for number in sorted(by_number):
            recorded |= by_number[number]
        return recorded, max(by_number, default=0)


def _is_live(job: Request) -> bool:
    return job["status"] not in ENDED and not job.get("isTerminated")


def _submission_of(job: Request) -> tuple[str, str, int]:
    tags = job["tags"]
    return tags["cycle"], tags["job"], int(tags["round"])
