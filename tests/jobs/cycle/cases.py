"""Small plans for the tests of jobs."""

from pydantic import JsonValue

from jobs.plan.spec import Dependency, JobPlan, JobSpec, Resources, Retry, Ulimit

CPU = Resources(vcpus=2, memory_mib=4096)
TRN1 = Resources(
    vcpus=128,
    memory_mib=480_000,
    shared_memory_mib=65_536,
    devices=(
        *(f"/dev/neuron{i}" for i in range(16)),
        *(f"/dev/infiniband/uverbs{i}" for i in range(8)),
    ),
    ulimits=(Ulimit(name="memlock", soft=-1, hard=-1),),
    instance_type="trn1.32xlarge",
    processes_per_node=32,
)


def job(name: str, *after: str, **fields: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": name,
            "stage": name,
            "command": ("trnpipe", name, "--workspace", "s3://bucket/relevance"),
            "resources": CPU,
            "image": "1234.dkr.ecr.us-west-2.amazonaws.com/trnpipe@sha256:" + "0" * 64,
            "retry": Retry.of(3),
            "timeout_s": 3600,
            "depends_on": tuple(Dependency(job=one) for one in after),
            **fields,
        }
    )


def plan(*jobs: JobSpec, **placement: JsonValue) -> JobPlan:
    """Every job is placed the same."""
    where = {"queue": "relevance", "share_identifier": "production"} | placement
    return JobPlan(
        pipeline="relevance",
        cycle="2026-11-20",
        workspace="s3://bucket/relevance",
        jobs=jobs,
        placements={job.name: where for job in jobs},
    )


def cycle() -> JobPlan:
    """A gang, and an array after it."""
    train = job("train", num_nodes=2, resources=TRN1, environment={"TRNPIPE_TRAIN__MAX_STEPS": "100"})
    return plan(train, job("embed", "train", array_size=8), job("verify", "embed"))
