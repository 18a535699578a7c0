"""Send the lineage of cycles as OpenLineage events, which requires openlineage-python.

A cycle is a run, and the parent of one run for each attempt of its jobs. The id of a run is a UUIDv5 of the plan, the
job and the attempt, and all times are those of the records, so a cycle that is sent again gives the same events. The
client determines where they are sent (OPENLINEAGE_URL, OPENLINEAGE_CONFIG or openlineage.yml).

The datasets are folders of the workspace that all cycles share, and their versions are the fingerprints that the stages
have stored. The version of a checkpoint or of vectors is the digest of the manifest.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    JobFacet,
    RunFacet,
    dataset_version_dataset,
    error_message_run,
    job_type_job,
    parent_run,
)

from jobs.commands.mirror import OPENLINEAGE, StoredCycle, request_error
from jobs.cycle.page.gather import STAGES
from pipeline import __version__
from pipeline.context import load_result
from pipeline.core.errors import ConfigError, first_line
from pipeline.core.fingerprint import fingerprint
from pipeline.core.secrets import without_secrets
from pipeline.data.token_sets import token_set_prefixes
from pipeline.io.commit import read_manifest
from pipeline.io.paths import user_path
from pipeline.io.storage import Storage
from pipeline.registry.records import pointer_key

PRODUCER = f"urn:trnpipe:{__version__}"
CYCLE_JOB = "cycle"
CHECKPOINTS, CATALOGUES, VECTORS = "checkpoints", "catalogues", "embeddings"
_INPUTS: Mapping[str, Mapping[str, str]] = {
    "evaluate": {"candidate": CHECKPOINTS, "incumbent": CHECKPOINTS},
    "embed": {"checkpoint": CHECKPOINTS, "catalogue": CATALOGUES},
    "verify": {"checkpoint": CHECKPOINTS, "vectors": VECTORS},
}
"""The inputs of a stage that are versions of a dataset, by stage and name. The other inputs are settings."""
_READ_TOKENS = ("mine", "teach", "train", "evaluate")
_OUTPUTS = {"mine": "negatives", "train": "checkpoint", "embed": "embeddings"}
"""The output of a stage that is a committed folder, by stage."""
_ENDS = {"succeeded": RunState.COMPLETE, "cancelled": RunState.ABORT}
"""The event at the end of a cycle or an attempt, which is FAIL for all other outcomes."""


class OpenLineageMirror:
    """The transport that the OpenLineage client is configured with."""

    def __init__(self) -> None:
        """Create a client. Raises ConfigError if its configuration is invalid, or if there is none."""
        os.environ.setdefault("OPENLINEAGE_CLIENT_LOGGING", "ERROR")  # errors of the configuration are raised below
        try:
            self._client = OpenLineageClient()
            transport = self._client.transport
            problem = "is disabled" if transport.kind == "noop" else "has no transport"
            is_set = transport.kind != "noop" and (transport.kind != "console" or bool(self._client.config.transport))
        except (ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
            problem, is_set = f"has an invalid configuration: {first_line(error)}", False
        if not is_set:
            raise ConfigError(
                f"OpenLineage {problem}",
                expected="OPENLINEAGE_URL, or a file named by OPENLINEAGE_CONFIG or openlineage.yml in this folder",
                next_command=f"export OPENLINEAGE_URL=http://localhost:5000, then trnjobs mirror --to {OPENLINEAGE}",
            )
        self._address = str(getattr(transport, "url", f"the {transport.kind} transport of OpenLineage"))

    def send(self, cycle: StoredCycle) -> str:
        """Send all events of a cycle in chronological order."""
        events = sorted(events_of(cycle), key=lambda event: event.eventTime)
        try:
            for event in events:
                self._client.emit(event)
        except (OSError, RuntimeError) as error:  # errors of requests are OSErrors
            raise request_error(OPENLINEAGE, self._address, error) from error
        return f"{len(events)} events sent"

    def finish(self, storage: Storage) -> list[str]:
        """Wait until a transport that works in the background has sent all events."""
        self._client.close()
        return []


def events_of(cycle: StoredCycle) -> Iterator[RunEvent]:
    """Yield the START event of a cycle and of each attempt, and the COMPLETE, FAIL or ABORT event if it has ended."""
    plan_id, ledger, pipeline_name = cycle.claim.plan_id, cycle.data.ledger, cycle.plan.pipeline
    inputs, outputs = datasets_of(cycle)
    job, run = Job(pipeline_name, CYCLE_JOB, facets=_job_type("DAG")), Run(run_id(plan_id))
    if ledger.began_at is not None:
        yield _event(RunState.START, ledger.began_at, run, job)
    if ledger.ended_at is not None:
        state = _ENDS.get(ledger.outcome, RunState.FAIL)
        failed = Run(run.runId, facets=_error(cycle.data.why))
        yield _event(state, ledger.ended_at, run if state is RunState.COMPLETE else failed, job)
    parent = parent_run.ParentRunFacet(
        parent_run.Run(run.runId), parent_run.Job(pipeline_name, CYCLE_JOB), producer=PRODUCER
    )
    for entry in ledger.entries:
        attempt = run_id(plan_id, entry.job, str(entry.submission), str(entry.attempt))
        job, run = Job(pipeline_name, entry.stage, facets=_job_type("TASK")), Run(attempt, facets={"parent": parent})
        read = inputs.get(entry.stage, [])
        yield _event(RunState.START, entry.start_ms / 1000, run, job, read)
        if entry.ending == "running":
            continue
        state, written = _ENDS.get(entry.ending, RunState.FAIL), outputs.get(entry.stage, [])
        if state is RunState.FAIL:
            written, run = [], Run(attempt, facets={"parent": parent, **_error(entry.ending)})
        yield _event(state, (entry.start_ms + entry.length_ms) / 1000, run, job, read, written)


def run_id(*parts: str) -> str:
    """Return the id of the run of a cycle (its plan) or of an attempt (plan, job, submission, attempt)."""
    return str(uuid5(NAMESPACE_URL, ":".join(["urn:trnpipe", *parts])))


def _event(
    state: RunState,
    at: float,
    run: Run,
    job: Job,
    inputs: Sequence[InputDataset] = (),
    outputs: Sequence[OutputDataset] = (),
) -> RunEvent:
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return RunEvent(
        eventType=state, eventTime=time, run=run, job=job, inputs=[*inputs], outputs=[*outputs], producer=PRODUCER
    )


def _job_type(name: str) -> dict[str, JobFacet]:
    return {"jobType": job_type_job.JobTypeJobFacet("BATCH", "TRNPIPE", name, producer=PRODUCER)}


def _error(message: str) -> dict[str, RunFacet]:
    return {"errorMessage": error_message_run.ErrorMessageRunFacet(message, "PYTHON", producer=PRODUCER)}


def datasets_of(cycle: StoredCycle) -> tuple[dict[str, list[InputDataset]], dict[str, list[OutputDataset]]]:
    """Return the datasets that each finished stage read and wrote, by stage."""
    storage, stages = cycle.store.storage, [stage for stage in STAGES if stage in cycle.data.figures]
    results = {stage: result for stage in stages if (result := load_result(storage, cycle.name, stage))}
    reads = {stage: list[InputDataset]() for stage in results}
    writes = {stage: list[OutputDataset]() for stage in results}
    # Later stages store the digests of these folders, which remain known after old checkpoints are deleted.
    digests = {
        results[stage].outputs.get(output, ""): results[stage].inputs[name]
        for stage, output, name in (("evaluate", "checkpoint", "candidate"), ("verify", VECTORS, "vectors"))
        if stage in results and name in results[stage].inputs
    }

    def version_of(prefix: str) -> str:
        manifest = None if prefix in digests else read_manifest(storage, prefix)
        return manifest.digest if manifest else digests.get(prefix, "")

    for stage, result in results.items():
        for name, folder in _INPUTS.get(stage, {}).items():
            if version := result.inputs.get(name):
                reads[stage].append(InputDataset(**_dataset(storage.uri(folder), version)))
        if prefix := result.outputs.get(_OUTPUTS.get(stage, "")):
            folder = prefix.partition("/")[0]
            writes[stage].append(OutputDataset(**_dataset(storage.uri(folder), version_of(prefix))))
        if stage == "evaluate" and result.figures.get("promoted"):
            key = pointer_key(cycle.data.model)
            writes[stage].append(OutputDataset(**_dataset(storage.uri(key), result.inputs["candidate"])))
    if "train" in results:
        for prefix in cycle.data.lineage.ancestors[:1]:
            reads["train"].append(InputDataset(**_dataset(storage.uri(CHECKPOINTS), version_of(prefix))))
    if "prepare" in results and (prefixes := token_set_prefixes(results["prepare"].outputs)):
        version = fingerprint([prefix.rpartition("/")[2] for prefix in prefixes])
        tokens = _dataset(storage.uri(prefixes[0].rpartition("/")[0]), version)
        writes["prepare"].append(OutputDataset(**tokens))
        for stage in reads.keys() & _READ_TOKENS:
            reads[stage].append(InputDataset(**tokens))
        path = ((cycle.store.settings() or {}).get("data") or {}).get("path")
        if path:
            uri = path if "://" in path else f"file://{user_path(path)}"
            reads["prepare"].append(InputDataset(**_dataset(str(without_secrets(uri, ())), "")))
    return reads, writes


def _dataset(uri: str, version: str) -> dict[str, Any]:
    """Return the arguments of a dataset, whose name follows the conventions of OpenLineage for files and S3."""
    parts = urlsplit(uri)
    namespace = f"{parts.scheme}://{parts.netloc}" if parts.netloc else parts.scheme
    name = parts.path.lstrip("/") if parts.netloc else parts.path
    facet = dataset_version_dataset.DatasetVersionDatasetFacet(version, producer=PRODUCER)
    return {"namespace": namespace, "name": name or "/", "facets": {"version": facet} if version else {}}
