"""What AWS Batch refuses, checked before anything is sent; and what it takes but would never run.

Sources: the model of AWS Batch in botocore (bounds and patterns), its user guide (quotas, multi-node parallel jobs,
array jobs, job retries). A request above a bound fails late and half way through a DAG, or waits for ever.
"""

import json
import re
from collections.abc import Iterator

from jobs.plan.dag import Plan, refuse
from jobs.plan.spec import JobSpec
from jobs.targets.batch.requests import definition_request, submit_request
from jobs.targets.placement import placement_of
from pipeline.core.machines import NODES

MAX_DEPENDENCIES = 20
MAX_DEFINITION_BYTES, MAX_SUBMIT_BYTES, MAX_OVERRIDE_CHARACTERS = 24 * 1024, 30 * 1024, 8192
MAX_IMAGE_CHARACTERS = 255
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$")
SHARE = re.compile(r"^[A-Za-z0-9]{1,255}$")


def check_plan(plan: Plan) -> None:
    """Raises ConfigError with every problem of every job."""
    refuse(plan, plan_problems(plan), platform="AWS Batch", next_command="trnjobs plan")


def plan_problems(plan: Plan) -> Iterator[str]:
    """One line each. What the settings of `[jobs]` cannot say, such as eleven attempts, is not looked for again."""
    for job in plan.jobs:
        for problem in (*_words(plan, job), *_sizes(plan, job)):
            yield f"{job.name}: {problem}"


def _words(plan: Plan, job: JobSpec) -> Iterator[str]:
    """Names, command, dependencies, environment and machine."""
    name, where = f"{plan.pipeline}-{plan.cycle}-{job.name}", placement_of(plan, job)
    if not _NAME.match(name):
        yield f"job name {name!r}; expected letters, digits, - and _, beginning with a letter or digit, at most 128"
    if not where.queue:
        yield "no queue; expected its name or ARN (jobs.queue)"
    if not SHARE.match(where.share_identifier):
        yield f"share identifier {where.share_identifier!r}; expected letters and digits only, 1 to 255"
    if not 0 < len(job.image) <= MAX_IMAGE_CHARACTERS:
        yield f"an image of {len(job.image)} characters; expected 1 to {MAX_IMAGE_CHARACTERS}"
    if any(word.startswith("Ref::") for word in job.command):
        yield "a command with Ref::, which AWS Batch would replace"
    if len(job.depends_on) > MAX_DEPENDENCIES:
        yield f"{len(job.depends_on)} dependencies; expected at most {MAX_DEPENDENCIES}"
    for variable in job.environment:
        if variable.startswith("AWS_BATCH"):
            yield f"environment variable {variable}; names may not begin with AWS_BATCH"
    needs, node = job.resources, NODES.get(job.resources.instance_type)
    if node and (needs.vcpus > node.vcpus or needs.memory_mib > node.memory_mib):
        yield (
            f"{needs.vcpus} vCPU and {needs.memory_mib:,} MiB a node; {needs.instance_type} can give {node.vcpus} and "
            f"{node.memory_mib:,}: it would never start"
        )


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
