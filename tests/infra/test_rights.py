"""The policies against what the jobs really ask for: a cycle runs on a server that refuses what they do not allow.

So a right that is missing fails a job here, and a right that no job has used must be explained below.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.cycle import FIRST, FLEET, SECOND, Seen, seen_by
from tests.infra.iam import applies, like, texts
from tests.infra.policies import JOB_ROLES, READERS

# Two whole cycles under the roles: minutes.
pytestmark = [pytest.mark.stage, pytest.mark.slow, pytest.mark.thorough]

W = f"{FLEET.bucket_arn}/relevance"
OF_COMPILER = "the Neuron compiler's own cache (docs/neuron.md), written on Neuron devices alone"
TOO_SMALL = "files above 16 MiB whose upload failed (pipeline/io/s3.py)"
EITHER_FORM = "AWS Batch asks about a definition with its revision or without; not confirmed where it does which"
WITHDRAWN = "a claim whose plan was refused before a job was submitted (jobs/cycle/cycle_store.py)"
UNUSED = {
    f"train s3:AbortMultipartUpload {W}/tokens/*": TOO_SMALL,
    f"train s3:AbortMultipartUpload {W}/checkpoints/*": TOO_SMALL,
    f"embed s3:AbortMultipartUpload {W}/negatives/*": TOO_SMALL,
    f"embed s3:AbortMultipartUpload {W}/cycles/*/mine/*/*": TOO_SMALL,
    f"train s3:AbortMultipartUpload {W}/cycles/*/parity/*": TOO_SMALL,
    f"promote s3:AbortMultipartUpload {W}/cycles/*/evaluate/*": TOO_SMALL,
    f"promote s3:AbortMultipartUpload {W}/baselines/*": TOO_SMALL,
    f"* s3:PutObject {W}/compile-cache/neuronxcc-*": OF_COMPILER,
    f"* s3:AbortMultipartUpload {W}/compile-cache/neuronxcc-*": OF_COMPILER,
    f"* s3:DeleteObject {W}/compile-cache/neuronxcc-*": OF_COMPILER,
    f"embed s3:DeleteObject {W}/embeddings/*/part-*": "parts that held an id twice (pipeline/embed/finish.py)",
    f"driver s3:DeleteObject {W}/cycles/*/jobs/claim.json": WITHDRAWN,
    f"driver s3:DeleteObject {W}/cycles/*/jobs/plan.json": WITHDRAWN,
    f"driver s3:DeleteObject {W}/cycles/*/jobs/settings.json": WITHDRAWN,
    f"driver batch:RegisterJobDefinition {FLEET.batch_arn('job-definition/relevance-*:*')}": EITHER_FORM,
    f"driver batch:SubmitJob {FLEET.batch_arn('job-definition/relevance-*')}": EITHER_FORM,
    f"driver batch:RegisterJobDefinition {FLEET.batch_arn('job-definition/relevance-run')}": "scripts (jobs.steps)",
    **{
        f"driver s3:{action} {W}/notify/*": "messages (jobs.notify): the cycle here tells nobody"
        for action in ("GetObject", "PutObject", "DeleteObject")
    },
    f"train s3:DeleteObject {W}/tokens/*/share/*": "several workers of prepare (pipeline/data/shared_prepare.py)",
    f"driver logs:GetLogEvents {FLEET.log_group_arn}:log-stream:*": "trnjobs logs, typed by somebody with this role",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Of a whole cycle and the start of the next."""
    return seen_by(tmp_path_factory.mktemp("rights"))


def test_jobs_are_refused_nothing_but_a_look_at_the_bucket(seen: Seen) -> None:
    """open_s3 asks for the bucket, and takes a 403 for an answer: policies here allow prefixes only."""
    refused = {(call.role, call.method, call.path) for call in seen.refused()}
    inputs = {(role, "HEAD", "/shop") for role in READERS}
    assert refused == {(role, "HEAD", "/bucket") for role in JOB_ROLES} | inputs


def test_the_cycle_did_what_a_cycle_does(seen: Seen) -> None:
    """Otherwise nothing would be proven here."""
    steps = {key.split("/")[0] for key in seen.below(f"checkpoints/{FIRST}/")}
    assert "step-40" in steps and "step-10" not in steps, "retention has deleted"
    assert f"checkpoints/{FIRST}/step-" in seen.production
    assert len(seen.below(f"embeddings/{FIRST}/part-")) > 1
    assert len([key for key in seen.below("negatives/") if key.endswith("MANIFEST.json")]) == 1
    assert seen.below(f"cycles/{FIRST}/mine/") == ["result.json"], "the pieces are deleted"
    assert f"reports/{FIRST}.html" in seen.keys
    explained = {name.split("-")[0] for name in seen.below(f"cycles/{FIRST}/jobs/post-mortem/")}
    assert explained == {"train", "evaluate", "verify", "report"}
    assert f"cycles/{FIRST}/jobs/closed.json" in seen.keys, "the second driver has recorded the end of the first cycle"
    assert f"cycles/{SECOND}/jobs/blocked.json" in seen.keys
    ended = [one for one in seen.asked("driver") if one.action == "batch:TerminateJob"]
    assert [one.context["aws:ResourceTag/pipeline"] for one in ended] == ["relevance"], "the watch ends a blocked job"


@pytest.mark.parametrize("role", JOB_ROLES)
def test_every_right_was_used_or_is_explained(seen: Seen, role: str) -> None:
    unused = [right for right in _unused(seen, role) if not any(like(one, right) for one in UNUSED)]
    assert unused == [], "rights that no job has used: take them away, or say above who uses them"


def test_every_explanation_is_of_a_right_that_was_not_used(seen: Seen) -> None:
    unused = [right for role in JOB_ROLES for right in _unused(seen, role)]
    assert [one for one in UNUSED if not any(like(one, right) for right in unused)] == []


def test_graphs_that_are_compiled_ahead_of_time(tmp_path: Path) -> None:
    seen = seen_by(tmp_path, "graphs")
    assert seen.below("compile-cache/graphs/")
    assert {call.method for call in seen.refused()} == {"HEAD"}


def _unused(seen: Seen, role: str) -> Iterator[str]:
    """Each action on each resource that is allowed, and that no request was for."""
    requests = seen.asked(role)
    for policy in FLEET.policies(role):
        for one in policy.statements:
            for action in texts(one["Action"]) if one["Effect"] == "Allow" else ():
                for resource in texts(one["Resource"]):
                    right = {**one, "Action": action, "Resource": resource}
                    if not any(applies(right, request) for request in requests):
                        yield f"{role} {action} {resource}"
