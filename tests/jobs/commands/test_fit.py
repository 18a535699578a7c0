"""What would not run on the planned machines is said before Terraform makes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs import cli

CONFIGS = Path(__file__).parents[3] / "configs"
FLEET = [
    {"queue": "trainium", "type": "EC2", "max_vcpus": 512, "instance_types": ["trn1.32xlarge"], "shares": ["prod"]},
    {"queue": "cpu", "type": "SPOT", "max_vcpus": 64, "instance_types": ["m7i.4xlarge"], "shares": ["prod"]},
]
IMAGE = "1234.dkr.ecr.us-east-1.amazonaws.com/trnpipe@sha256:" + "0" * 64
ON_CPU = {name: {"queue": "cpu"} for name in ("prepare", "embed", "verify", "report")}
SCHEDULE = {"expression": "cron(0 2 * * ? *)", "timezone": "UTC"}


def planned(path: Path, files: Sequence[str] = ("base.toml", "jobs/trn1.toml"), **jobs: Any) -> Path:
    """The part of a plan that is read, as `terraform show -json` writes it; ARNs are not known yet."""
    told = {"image": IMAGE, "queue": "trainium", "share_identifier": "prod", "schedule": SCHEDULE, "role": None}
    settings = {"workspace": "s3://bucket/relevance", "jobs": {"name": "relevance", **told, **ON_CPU, **jobs}}
    changes = {
        "fleet": {"actions": ["create"], "after": FLEET},
        "settings": {"actions": ["create"], "after": settings, "after_unknown": {"jobs": {"role": True}}},
        "settings_files": {"actions": ["create"], "after": [str(CONFIGS / name) for name in files]},
    }
    path.write_text(json.dumps({"format_version": "1.2", "output_changes": changes}))
    return path


def fit(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = cli.main(["fit", str(path), *flags])
    seen = capsys.readouterr()
    return code, seen.out + seen.err


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, ""),
        # Terraform writes an element that it does not know yet as null.
        ({"sagemaker": {"subnets": [None], "security_groups": [None]}}, ""),
        ({"share_identifier": "other"}, "warning: share identifier other is not in the policy of queue cpu"),
    ],
)
def test_the_preset_fits_what_infra_makes(
    changes: dict[str, Any], first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = fit(planned(tmp_path / "plan.json", **changes), capsys)
    assert code == 0 and text.startswith(first)
    assert "8 jobs fit the planned queues; the first cycle by the schedule is 2" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "flag", "seen"),
    [
        ({"schedule": {"timezone": "Mars/Base"}}, "", "Mars/Base"),
        ({}, "--jobs.health.nodes=5", "health: 640 vCPU at once; the compute environments of trainium go up to 512"),
        ({}, "--jobs.train.instance=trn1n.32xlarge", "instance type trn1n.32xlarge"),
        ({"share_identifier": "prod-1"}, "", "share identifier 'prod-1'"),
        ({"health": {"queue": "cpu"}}, "", "4 nodes; they need a managed on-demand EC2 compute environment"),
        ({"report": {"queue": "nobody"}}, "", "queue nobody: does not exist"),
        ({}, "--train.global-batch-size=1000", "a global batch of 1000 over 128 ranks"),
        ({"files": ["none.toml"]}, "", "none.toml: No such file"),
    ],
)
def test_what_would_not_run_is_refused(
    changes: dict[str, Any], flag: str, seen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = fit(planned(tmp_path / "plan.json", **changes), capsys, *([flag] if flag else []))
    assert (code, seen in text, "Traceback" in text) == (78, True, False), text


def test_what_terraform_says_takes_the_place_of_what_files_say_as_on_a_laptop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mapping is replaced whole, as by --config build/infra.json."""
    (tmp_path / "ours.toml").write_text('[jobs.environment]\nAWS_BATCH_X = "1"\n')
    files = ("base.toml", "jobs/trn1.toml", str(tmp_path / "ours.toml"))
    code, text = fit(planned(tmp_path / "plan.json", files), capsys)
    assert (code, "AWS_BATCH_X" in text) == (78, True)
    code, text = fit(planned(tmp_path / "plan.json", files, environment={"AWS_DEFAULT_REGION": "us-east-1"}), capsys)
    assert code == 0, text


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (None, "No such file"),
        ("not JSON", "Invalid JSON"),
        ('{"output_changes": {"fleet": {"after": []}}}', "output_changes.settings: Field required"),
    ],
)
def test_what_is_no_plan_is_refused(
    content: str | None, seen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    code, text = fit(path, capsys)
    assert (code, seen in text, "terraform -chdir=infra show -json" in text) == (78, True, True), text
