"""Copy cycles to MLflow, which must be installed: a run per cycle, and a version of the model per promoted checkpoint.

A run is found by the plan of its cycle (tag `trnpipe.plan`), and a version by the digest of its checkpoint (tag
`trnpipe.digest`). The tag `trnpipe.content` is a fingerprint of everything that was logged, and is written last. If it
is missing or differs, the values that MLflow does not have yet are logged.
"""

import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from jobs.commands.mirror import MLFLOW, StoredCycle, request_error
from jobs.cycle.costs import read_cycle_events
from jobs.cycle.page.gather import curves_of
from jobs.cycle.page.publish import outcome_sentence, report_key
from jobs.cycle.tables import value_text
from jobs.settings import values_of
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.io.storage import Storage
from pipeline.registry.records import list_models, production_changes, read_history, read_pointer
from pipeline.telemetry.events import EventName

ADDRESS = "MLFLOW_TRACKING_URI"
PLAN, CONTENT, DIGEST = "trnpipe.plan", "trnpipe.content", "trnpipe.digest"
PRODUCTION = "production"
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Maximum numbers of values in one request, which are limits of MLflow."""
_NOT_ALLOWED = re.compile(r"[^\w.-]+")
_STATUS = {"succeeded": "FINISHED", "refused": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MLflowMirror:
    """The MLflow server at MLFLOW_TRACKING_URI."""

    def __init__(self) -> None:
        """Create a client. Raises ConfigError if MLFLOW_TRACKING_URI is not set."""
        self._address = os.environ.get(ADDRESS, "")
        if not self._address:
            raise ConfigError(
                f"{ADDRESS} is not set",
                expected="the address of an MLflow server, or a database such as sqlite:///mlflow.db",
                next_command=f"export {ADDRESS}=http://localhost:5000, then trnjobs mirror --to {MLFLOW}",
            )
        # By default, requests are repeated 7 times, so it takes minutes to find out that a server is down.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client = MlflowClient()

    def send(self, cycle: StoredCycle) -> str:
        """Log the values of a cycle that its run does not have, and register its checkpoint if it was promoted."""
        with self._requests():
            run = self._find_run(cycle)
            status = self._log(cycle, run)
            self._register(cycle, run)
            return status

    def finish(self, storage: Storage) -> list[str]:
        """Move the alias `production` of each model to its production checkpoint, or delete it if that is not known."""
        lines = list[str]()
        for model in list_models(storage):
            stored = read_pointer(storage, model)
            with self._requests():
                registered = self._client.search_registered_models(filter_string=f"name = '{model}'")
                if stored is None or not registered:
                    continue
                pointer, current = stored[0], registered[0].aliases.get(PRODUCTION)
                version = self._versions(model).get(pointer.digest)
                if version is not None:
                    if str(current) != str(version):
                        self._client.set_registered_model_alias(model, PRODUCTION, version)
                    lines.append(f"model {model}: version {version} is in production ({pointer.checkpoint})")
                    continue
                if current is not None:
                    self._client.delete_registered_model_alias(model, PRODUCTION)
            command = f"trnjobs mirror --to {MLFLOW} --cycle {pointer.cycle}"
            lines.append(f"model {model}: {pointer.checkpoint} is in production, but not in MLflow (next: {command})")
        return lines

    @contextmanager
    def _requests(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            raise request_error(MLFLOW, self._address, error, error.get_http_status_code()) from error
        except OSError as error:  # artifacts are sent by requests, whose errors are OSErrors
            raise request_error(MLFLOW, self._address, error) from error

    def _find_run(self, cycle: StoredCycle) -> Run:
        """Return the run of a cycle, which is created if it does not exist."""
        name, plan_id = os.environ.get("MLFLOW_EXPERIMENT_NAME") or cycle.data.model, cycle.claim.plan_id
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        for run in self._client.search_runs([experiment], f"tags.`{PLAN}` = '{plan_id}'", max_results=1):
            return run
        start_ms = round(1000 * (cycle.data.ledger.began_at or cycle.claim.claimed_at))
        return self._client.create_run(experiment, start_ms, tags={PLAN: plan_id}, run_name=cycle.name)

    def _log(self, cycle: StoredCycle, run: Run) -> str:
        data, run_id, logged = cycle.data, run.info.run_id, run.data
        params = {name: value_text(name, value) for name, value in values_of(cycle.store.settings() or {}).items()}
        tags = {
            "trnpipe.cycle": cycle.name,
            "trnpipe.workspace": data.workspace,
            "trnpipe.outcome": data.outcome,
            "trnpipe.checkpoint": data.lineage.checkpoint,
            "trnpipe.code_version": data.lineage.code_version,
            "mlflow.note.content": outcome_sentence(data),
        }
        values, curves, storage, key = figures_of(cycle), curves_at(cycle), cycle.store.storage, report_key(cycle.name)
        page = storage.read_bytes(key).decode() if storage.stat(key) else ""
        content = fingerprint([params, tags, values, curves, page])
        if logged.tags.get(CONTENT) == content:
            return f"already in run {run_id}"
        now_ms = round(1000 * cycle.store.clock())
        new = [(name, value) for name, value in values.items() if logged.metrics.get(name) != value]
        metrics = [Metric(name, value, now_ms, 0) for name, value in new]
        for name, curve in curves.items():
            history = self._client.get_metric_history(run_id, name) if name in logged.metrics else []
            known = {metric.step for metric in history}
            metrics += [Metric(name, value, at_ms, step) for step, value, at_ms in curve if step not in known]
        new_params = [Param(name, value) for name, value in params.items() if name not in logged.params]
        for start in range(0, len(new_params), MAX_PARAMS):
            self._client.log_batch(run_id, params=new_params[start : start + MAX_PARAMS])
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS])
        self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        if page:
            self._client.log_text(run_id, page, "report.html")
        if cycle.closed is None:
            self._client.update_run(run_id, status="RUNNING")
        else:
            status, end_ms = _STATUS[cycle.closed.outcome], round(1000 * cycle.closed.at)
            self._client.set_terminated(run_id, status, end_ms)
        self._client.set_tag(run_id, CONTENT, content)
        return f"{len(new_params)} settings and {len(metrics):,} metric values logged in run {run_id}"

    def _versions(self, model: str) -> dict[str, str]:
        """Return the versions of a model by the digests of their checkpoints."""
        versions = self._client.search_model_versions(f"name = '{model}'")
        return {version.tags.get(DIGEST, ""): version.version for version in versions}

    def _register(self, cycle: StoredCycle, run: Run) -> None:
        """Create a version for each checkpoint of the cycle that was promoted, unless it exists.

        The source of a version is the checkpoint. MLflow refuses local folders, so a checkpoint in a local workspace is
        represented by the artifacts of the run, which contain its path.
        """
        storage, model = cycle.store.storage, cycle.data.model
        changes = production_changes(read_history(storage, model))
        promoted = {entry.digest: entry for entry in changes if entry.cycle == cycle.name}
        for digest in promoted.keys() - (self._versions(model) if promoted else {}).keys():
            entry = promoted[digest]
            if not self._client.search_registered_models(filter_string=f"name = '{model}'"):
                self._client.create_registered_model(model)
            uri, run_id = storage.uri(entry.checkpoint), run.info.run_id
            self._client.log_dict(run_id, {"checkpoint": uri, "digest": digest}, "checkpoint.json")
            source = str(run.info.artifact_uri) if uri.startswith("file://") else uri
            tags = {DIGEST: digest, "trnpipe.checkpoint": uri, "trnpipe.step": str(entry.step)}
            self._client.create_model_version(model, source, run_id, tags=tags, await_creation_for=0)


def figures_of(cycle: StoredCycle) -> dict[str, float]:
    """Return the finite figures of all stages and of the whole cycle by the name of their metric."""
    ledger = cycle.data.ledger
    total = {"took_s": ledger.took_s, "machine_s": ledger.total.all_ms / 1000}
    if cycle.claim.target != "local":
        total["usd"] = ledger.total.usd
    figures = {**cycle.data.figures, "cycle": {**total, "goodput": ledger.total.goodput}}
    return {
        metric_key(stage, name): float(value)
        for stage, values in figures.items()
        for name, value in values.items()
        if isinstance(value, int | float) and isfinite(value)
    }


def curves_at(cycle: StoredCycle) -> dict[str, list[tuple[int, float, int]]]:
    """Return the training curves by the name of their metric, as (step, value, milliseconds since 1970)."""
    events = read_cycle_events(cycle.store.storage, cycle.name)
    reports = (EventName.TRAIN_STEPS, EventName.HOLDOUT_EVALUATED)
    times = dict(sorted((int(event.number("step")), event.at_ms) for event in events if event.name in reports))
    steps = list(times)
    return {
        metric_key("training", name): [
            (int(step), value, times[steps[bisect_left(steps, step)]]) for step, value in points if isfinite(value)
        ]
        for name, points in curves_of(events).items()
    }


def metric_key(group: str, name: str) -> str:
    """Return a name that MLflow allows for a metric, such as `evaluate/ndcg_at_10` for ndcg@10."""
    return f"{group}/{_NOT_ALLOWED.sub('_', name.replace('@', '_at_'))}"
