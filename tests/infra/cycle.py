"""A whole cycle as its jobs run it on AWS: every job a process of its own, under its role, with all of it on moto.

`python -m tests.infra.cycle FILE [graphs]` writes what was seen: a process of its own, since moto keeps one world.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import moto.core.config
import pyarrow as pa
import pyarrow.parquet as pq
from moto.batch.models import batch_backends
from moto.core.models import DEFAULT_ACCOUNT_ID
from pydantic import TypeAdapter

from jobs.plan.dag import Plan
from pipeline.data import synthetic
from pipeline.data.config import SyntheticConfig
from tests.fault.harness import DATA, MODEL, TRAIN
from tests.infra.iam import Request
from tests.infra.policies import Fleet, Input
from tests.infra.recorder import Call, Recorder
from tests.jobs.targets.batch.moto_account import make_account
from tests.s3 import s3_env

INPUT_KEY = "arn:aws:kms:us-east-1:123456789012:key/shop"
FLEET = Fleet(queues=("relevance",), data=(Input("shop", "esci", INPUT_KEY),))
WORKSPACE = "s3://bucket/relevance"
FIRST, SECOND = "2026-11-19", "2026-11-20"
ROLES = {"mine": "embed", "evaluate": "promote", "embed": "embed", "verify": "embed", "report": "report"}
"""Of the stages that have another role than jobs.role."""
_GIVEN = (
    *(flag for flag in (*DATA, *MODEL, *TRAIN) if "synthetic" not in flag and "max-steps" not in flag),
    f"--workspace={WORKSPACE}",
    "--backend=cpu",
    "--data.path=s3://shop/esci",
    "--data.test-fraction=0.3",
    "--train.start=incumbent",
    "--mine.enabled=true",
    "--mine.queries-per-part=16",
    "--train.mined-per-query=1",
    "--train.max-steps=40",
    "--train.evaluate-every=20",
    "--checkpoint.every-steps=10",
    "--checkpoint.keep-last=1",
    "--evaluate.save-every-s=0.01",
    "--evaluate.retrieval.window-rows=100",
    "--gate.min-queries=10",
    "--gate.resamples=200",
    "--gate.first-baselines=warn",  # 40 steps do not make a model that beats BM25
    "--evaluate.retrieval.catalogue=s3://shop/esci",
    "--embed.output.rows-per-part=300",
    "--embed.tokenise-processes=1",
    "--embed.verify.sample=20",
    "--health.burn-s=0.1",
    "--health.sweep-mib=64",
    "--model-name=relevance",
    "--jobs.target=batch",
    "--jobs.name=relevance",
    "--jobs.queue=relevance",
    "--jobs.share-identifier=production",
    "--jobs.image=123456789012.dkr.ecr.us-east-1.amazonaws.com/trnpipe@sha256:0",
    f"--jobs.role={FLEET.role_arn('train')}",
    *(f"--jobs.{stage}.role={FLEET.role_arn(role)}" for stage, role in ROLES.items()),
    "--jobs.train.nodes=2",
    "--jobs.train.instance=trn1.32xlarge",
    "--jobs.mine.workers=2",
    "--jobs.embed.workers=2",
    "--jobs.sla-s=3600",
    "--jobs.schedule.expression=cron(0 2 * * ? *)",
    "--jobs.schedule.max-late-s=1000000000",
)
_BARS = {"max-loss": 9, "max-first-loss": 9, "max-first-gradient": 9, "max-probability": 1, "mean-probability": 1}
PARITY = (
    "--parity.steps=4",
    "--parity.evaluate-every=2",
    "--parity.rows=40",
    "--parity.vector-rows=20",
    # What it may write is of interest here, not the numbers of this machine.
    "--parity.max-difference=9",
    *(f"--parity.reduced.{name}-difference={bar}" for name, bar in _BARS.items()),
    *(f"--parity.reduced.min-{name}=0" for name in ("correlation", "cosine", "overlap")),
)
FLAGS = tuple({flag.partition("=")[0]: flag for flag in _GIVEN}.values())
_DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PYTEST_XDIST_WORKER")
_PROGRAMS = {"trnjobs-entry": "jobs.node", "trnpipe": "pipeline", "trnjobs": "jobs"}
LIMIT_S = 150
POINTER = "registry/relevance/production.json"
ROOT = Path(__file__).parents[2]


@dataclass
class Account:
    """The server, and how to run things in it."""

    server: Recorder
    folder: Path

    def driver(self, command: str, *, scheduled: str = "") -> str:
        """`trnjobs driver` or `trnjobs reconcile` as the schedules start them; what it printed."""
        more = {"TRNJOBS_SCHEDULED_TIME": f"{scheduled}T02:00:00Z"} if scheduled else {}
        words = ["trnjobs-entry", "--", "trnjobs", command, *FLAGS]
        return self.run("driver", words, "driver", {"TRNPIPE_WORKSPACE": WORKSPACE} | more)

    def job(self, name: str, *, index: int | None = None, words: tuple[str, ...] = (), code: int = 0) -> str:
        """One job of the first cycle, with the command of the plan (or `words`); what it printed."""
        job = self.plan(FIRST).job(name)
        env = {"TRNPIPE_CYCLE": FIRST, "TRNPIPE_WORKSPACE": WORKSPACE, "TRNJOBS_JOB": name}
        if index is not None:
            env["AWS_BATCH_JOB_ARRAY_INDEX"] = str(index)
        command = [*job.command[:2], *words] if words else [*job.command]
        return self.run(ROLES.get(name, "train"), command, f"{name}-{index}", env, code=code)

    def run(self, role: str, words: list[str], machine: str, env: Mapping[str, str], *, code: int = 0) -> str:
        """As a role, on a machine that holds nothing of the others."""
        usual = {key: value for key, value in os.environ.items() if key not in _DROPPED and "TRNPIPE" not in key}
        usual |= s3_env(self.server.url) | {"AWS_ACCESS_KEY_ID": role, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}
        usual["XDG_CACHE_HOME"] = str(self.folder / machine)
        command = [part for word in words for part in _words(word)]
        ended = subprocess.run(
            command, env={**usual, **env}, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        said = ended.stdout + ended.stderr
        assert ended.returncode == code, f"{role}: {' '.join(words)}: exit {ended.returncode}\n{said}{self._refused()}"
        return said

    def plan(self, cycle: str) -> Plan:
        """As it was submitted."""
        return Plan.model_validate_json(self.read(f"cycles/{cycle}/jobs/plan.json"))

    def read(self, key: str) -> bytes:
        found: bytes = self.server.client.get_object(Bucket=FLEET.bucket, Key=f"relevance/{key}")["Body"].read()
        return found

    def keys(self, prefix: str) -> list[str]:
        found = self.server.client.get_paginator("list_objects_v2").paginate(
            Bucket=FLEET.bucket, Prefix=f"relevance/{prefix}"
        )
        return [one["Key"].removeprefix("relevance/") for page in found for one in page.get("Contents", ())]

    def remove(self, key: str) -> None:
        self.server.client.delete_object(Bucket=FLEET.bucket, Key=f"relevance/{key}")

    def backdate(self, key: str) -> None:
        """As if the jobs had been seen blocked long ago."""
        place = {"Bucket": FLEET.bucket, "Key": f"relevance/{key}"}
        seen = json.loads(self.server.client.get_object(**place)["Body"].read())
        text = json.dumps([one | {"since": 0.0} for one in seen])
        self.server.client.put_object(**place, Body=text.encode())

    def set_jobs(self, cycle: str, status: str, reason: str | None = None, *, only: str = "") -> None:
        """What moto does not do: its jobs succeed at once."""
        for job in batch_backends[DEFAULT_ACCOUNT_ID][FLEET.region]._jobs.values():
            if cycle in job.job_name and job.job_name.endswith(only):
                job.status, job.job_stopped, job.job_stopped_reason = status, status == "SUCCEEDED", reason

    def _refused(self) -> str:
        return "".join(f"\nrefused {one}: {[str(asked) for asked in one.refused]}" for one in self.server.refused())


@contextmanager
def account_of(folder: Path) -> Iterator[Account]:
    """With a queue, an empty workspace and an input of two days."""
    moto.core.config.default_user_config["batch"] = {"use_docker": False}
    with Recorder(FLEET) as server:
        os.environ |= s3_env(server.url)
        make_account()
        server.client.create_bucket(Bucket="shop")
        config = SyntheticConfig(num_queries=40, num_days=2)
        for day in synthetic.partitions(config):
            sink = BytesIO()
            pq.write_table(pa.Table.from_batches(list(synthetic.generate(config, day)), synthetic.SCHEMA), sink)
            server.client.put_object(Bucket="shop", Key=f"esci/{day}/part-0.parquet", Body=sink.getvalue())
        yield Account(server, folder)


def run_cycle(account: Account) -> None:
    """The driver, every job under its role, the report, the next driver and the watch."""
    account.driver("driver", scheduled=FIRST)
    account.set_jobs(FIRST, "RUNNING")
    account.remove(f"cycles/{FIRST}/jobs/closed.json")
    for name in ("prepare", "health", "compile"):
        account.job(name)
    for index in (0, 1):
        account.job("mine", index=index)
    for name in ("train", "evaluate"):
        account.job(name)
    for index in (0, 1):
        account.job("embed", index=index)
    for name in ("verify", "report"):
        account.job(name)
    # docs/operate.md has it run as a job of the stage `train`: nobody can log in to a machine.
    account.job("train", words=("trnpipe", "parity", "cpu:fp32", "cpu:bf16", *PARITY))
    for name in ("train", "evaluate", "verify", "report"):  # one of each role explains its failure
        account.job(name, words=("sh", "-c", "exit 3"), code=3)
    account.set_jobs(FIRST, "SUCCEEDED")
    account.driver("driver", scheduled=SECOND)
    account.set_jobs(SECOND, "RUNNABLE", "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT", only="-train")
    account.remove(f"cycles/{SECOND}/jobs/closed.json")
    account.driver("reconcile")
    account.backdate(f"cycles/{SECOND}/jobs/blocked.json")
    account.driver("reconcile")


def compile_graphs(account: Account) -> None:
    """What only a backend that compiles writes."""
    account.driver("driver", scheduled=FIRST)
    account.job("prepare")
    account.job("compile", words=("trnpipe", "compile", "--backend=xla"))


@dataclass(frozen=True)
class Seen:
    """What was asked, and what is in the workspace at the end."""

    calls: tuple[Call, ...]
    keys: tuple[str, ...]
    production: str
    """The pointer to the promoted model."""

    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.refused]

    def asked(self, role: str) -> list[Request]:
        return list({str(one): one for call in self.calls if call.role == role for one in call.asked}.values())

    def below(self, prefix: str) -> list[str]:
        return [key.removeprefix(prefix) for key in self.keys if key.startswith(prefix)]


SEEN = TypeAdapter(Seen)


def seen_by(folder: Path, *words: str) -> Seen:
    """Run this file."""
    file = folder / "seen.json"
    command = [sys.executable, "-m", "tests.infra.cycle", str(file), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return SEEN.validate_json(file.read_bytes())


def main(file: Path, work: Callable[[Account], object]) -> None:
    with account_of(file.parent) as account:
        work(account)
        keys = account.keys("")
        production = account.read(POINTER).decode() if POINTER in keys else ""
        file.write_bytes(SEEN.dump_json(Seen(tuple(account.server.calls), tuple(keys), production)))


def _words(word: str) -> list[str]:
    return [sys.executable, "-m", _PROGRAMS[word]] if word in _PROGRAMS else [word]


if __name__ == "__main__":
    main(Path(sys.argv[1]), compile_graphs if "graphs" in sys.argv else run_cycle)
