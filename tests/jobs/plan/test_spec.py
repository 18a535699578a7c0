"""Any DAG of jobs is a plan; plans that the revision before has stored are read and keep their ids."""

from pathlib import Path

from jobs.plan.spec import JobSpec, Plan
from jobs.targets.base import placement_of
from tests.jobs.cycle.cases import job, plan
from tests.jobs.plan.test_cycle import planned, trainium

STORED = Path(__file__).parent / "stored_plan.json"


def test_a_plan_of_the_revision_before_is_read_and_keeps_its_id() -> None:
    found = Plan.model_validate_json(STORED.read_bytes())
    assert found.plan_id == "b9fff577585e38fabce2f906425f4b5c"
    assert found == trainium(
        mines=True, role="arn:all", environment={"A": "1"}, priority=7, evaluate={"role": "arn:one"}
    )
    assert Plan.model_validate_json(found.model_dump_json()) == found
    assert (planned().plan_id, trainium().plan_id) == (
        "a4dd49e58013b504bd4a633311605bfc",
        "21fc4d73e920a02f25de339c93074948",
    )


def test_where_a_job_runs_is_no_part_of_what_it_runs() -> None:
    one, other = plan(job("a"), queue="x"), plan(job("a"), queue="y")
    assert one.jobs == other.jobs
    assert one.plan_id != other.plan_id
    assert placement_of(one, one.job("a")).queue == "x"
    assert not {"queue", "share_identifier", "priority", "job_role", "log_group"} & JobSpec.model_fields.keys()
