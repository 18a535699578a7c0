"""Any plan that our limits let pass, and some beyond."""

from hypothesis import strategies as st

from jobs.plan.dag import Plan
from jobs.plan.retry import Retry
from jobs.plan.spec import Dependency, JobSpec, Resources, Ulimit
from tests.jobs.cycle.cases import plan

WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=20).filter(
    lambda word: not word.startswith("Ref::")
)
NAMES = st.from_regex(r"[A-Z][A-Z0-9_]{0,12}", fullmatch=True).filter(lambda name: not name.startswith("AWS_BATCH"))
ENVIRONMENTS = st.dictionaries(NAMES, st.text(st.characters(codec="ascii", min_codepoint=32), max_size=30), max_size=4)
ULIMITS = st.builds(
    Ulimit, name=st.sampled_from(["memlock", "nofile", "stack"]), soft=st.integers(-1, 9), hard=st.integers(-1, 9)
)
RESOURCES = st.builds(
    Resources,
    vcpus=st.integers(1, 128),
    memory_mib=st.integers(4, 490_000),
    shared_memory_mib=st.integers(1, 65_536),
    devices=st.lists(st.sampled_from([f"/dev/neuron{i}" for i in range(16)]), unique=True).map(tuple),
    ulimits=st.lists(ULIMITS, max_size=2, unique_by=lambda one: one.name).map(tuple),
)


@st.composite
def jobs(draw: st.DrawFn, name: str, before: list[JobSpec]) -> JobSpec:
    shape = draw(st.sampled_from(["container", "gang", "array"]))
    resources = draw(RESOURCES)
    if shape == "gang" and draw(st.booleans()):
        resources = resources.model_copy(update={"instance_type": "trn1.32xlarge"})
    after = draw(st.lists(st.sampled_from(before), max_size=3, unique_by=lambda one: one.name)) if before else []
    return JobSpec(
        name=name,
        stage=name,
        command=("trnpipe", *draw(st.lists(WORDS, max_size=3))),
        resources=resources,
        image="registry/trnpipe@sha256:" + "0" * 64,
        num_nodes=draw(st.integers(1, 8)) if shape == "gang" else 0,
        array_size=draw(st.integers(2, 20)) if shape == "array" else 0,
        environment=draw(ENVIRONMENTS),
        retry=Retry.of(draw(st.integers(1, 10))),
        timeout_s=draw(st.integers(60, 10**6)),
        depends_on=tuple(Dependency(job=one.name) for one in after),
    )


@st.composite
def plans(draw: st.DrawFn, *, max_jobs: int = 4) -> Plan:
    made: list[JobSpec] = []
    for index in range(draw(st.integers(1, max_jobs))):
        made.append(draw(jobs(f"stage{index}", made)))
    return plan(*made, priority=draw(st.integers(0, 9999)))
