"""What AWS Batch refuses, checked before anything is sent; and what it takes but would never run.

Sources: the model of AWS Batch in botocore (bounds and patterns), its user guide (quotas, multi-node parallel jobs,
array jobs, job retries). A request above a bound fails late and half way through a DAG, or waits for ever.
"""

import json
import re
from collections.abc import Iterator

from jobs.plan.dag import Plan, dag_problems, refuse
from jobs.plan.spec import JobSpec
from jobs.targets.batch.requests import definition_request, submit_request
from jobs.targets.placement import placement_of
from pipeline.core.machines import NODES

MAX_ATTEMPTS, MAX_RULES, MIN_TIMEOUT_S, MAX_DEPENDENCIES, MAX_NODES = 10, 5, 60, 20, 1000
ARRAY_SIZES = range(2, 10_001)
MAX_PRIORITY = 9999
MAX_DEFINITION_BYTES, MAX_SUBMIT_BYTES, MAX_OVERRIDE_CHARACTERS = 24 * 1024, 30 * 1024, 8192
MAX_IMAGE_CHARACTERS = 255
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$")
SHARE = re.compile(r"^[A-Za-z0-9]{1,255}$")


def check_plan(plan: Plan) -> None:
    """Raises ConfigError with every problem of every job."""
    refuse(plan, plan_problems(plan), platform="AWS Batch", next_command="trnjobs plan")


def plan_problems(plan: Plan) -> Iterator[str]:
    yield from dag_problems(plan.jobs)
    for job in plan.jobs:
        for problem in (*_words(plan, job), *_resources(job), *_sizes(plan, job)):
            yield f"{job.name}: {problem}"


def _words(plan: Plan, job: JobSpec) -> Iterator[str]:
    """Names, shape, command, retries and environment."""
    name, where = f"{plan.pipeline}-{plan.cycle}-{job.name}", placement_of(plan, job)
    if not _NAME.match(name):
        yield f"job name {name!r}; expected letters, digits, - and _, beginning with a letter or digit, at most 128"
    if not where.queue:
        yield "no queue; expected its name or ARN (jobs.queue)"
    if not SHARE.match(where.share_identifier):
        yield f"share identifier {where.share_identifier!r}; expected letters and digits only, 1 to 255"
    if not 0 <= where.priority <= MAX_PRIORITY:
        yield f"priority {where.priority}; expected 0 to {MAX_PRIORITY}"
    if not 0 < len(job.image) <= MAX_IMAGE_CHARACTERS:
        yield f"an image of {len(job.image)} characters; expected 1 to {MAX_IMAGE_CHARACTERS}"
    if job.num_nodes and job.array_size:
        yield "nodes and an array; expected one of them"
    if job.array_size and job.array_size not in ARRAY_SIZES:
        yield f"an array of {job.array_size}; expected 2 to 10,000 (one child is an ordinary job)"
    if not 0 <= job.num_nodes <= MAX_NODES:
        yield f"{job.num_nodes} nodes; expected at most {MAX_NODES}"
    if job.timeout_s < MIN_TIMEOUT_S:
        yield f"a timeout of {job.timeout_s} s; expected {MIN_TIMEOUT_S} or more"
    if not job.command or not all(job.command):
        yield "an empty command, or one with an empty argument"
    if any(word.startswith("Ref::") for word in job.command):
        yield "a command with Ref::, which AWS Batch would replace"
    if not 1 <= job.retry.attempts <= MAX_ATTEMPTS:
        yield f"{job.retry.attempts} attempts; expected 1 to {MAX_ATTEMPTS}"
    if (number := len(job.retry.as_rules())) > MAX_RULES:
        yield f"{number} retry rules; expected at most {MAX_RULES}"
    if len(job.depends_on) > MAX_DEPENDENCIES:
        yield f"{len(job.depends_on)} dependencies; expected at most {MAX_DEPENDENCIES}"
    for variable in job.environment:
        if variable.startswith("AWS_BATCH"):
            yield f"environment variable {variable}; names may not begin with AWS_BATCH"


def _resources(job: JobSpec) -> Iterator[str]:
    needs = job.resources
    if needs.vcpus < 1 or needs.memory_mib < 4:
        yield f"{needs.vcpus} vCPU and {needs.memory_mib} MiB; expected at least 1 and 4"
    if needs.instance_type not in NODES:
        return
    node = NODES[needs.instance_type]
    kinds = {"neuron": node.num_devices, "infiniband": node.num_efa}
    asked = {kind: sum(kind in device for device in needs.devices) for kind in kinds}
    if needs.vcpus > node.vcpus or needs.memory_mib > node.memory_mib:
        yield (
            f"{needs.vcpus} vCPU and {needs.memory_mib:,} MiB a node; {needs.instance_type} can give {node.vcpus} and "
            f"{node.memory_mib:,}: it would never start"
        )
    for kind, number in kinds.items():
        if asked[kind] > number:
            yield f"{asked[kind]} {kind} devices a node; {needs.instance_type} has {number}"


def _sizes(plan: Plan, job: JobSpec) -> Iterator[str]:
    definition = len(json.dumps(definition_request(plan, job)))
    if definition > MAX_DEFINITION_BYTES:
        yield f"a job definition of {definition:,} bytes; expected at most {MAX_DEFINITION_BYTES:,}"
    request = submit_request(plan, job, definition="name:1", ids={d.job: "0" * 36 for d in job.depends_on})
    nodes = request.get("nodeOverrides", {}).get("nodePropertyOverrides", [{}])[0]
    override = len(json.dumps(request.get("containerOverrides") or nodes.get("containerOverrides")))
    if override > MAX_OVERRIDE_CHARACTERS:
        yield f"container overrides of {override:,} characters; expected at most {MAX_OVERRIDE_CHARACTERS:,}"
    if (size := len(json.dumps(request))) > MAX_SUBMIT_BYTES:
        yield f"a SubmitJob request of {size:,} bytes; expected at most {MAX_SUBMIT_BYTES:,}"
