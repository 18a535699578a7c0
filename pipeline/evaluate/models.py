"""Open, verify and score the two models of an evaluation: the candidate and the model that it is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.compile.identity import evaluation_plan, open_part_guard
from pipeline.compile.manifest import GraphWatch
from pipeline.context import StageContext
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.core.record import with_retired
from pipeline.data.token_sets import TokenSet, spec_of
from pipeline.embed.engine import Embed, open_embedder
from pipeline.evaluate.config import QUERY_TOKENS as QUERY_EDGES
from pipeline.evaluate.golden import read_golden
from pipeline.evaluate.holdout import PARTITION, QUERY_TOKENS, Holdout
from pipeline.evaluate.report import EvaluationReport
from pipeline.evaluate.retrieval import open_catalogue
from pipeline.evaluate.score import (
    ARRAYS,
    SLICE,
    PartStore,
    ScoreInfo,
    ScoreProgram,
    Scorer,
    ScoreSet,
    load_scores,
    save_scores,
)
from pipeline.io.commit import read_manifest
from pipeline.model.config import ModelConfig, difference
from pipeline.parallel.process_group import ProcessGroup
from pipeline.registry.checkpoints import locate
from pipeline.registry.records import CheckpointRef, Pointer, StoredVerdict, read_pointer
from pipeline.settings import Settings

PRODUCTION, NONE = "production", "none"
SAVE_EVERY_S = 30.0  # how often to save the rows that have been scored so far


@dataclass(frozen=True)
class Models:
    """The candidate and the model that it is compared with.

    Attributes:
        candidate: The candidate.
        in_workspace: Whether the candidate is stored in this workspace, which is required to promote it.
        pointer: The pointer to the production model when this attempt started, if there is one.
        compared: The model to compare with, or None if there is none.
        against_production: Whether this is a comparison with production, so that the candidate may replace it.
    """

    candidate: Checkpoint
    in_workspace: bool
    pointer: Pointer | None
    compared: Checkpoint | None
    against_production: bool

    def inputs(self, settings: Settings, ctx: StageContext, sets: Sequence[TokenSet]) -> dict[str, str]:
        """Return fingerprints of everything that the verdict depends on. If none changes, the verdict stays valid.

        This includes the contents of the catalogue file and of the golden queries, if they are configured. Raises
        DataError if they cannot be read.
        """
        dimensions, chunks = settings.embed.output.dimensions, settings.embed.chunks
        retrieval, precision = settings.evaluate.retrieval, settings.embed.precision
        path = retrieval.catalogue if retrieval.enabled else None
        states = [checkpoint.state for checkpoint in (self.candidate, self.compared) if checkpoint]
        limit = max(settings.embed.row_limit(state.max_tokens, state.model.max_positions) for state in states)
        # Exclude settings that only decide what to do with the verdict. Include retired settings with their former
        # values, so that verdicts of earlier versions stay valid.
        evaluate = with_retired(settings.evaluate) | {"vector_rows": 512}
        evaluate["retrieval"] |= {"window_rows": 16_384}
        excluded = ("promote", "force_reason", "candidate", "golden")
        evaluate = {name: value for name, value in evaluate.items() if name not in excluded}
        golden = [query.model_dump(mode="json") for query in read_golden(settings, ctx.stop)]
        gate = {name: value for name, value in with_retired(settings.gate).items() if name != "golden"}
        # For the same reason, leave out settings that were added later unless they differ from their defaults.
        later = {
            "dimensions": dimensions,
            "chunks": chunks if chunks > 1 else "",
            "embed_precision": precision if precision != "fp32" else "",
            "row_tokens": limit,
            "catalogue": open_catalogue(retrieval, path, ctx.stop, settings.storage).content if path else "",
            "golden": fingerprint([settings.gate.golden, golden]) if golden else "",
        }
        return {
            "candidate": self.candidate.digest,
            "incumbent": self.compared.digest if self.compared else "",
            "data": fingerprint([token_set.info.fingerprint for token_set in sets]),
            "evaluate": fingerprint(evaluate),
            "gate": fingerprint(gate),
            "precision": settings.train.precision,
            "code_version": ctx.code_version,
            **{name: str(value) for name, value in later.items() if value},
        }

    def verdict(self, settings: Settings, ctx: StageContext, report: EvaluationReport) -> StoredVerdict:
        """Convert a report to the verdict record of the registry."""
        compared = self.compared
        inside = compared is not None and compared.uri.startswith(f"{ctx.workspace.root}/")
        return StoredVerdict(
            model=settings.model_name,
            cycle=ctx.cycle,
            candidate=CheckpointRef(checkpoint=self.candidate.prefix, digest=self.candidate.digest),
            incumbent=CheckpointRef(checkpoint=compared.prefix, digest=compared.digest)
            if compared and inside
            else None,
            promote=report.verdict.promote,
            reasons=report.verdict.reasons,
            figures=report.candidate.figures,
            checks=tuple(check.model_dump(mode="json") for check in report.verdict.checks),
            settings_hash=report.settings_hash,
            code_version=report.code_version,
            at=report.at,
        )


def find_models(settings: Settings, ctx: StageContext, sets: Sequence[TokenSet]) -> Models:
    """Open the candidate and the model to compare it with.

    Raises ConfigError if one of the models does not fit the data, and DataError if there is no candidate.
    """
    config = settings.evaluate
    if config.candidate:
        storage, prefix = locate(config.candidate, settings, ctx.workspace)
    elif (trained := ctx.earlier("train")) is not None:
        storage, prefix = ctx.workspace, trained.outputs["checkpoint"]
    else:
        raise DataError(
            f"cycle {ctx.cycle} has no trained model",
            expected="the result of the train stage",
            next_command=f"trnpipe train --cycle {ctx.cycle} with the same settings, or add --evaluate.candidate NAME",
        )
    in_workspace = storage is ctx.workspace  # `locate` returns the workspace itself for checkpoints that are inside it
    if not in_workspace and config.promote:
        raise ConfigError(
            f"the candidate {storage.uri(prefix)} is outside the workspace, so it cannot be promoted",
            expected=f"a checkpoint in {ctx.workspace.uri('checkpoints')}",
            next_command="import it first with trnpipe import, or use --no-evaluate.promote",
        )
    candidate = open_checkpoint(storage, prefix, ctx.scratch / "candidate")
    hint = "prepare the data with the settings of the candidate, or use a different --evaluate.candidate"
    check_data(candidate, sets, "candidate", hint)
    stored = read_pointer(ctx.workspace, settings.model_name)
    pointer = stored[0] if stored else None
    compared, name, cache_dir = None, config.incumbent, ctx.scratch / "incumbent"
    if name not in (NONE, PRODUCTION):
        compared = open_checkpoint(*locate(name, settings, ctx.workspace), cache_dir)
    elif name == PRODUCTION and pointer is not None:
        try:
            compared = open_checkpoint(ctx.workspace, pointer.checkpoint, cache_dir)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot open the production model: {error.seen}",
                expected=error.expected,
                next_command="trnpipe registry rollback --reason TEXT, or use --evaluate.incumbent none with"
                " --evaluate.force-reason TEXT",
            ) from error
    if compared is not None:
        hint = "use --evaluate.incumbent none, and --evaluate.force-reason to promote"
        check_data(compared, sets, "production model", hint)
    return Models(candidate, in_workspace, pointer, compared, config.incumbent == PRODUCTION or pointer is None)


def check_data(checkpoint: Checkpoint, sets: Sequence[TokenSet], role: str, hint: str) -> None:
    """Verify that the data fits a model. Raises ConfigError if not.

    Tokenizer, labels and features must be the same, and rows must not be too long for the model. Only the gains of the
    labels may differ, because both models are evaluated with the gains of the data, and the form of numbers.
    """
    state, info = checkpoint.state, sets[0].info
    model, data = state.inputs.model_dump(), spec_of(info).continuing(state.inputs).model_dump()
    model["tokenizer"], data["tokenizer"] = state.tokenizer_fingerprint, info.tokenizer_fingerprint
    for name in ("tokenizer", *model):
        if model[name] != data[name]:
            raise ConfigError(
                f"the data has a different {name} than the {role} {checkpoint.uri} was trained with:"
                f" {difference(data[name], model[name])}",
                expected="data that fits the model",
                next_command=hint,
            )
    longest = max(max(int(side) for side in bucket.split("x")) for bucket in info.buckets)
    if longest > state.model.max_positions:
        raise ConfigError(
            f"the longest bucket has {longest} tokens, but the {role} only supports {state.model.max_positions}",
            expected="buckets that fit the position embeddings of the model",
            next_command=hint,
        )


@dataclass
class ModelScorer:
    """Scores one model after the other and stores their scores in the cycle.

    Models with the same architecture share a scoring program, so that its graphs are only compiled once.
    """

    settings: Settings
    ctx: StageContext
    backend: Backend
    process_group: ProcessGroup
    _watches: dict[str, GraphWatch] = field(default_factory=dict)
    _programs: dict[str, ScoreProgram] = field(default_factory=dict)

    def run(self, role: str, checkpoint: Checkpoint, holdout: Holdout) -> tuple[ScoreSet | None, str]:
        """Score a holdout with a model, unless its scores have been stored before.

        Returns the scores (None on all ranks except rank 0) and the key they are stored under. On a stop signal, saves
        the rows that have been scored so far and raises Preempted.
        """
        ctx = self.ctx
        key = self._key(checkpoint, holdout)
        if self.process_group.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            return load_scores(ctx.workspace, key, ctx.scratch / "scores") if ctx.world.is_main else None, key
        program, train = self._loaded(checkpoint, holdout), self.settings.train
        batch_size = min(train.micro_batch_size, train.global_batch_size)  # use the same graphs as training
        scorer = Scorer(self.backend, self.process_group, ctx.stop, batch_size, SAVE_EVERY_S)
        folder = key.replace("/scores/", "/parts/")
        parts = PartStore.open(ctx.workspace_after_stop, folder, ctx.scratch, ctx.console.warn)

        def logits(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return {"logits": program.outputs(batch).logits}

        with ctx.console.progress(f"{role}, split {holdout.split}", holdout.order.total, "rows") as advance:
            arrays = scorer.run(logits, holdout.rows, holdout.order, parts, advance)
        if not ctx.world.is_main:
            return None, key
        arrays["logits"] = arrays["logits"] / checkpoint.state.temperature
        info, columns = holdout.sets[0].info, holdout.slices(arrays)
        scores = ScoreSet(
            info=ScoreInfo(
                role=role,
                checkpoint=checkpoint.uri,
                digest=checkpoint.digest,
                cycle=checkpoint.state.cycle,
                step=checkpoint.state.step,
                split=holdout.split,
                backend=self.backend.name,
                device=self.backend.device_name(),
                precision=train.precision,
                data=tuple(token_set.info.fingerprint for token_set in holdout.sets),
                labels=info.labels,
                label_gains=info.label_gains,
                rows=holdout.order.total,
                settings_hash=ctx.settings_hash,
                code_version=ctx.code_version,
            ),
            arrays={name: arrays[name] for name in ARRAYS}
            | {"label": arrays["label"].astype(np.int32)}
            | {SLICE + name: column.codes for name, column in columns.items()},
            slices={name: column.names for name, column in columns.items()},
        )
        save_scores(ctx.workspace, key, scores, ctx.scratch)
        parts.parts.delete()
        return scores, key

    def embed(self, checkpoint: Checkpoint, holdout: Holdout) -> Embed:
        """Return a function that embeds texts with a checkpoint. The model is opened when it is first called."""
        watch = self._watch(checkpoint, holdout)
        embedder = cache(
            lambda: open_embedder(checkpoint, self.backend, self.settings.embed, watch, stop=self.ctx.stop)
        )
        return lambda windows: embedder().stream(windows)

    def _loaded(self, checkpoint: Checkpoint, holdout: Holdout) -> ScoreProgram:
        """Load the weights of a checkpoint into the scoring program for its architecture, and return the program."""
        name, train, watch = _architecture(checkpoint), self.settings.train, self._watch(checkpoint, holdout)
        if name in self._programs:
            self._programs[name].load_checkpoint(checkpoint)
        else:
            self._programs[name] = ScoreProgram.of_checkpoint(
                checkpoint, self.backend, train.precision, watch, has_one_rate=train.optimizer.has_one_rate
            )
        return self._programs[name]

    def _watch(self, checkpoint: Checkpoint, holdout: Holdout) -> GraphWatch:
        """Open the guard that verifies that all graphs were compiled ahead of time, if the device compiles graphs."""
        if not (self.backend.is_lazy or self.backend.compiles_steps):
            return GraphWatch()
        name = _architecture(checkpoint)
        if name not in self._watches:
            dropout = self.settings.model.dropout  # has no effect here, but is part of the plan of the training run
            model = checkpoint.state.model.model_copy(update={"dropout": dropout})
            trained = self.settings.model_copy(update={"model": model})
            spec = spec_of(holdout.sets[0].info).continuing(checkpoint.state.inputs)
            ranks, device = self.ctx.world.world_size, self.backend.device_name()
            plan = evaluation_plan(trained, spec, holdout.rows.buckets, ranks, device)
            config = self.settings.compile
            if _shape(model) != _shape(self.settings.model):
                # Only the graphs of the architecture that is trained now were compiled ahead of time.
                config = config.model_copy(update={"on_unknown_graph": "warn"})
            self._watches[name] = open_part_guard(self.ctx.workspace, plan, self.backend, config, self.ctx.console)
        return self._watches[name]

    def _key(self, checkpoint: Checkpoint, holdout: Holdout) -> str:
        """Return the key under which to store scores. It is derived from everything that the scores depend on."""
        inputs: dict[str, Json] = {
            "holdout": holdout.name,
            "query_tokens": list(QUERY_EDGES),
            "precision": self.settings.train.precision,
            "device": self.backend.device_name(),
        }
        if renamed := sorted({PARTITION, QUERY_TOKENS}.intersection(holdout.sets[0].info.slice_columns)):
            inputs["renamed"] = renamed
        digest = fingerprint(inputs)[:8]
        return f"cycles/{self.ctx.cycle}/evaluate/scores/{holdout.split}-{checkpoint.digest[:16]}-{digest}"


def _architecture(checkpoint: Checkpoint) -> str:
    """Return a fingerprint of the architecture. If it is equal, two models have the same parameters and graphs."""
    inputs = checkpoint.state.inputs
    return fingerprint({**_shape(checkpoint.state.model), "missing": len(inputs.missing), "bins": inputs.bins})


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of a model that determine its parameters and graphs."""
    return {name: value for name, value in model.shape().items() if name not in ("preset", "dropout", "init_from")}
