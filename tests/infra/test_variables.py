"""Mistakes in variables of infra/ are refused before anything is planned, with what was seen and what was expected."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.schedule import parse_schedule
from jobs.settings import CycleSettings
from pipeline.core.machines import NODES
from pipeline.parallel.world import MASTER_PORT
from pipeline.settings import resolve
from tests.infra.terraform import INFRA, Terraform, environment_for, require_terraform

DIGEST = "sha256:" + "0" * 64
GOOD: dict[str, Any] = {
    "name": "relevance",
    "region": "us-west-2",
    "availability_zone": "us-west-2d",
    "image": f"123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@{DIGEST}",
    "cpu_image": f"123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@{DIGEST}",
    "ami_id": "ami-0123456789abcdef0",
    "quota_vcpus": 512,
    "budget_usd": 20_000,
    "notify_emails": ["search-platform@example.com"],
}
NEVER_FIRE = [
    "cron(0 2 * * ?)",
    "cron(0 2 1 * MON *)",
    "cron(0 2 ? * ? *)",
    "cron(0 2 ? * 2#6 *)",
    "cron(0/0 2 * * ? *)",
    "cron(0 2 30,31 2 ? *)",
    "cron(0 2 31W 11 ? *)",
    "cron(0 2 * * ? 2020-2023,2025)",
]
FIRE = [
    "cron(30 14 ? * MON-FRI *)",
    "cron(0/15 0-6,22 * * ? *)",
    "cron(0 2 L * ? *)",
    "cron(0 2 ? 1/3 3#2 *)",
    "cron(0 2 31 2,3 ? *)",
]
MISTAKES: list[tuple[str, Any, str]] = [
    ("shares", {"production": 1, "prod-1": 1}, "prod-1, production; expected letters and digits only"),
    ("shares", {"production": 1, "prod*": 1}, "another one with * covers"),
    ("shares", {"production": 0}, "the weights 0; expected 0.0001 to 999.9999"),
    ("shares", {"experiments": 1}, 'share_identifier is "production"; expected one of shares (experiments)'),
    ("share_identifier", "nightly", "expected one of shares (backfills, experiments, production)"),
    ("driver_attempts", 11, "driver_attempts is 11; expected a whole number from 1 to 10"),
    ("max_nodes", 5, "max_nodes is 5, which needs 640 vCPU of trn1.32xlarge, and quota_vcpus is 512"),
    (
        "instance_type",
        "trn9.xl",
        "expected one of trn1.2xlarge, trn1.32xlarge, trn1n.32xlarge, trn2.3xlarge, trn2.48xlarge, trn2u.48xlarge",
    ),
    ("image", "registry/relevance:latest", "expected repository@sha256:"),
    ("settings_files", ["configs/base"], "expected configs/<name>.toml"),
    ("embed_on_trainium", True, "embed_on_trainium is true, settings_files are"),
    (
        "settings_files",
        ["configs/base.toml", "configs/jobs/trn1.toml", "configs/jobs/embed-trn1.toml"],
        "embed_on_trainium is false",
    ),
    ("job_environment", {"AWS_BATCH_X": "1"}, "expected names of variables that do not begin with AWS_BATCH"),
    ("watch_expression", "rate(2 days)", "expected a rate such as"),
    ("name", "Relevance", "expected 2 to 31 lower-case letters"),
    ("region", "Oregon", 'region is "Oregon"'),
    ("availability_zone", "us-east-1a", "expected a zone of us-west-2"),
    ("vpc_cidr", "10.20.0.0/28", "from /16 to /24"),
    ("ami_id", "", 'ami_id is ""; expected ami-<hex digits>, chosen and not the newest'),
    ("capacity_block_id", "block", "expected cr-"),
    ("cpu", {"instance_types": []}, "expected at least one instance type"),
    ("sagemaker_instances", 4, "sagemaker_instances is 4 and sagemaker is false; expected sagemaker = true"),
    ("signing_key_arn", "alias/sign", "expected the ARN of one key"),
    ("data", [{"bucket": "s3://logs", "prefix": ""}], "expected names without s3://"),
    ("data", [{"bucket": "logs", "prefix": "a/b/"}], "expected no / at either end"),
    ("notify_emails", [], "an alarm that nobody hears"),
    ("budget_usd", -1, "expected 0 or more"),
    ("schedule_expression", "rate(1 day)", "expected six in cron("),
    ("schedule_expression", "cron(0 2 * * ? 2025)", "its last year has passed"),
]


def refused(variables: Terraform, folder: Path, **changed: Any) -> str:
    """What Terraform says to changes of what is good, on one line; empty when it takes the values."""
    values = folder / "values.tfvars.json"
    values.write_text(json.dumps(GOOD | changed))
    done = variables.run("plan", "-input=false", "-no-color", "-lock=false", f"-var-file={values}")
    if done.returncode == 0:
        return ""
    assert "Invalid value for variable" in done.stderr, done.stderr
    return " ".join(done.stderr.split())


TRN2 = {"instance_type": "trn2.48xlarge", "max_nodes": 2, "quota_vcpus": 384, "capacity_block_id": "cr-0123456789"}
SMALL_TRN2 = {"instance_type": "trn2.3xlarge", "max_nodes": 1, "quota_vcpus": 12}
FLEET = {"max_nodes": 20, "quota_vcpus": 2560, "vpc_cidr": "10.20.0.0/24"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        (
            {
                "instance_type": "trn1.2xlarge",
                "max_nodes": 64,
                "shares": {"production": 1, "x*": 2},
            },
            "",
        ),
        (TRN2, ""),
        (TRN2 | {"instance_type": "trn2u.48xlarge"}, ""),
        (SMALL_TRN2, ""),
        (SMALL_TRN2 | {"max_nodes": 2}, "max_nodes is 2, which needs 24 vCPU of trn2.3xlarge"),
        (FLEET, "too small for 20 nodes"),
        (FLEET | {"vpc_cidr": "10.20.0.0/22"}, ""),
    ],
)
def test_sizes_interfaces_and_networks(
    variables: Terraform, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    found = refused(variables, tmp_path, **changed)
    assert said in found if said else found == ""


@pytest.mark.parametrize(("name", "value", "said"), MISTAKES, ids=[f"{one[0]}={one[1]}" for one in MISTAKES])
def test_a_mistake_is_named(variables: Terraform, tmp_path: Path, name: str, value: Any, said: str) -> None:
    assert said in refused(variables, tmp_path, **{name: value})


@pytest.mark.parametrize("expression", NEVER_FIRE)
def test_a_cron_that_cannot_fire_is_refused(variables: Terraform, tmp_path: Path, expression: str) -> None:
    assert f'schedule_expression is "{expression}"' in refused(variables, tmp_path, schedule_expression=expression)


@pytest.mark.parametrize("expression", FIRE)
def test_a_cron_that_fires_is_taken_here_and_by_our_parser(
    variables: Terraform, tmp_path: Path, expression: str
) -> None:
    assert refused(variables, tmp_path, schedule_expression=expression) == ""
    assert parse_schedule(expression).expression == expression


def test_the_example_is_right_but_for_the_machine_image_that_it_leaves_to_choose(variables: Terraform) -> None:
    plan = ("plan", "-input=false", "-no-color", "-lock=false", f"-var-file={INFRA / 'example.tfvars'}")
    told = variables.run(*plan).stderr
    assert told.count("Invalid value for variable") == told.count('ami_id is ""; expected') == 1, told
    variables.must(*plan, "-var=ami_id=ami-0123456789abcdef0")


def test_ports_that_hosts_keep_free_hold_that_of_torchrun() -> None:
    text = (INFRA / "modules" / "compute" / "user_data.mime.tftpl").read_text()
    kept = next(line for line in text.splitlines() if "ip_local_reserved_ports=" in line).partition("=")[2]
    assert str(MASTER_PORT) in kept.split(",")


def test_sizes_of_instances_are_those_that_plans_are_checked_with() -> None:
    known = json.loads((INFRA / "trainium.json").read_text())
    sizes = {name: (node.vcpus, node.num_efa) for name, node in NODES.items()}
    assert known.keys() == NODES.keys()
    assert known == {name: dict(zip(("vcpus", "efa_interfaces"), sizes[name], strict=True)) for name in known}


def test_files_are_formatted(tmp_path: Path) -> None:
    require_terraform()
    done = Terraform(INFRA, environment_for(tmp_path)).run("fmt", "-check", "-recursive", "-diff", "-no-color")
    assert done.returncode == 0, f"terraform -chdir=infra fmt -recursive would change:\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_its_own_tests_pass(infra: Terraform) -> None:
    """`terraform test` validates first; its providers are mocks."""
    said = infra.must("test", "-no-color")
    assert "Success!" in said and ", 0 failed" in said, said


def test_names_of_job_variables_may_contain_two_underscores() -> None:
    """`local.environment` in settings.tf has them as one variable in JSON."""
    wanted = {"TRNPIPE_REGISTRY__VERIFY_KEY": "awskms:///key", "AWS_DEFAULT_REGION": "us-west-2"}
    env = {"TRNPIPE_JOBS__ENVIRONMENT": json.dumps(wanted)}
    assert resolve((), env, [], model=CycleSettings).settings.jobs.environment == wanted
