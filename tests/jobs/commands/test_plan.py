"""`trnjobs plan` and `fit` as they are typed, with the shipped settings for Trainium."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session
from botocore.validate import ParamValidator

from jobs import cli
from jobs.cycle.cycle_store import CycleStore
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.test_costs import attempt, record

CONFIGS = Path(__file__).parents[3] / "configs"
TRN1 = [f"--config={CONFIGS / 'base.toml'}", f"--config={CONFIGS / 'jobs' / 'trn1.toml'}", "--cycle=2026-11-20"]
WHERE = ["--workspace=s3://bucket/relevance", "--jobs.queue=trn1", "--jobs.share-identifier=production"]
IMAGE = "--jobs.image=1234.dkr.ecr.us-west-2.amazonaws.com/trnpipe@sha256:" + "0" * 64


def test_the_exact_requests_are_those_aws_batch_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *TRN1, *WHERE, IMAGE, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    model = Session().get_service_model("batch")
    for requests in shown:
        for operation, request in requests.items():
            report = ParamValidator().validate(request, model.operation_model(operation).input_shape)
            assert not report.has_errors(), report.generate_report()
    train = next(one for one in shown if one["SubmitJob"]["jobName"].endswith("-train"))
    (nodes,) = train["RegisterJobDefinition"]["nodeProperties"]["nodeRangeProperties"]
    assert len(nodes["container"]["linuxParameters"]["devices"]) == 16 + 8
    assert train["SubmitJob"]["nodeOverrides"]["numNodes"] == 4


def test_no_job_is_ended_before_its_stage_would_end_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """A try that is ended by its time limit is never repeated; one that ends itself is."""
    longer = ["--health.check-limit-s=600", "--compile.time-limit-s=100000"]
    assert cli.main(["plan", *TRN1, *WHERE, IMAGE, "--json", *longer]) == 0
    definitions = [one["RegisterJobDefinition"] for one in json.loads(capsys.readouterr().out)]
    limits = {one["tags"]["stage"]: one["timeout"]["attemptDurationSeconds"] for one in definitions}
    assert limits["health"] > 10 * 5 * 600 and limits["compile"] > 100_000
    assert cli.main(["plan", *TRN1, *WHERE, IMAGE, "--jobs.compile.timeout-s=7200"]) == 78
    error = capsys.readouterr().err
    assert "jobs.compile.timeout_s is 7,200, but the stage may take 16,200 s" in error and "no timeout_s" in error
    on_cpu = ["--jobs.health.instance=", "--jobs.compile.instance=", "--backend=cpu"]
    assert cli.main(["plan", *TRN1, *WHERE, IMAGE, *on_cpu, "--jobs.health.timeout-s=1200", "--cycle=c"]) == 0


@pytest.mark.parametrize(
    ("files", "instance"),
    [
        *(([preset, "jobs/trn1"], "trn1.32xlarge") for preset in ("small", "base", "large")),
        (["base", "jobs/trn2"], "trn2.48xlarge"),
        (["base", "jobs/trn2", "jobs/trn2-nodes"], "trn2u.48xlarge"),
    ],
)
def test_every_preset_can_be_trained_on_the_fleets_of_the_examples(files: list[str], instance: str) -> None:
    words = [f"--config={CONFIGS / name}.toml" for name in files]
    words += [f"--jobs.{name}.instance={instance}" for name in ("health", "compile", "train", "evaluate")]
    assert cli.main(["plan", *words, "--cycle=2026-11-20", *WHERE, IMAGE, "--target=batch"]) == 0


@pytest.mark.parametrize(
    ("flags", "seen", "next_command"),
    [
        (
            ["--jobs.compile.nodes=1"],
            "jobs.compile has 32 ranks (nodes x processes), but jobs.train has 128",
            "--jobs.compile.nodes 4 --jobs.compile.processes 32",
        ),
        (
            ["--jobs.evaluate.processes=8"],
            "jobs.evaluate has 8 ranks, but graphs are compiled for 32, 128",
            "--compile.scoring-ranks 32,8",
        ),
        (["--train.global-batch-size=2000"], "a global batch of 2000", "--train.global-batch-size 2048"),
        (
            ["--mine.enabled=true", "--jobs.mine.instance=trn1.2xlarge", "--jobs.mine.memory-mib=28000"],
            "jobs.mine has 1 ranks, but graphs are compiled for 32, 128",
            "--compile.scoring-ranks 32,1",
        ),
    ],
)
def test_ranks_that_no_graph_is_compiled_for_are_refused(
    flags: list[str], seen: str, next_command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *TRN1, *flags, *WHERE, IMAGE, "--cycle=c"]) == 78
    error = capsys.readouterr().err
    assert seen in error and f"next: {next_command}" in error
    mended = [f"{flag}={value}" for flag, value in zip(*[iter(next_command.split())] * 2, strict=True)]
    assert cli.main(["plan", *TRN1, *flags, *mended, *WHERE, IMAGE, "--cycle=c"]) == 0
    warns = cli.main(["plan", *TRN1, *flags, "--compile.on-unknown-graph=warn", *WHERE, IMAGE, "--cycle=c"])
    assert warns == (0 if "ranks" in seen else 78)


def test_a_cycle_that_mines_has_an_array_for_it_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mine.enabled=true", "--train.mined-per-query=2"]
    assert cli.main(["plan", *TRN1, "--workspace=build/none", "--target=local", *flags]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert (rows["mine"][:4], rows["train"][0]) == (["compile", "array", "of", "8"], "mine")
    assert cli.main(["plan", *TRN1, *WHERE, IMAGE, *flags, "--json"]) == 0
    names = [one["SubmitJob"]["jobName"] for one in json.loads(capsys.readouterr().out)]
    assert [name.rpartition("-")[2] for name in names[2:5]] == ["compile", "mine", "train"]


def test_the_expected_durations_are_those_of_the_newest_cycles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten of 10 minutes, after eleven that sort behind them by name, one of which has a damaged claim."""
    names = [*(f"check-{number:02}" for number in range(11)), *(f"2026-11-{day}" for day in range(10, 20))]
    for claimed_at, name in enumerate(names, 1):
        store = CycleStore(open_storage(str(tmp_path)), name, partial(float, claimed_at))
        with store.submitting(plan(job("prepare")).model_copy(update={"cycle": name}), "local", "me"):
            took_s = 60 if name.startswith("check-") else 600
            store.save_records((record("prepare", attempt(1010, 1010 + took_s, 0), created_at=1000.0),))
    (tmp_path / "cycles/check-05/jobs/claim.json").write_text("{")
    result: dict[str, Any] = {"stage": "prepare", "cycle": "2026-11-19", "status": "done", "inputs": {}}
    result |= {"settings_hash": "", "code_version": "", "figures": {"few_queries": "split test has 13 queries"}}
    result |= dict.fromkeys(("started", "finished"), "2026-11-20T02:00:00Z")
    (tmp_path / "cycles/2026-11-19/prepare").mkdir()
    (tmp_path / "cycles/2026-11-19/prepare/result.json").write_text(json.dumps(result))
    assert cli.main(["plan", f"--workspace={tmp_path}", "--cycle=c1", "--target=local"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "warning: cycle 2026-11-19: split test has 13 queries"
    (line,) = (line for line in text.splitlines() if line.startswith("prepare "))
    assert "10m00s" in line and max(map(len, text.splitlines())) <= 160, text


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ([IMAGE, "--jobs.share-identifier=prod-1"], "every job: share identifier 'prod-1'"),
        ([IMAGE, "--jobs.queue="], "every job: no queue"),
        ([], "every job: image name has 0 characters"),
        ([IMAGE, "--cycle=2026.11.20"], "expected letters, digits, - and _"),
        (
            [IMAGE, "--jobs.train.memory-mib=600000"],
            "but trn1.32xlarge only has 128 and 490,000, so it would never start",
        ),
        ([IMAGE, "--jobs.train.attempts=11"], "jobs.train.attempts = '11'"),
        ([IMAGE, "--jobs.environment=" + "X=" + "y" * 25_000], "job definition has"),
        ([IMAGE, "--jobs.schedule.expression=cron(0 2 31 2 *)"], "jobs.schedule"),
        ([IMAGE, "--train.mined-per-query=2"], "train.mined_per_query is 2, but no job of the cycle mines negatives"),
        ([IMAGE, "--cycle=index"], "has the name of the page that lists all cycles"),
        ([IMAGE, "--jobs.trian.nodes=2"], "unknown setting jobs.trian.nodes"),
        ([IMAGE, "train"], "unrecognized arguments: train"),
    ],
)
def test_what_would_not_run_is_refused_before_anything_is_sent(
    words: list[str], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *TRN1, *WHERE, *words]) == 78
    err = capsys.readouterr().err
    assert seen in err and "Traceback" not in err


# What would not run on the planned machines is said before Terraform makes them.

FLEET = [
    {"queue": "trainium", "type": "EC2", "max_vcpus": 512, "instance_types": ["trn1.32xlarge"], "shares": ["prod"]},
    {"queue": "cpu", "type": "SPOT", "max_vcpus": 64, "instance_types": ["m7i.4xlarge"], "shares": ["prod"]},
]
ON_CPU = {name: {"queue": "cpu"} for name in ("prepare", "embed", "verify", "report")}
SCHEDULE = {"expression": "cron(0 2 * * ? *)", "timezone": "UTC"}


def planned(path: Path, files: Sequence[str] = ("base.toml", "jobs/trn1.toml"), **jobs: Any) -> Path:
    """The part of a plan that is read, as `terraform show -json` writes it; ARNs are not known yet."""
    told = {
        "image": IMAGE.partition("=")[2],
        "queue": "trainium",
        "share_identifier": "prod",
        "schedule": SCHEDULE,
        "role": None,
    }
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
    assert "8 jobs fit the planned queues, the first scheduled cycle is 2" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "flag", "seen"),
    [
        ({"schedule": {"timezone": "Mars/Base"}}, "", "Mars/Base"),
        (
            {},
            "--jobs.health.nodes=5",
            "health: needs 640 vCPU at once, but the compute environments of trainium have at most 512",
        ),
        ({}, "--jobs.train.instance=trn1n.32xlarge", "needs trn1n.32xlarge"),
        ({"share_identifier": "prod-1"}, "", "share identifier 'prod-1'"),
        ({"health": {"queue": "cpu"}}, "", "4 nodes need a managed on-demand EC2 compute environment"),
        ({"report": {"queue": "nobody"}}, "", "queue nobody: does not exist"),
        ({}, "--train.global-batch-size=1000", "a global batch of 1000 cannot be divided over 128 ranks"),
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
