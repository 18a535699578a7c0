"""Faults that are put into the product on purpose, each of which some history must reveal.

A mutant replaces functions of the product, or answers of S3 for a kind of request, within a context.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from jobs.commands import submit
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import SubmittedJob
from jobs.targets.batch.client import BatchClient, translate
from jobs.targets.batch.target import BatchTarget
from pipeline.core.errors import TransientError
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.io import commit
from pipeline.io.s3 import S3Storage
from pipeline.io.s3_client import S3_ERRORS, is_precondition_failed
from pipeline.io.storage import Storage, join_key
from pipeline.registry import model
from tests.simulation import nodes

Mutant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _unconditional_claim() -> Iterator[None]:
    """Write the claim without comparing it, so that two drivers may hold the lease."""

    def write(self: CycleStore, claim: Any, etag: str) -> str:
        self.storage.write_bytes(self.key("claim.json"), claim.model_dump_json().encode())
        return self._etag()

    with patch.object(CycleStore, "_replace", write), patch.object(CycleStore, "_check_lease", lambda *_: None):
        yield


@contextmanager
def _submit_without_lookup() -> Iterator[None]:
    """Submit a job without looking for one of the same name, after a driver died or an answer was lost."""
    with patch.object(BatchTarget, "_live_jobs", lambda *_: []):
        yield


@contextmanager
def _retry_without_idempotency() -> Iterator[None]:
    """Repeat SubmitJob after a lost answer, as the retries of an SDK do."""

    def submit_job(self: BatchClient, request: Any, renew: Any) -> str:
        renew()
        for _ in range(3):
            try:
                return str(self._raw.submit_job(**request)["jobId"])
            except S3_ERRORS as error:
                last = error
        raise translate(last, "submitting")

    def never(*_: object) -> None:
        """End no copies."""

    with patch.object(BatchClient, "submit_job", submit_job), patch.object(BatchTarget, "_end_unrecorded", never):
        yield


@contextmanager
def _record_not_written() -> Iterator[None]:
    """Submit a job without recording it, if a record of this submission exists."""
    save = CycleStore.save_submitted

    def save_submitted(self: CycleStore, submission: int, submitted_job: SubmittedJob) -> None:
        if submitted_job.job != "verify":
            save(self, submission, submitted_job)

    with patch.object(CycleStore, "save_submitted", save_submitted):
        yield


@contextmanager
def _marker_before_data() -> Iterator[None]:
    """Write the manifest of a folder before its files."""

    def commit_dir(storage: Storage, local_dir: Any, prefix: str, *, kind: str, fields: Any) -> None:
        files = {name: commit.file_record(local_dir / name) for name in sorted(local_dir.files)}
        manifest = Manifest(kind=kind, created_by="mutant", fields=fields, files=files)
        storage.write_bytes(join_key(prefix, MANIFEST_NAME), manifest.to_json())
        storage.upload_dir(prefix, local_dir, files)

    with patch.object(nodes, "commit_dir", commit_dir):
        yield


@contextmanager
def _without_compare(name: str) -> Iterator[None]:
    """Replace files with this name even if they have changed."""

    def replace(self: S3Storage, key: str, data: bytes, etag: str) -> bool:
        if not key.endswith(name):
            return write_if_match(self, key, data, etag)
        self.write_bytes(key, data)
        return True

    write_if_match = S3Storage.write_if_match
    with patch.object(S3Storage, "write_if_match", replace):
        yield


def _pointer_without_compare() -> AbstractContextManager[None]:
    """Replace the pointer of a model even if it has changed."""
    return _without_compare("production.json")


def _history_without_compare() -> AbstractContextManager[None]:
    """Append to the history of a model by replacing it, even if it has changed."""
    return _without_compare("history.jsonl")


@contextmanager
def _lost_answer_is_failure() -> Iterator[None]:
    """Take a conditional write whose answer was lost for one that another process has won, also in a rollback."""

    def write_if(self: S3Storage, key: str, data: bytes, **condition: str) -> bool:
        location = {"Bucket": self._bucket, "Key": join_key(self._prefix, key)}
        try:
            self._client.attempt("writing", key, lambda raw: raw.put_object(**location, Body=data, **condition))
        except S3_ERRORS as error:
            if is_precondition_failed(error):
                return False
            raise TransientError(str(error)) from error
        return True

    with patch.object(S3Storage, "_write_if", write_if), patch.object(model, "is_recorded", lambda *_: True):
        yield


@contextmanager
def _retry_of_everything() -> Iterator[None]:
    """Retry all jobs of the cycle, and not only those that have not succeeded."""
    with patch.object(submit, "_unfinished", lambda plan, records: [job.name for job in plan.jobs]):
        yield


@contextmanager
def _pair_without_checks() -> Iterator[None]:
    """Deploy vectors whether or not their model is in production or they are deployed already."""

    def serve(workspace: Storage, pair: model.DeployedPair) -> str:
        model._replace_pair(workspace, pair, model.read_pair(workspace, pair.model))
        return ""

    with patch.object(nodes, "serve_verified_pair", serve):
        yield


MUTANTS: dict[str, Mutant] = {
    mutant.__name__.strip("_"): mutant
    for mutant in (
        _unconditional_claim,
        _submit_without_lookup,
        _retry_without_idempotency,
        _record_not_written,
        _marker_before_data,
        _pointer_without_compare,
        _history_without_compare,
        _lost_answer_is_failure,
        _retry_of_everything,
        _pair_without_checks,
    )
}
