"""The two models of an evaluation, the candidate and what it is held against: opened, verified and scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
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
from pipeline.embed.engine import open_embedder
from pipeline.evaluate.config import QUERY_TOKENS as QUERY_EDGES
from pipeline.evaluate.golden import read_golden
from pipeline.evaluate.holdout import PARTITION, QUERY_TOKENS, Holdout
from pipeline.evaluate.report import EvaluationReport
from pipeline.evaluate.retrieval import Embed, open_catalogue
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
from pipeline.model.hf import from_hf
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.process_group import ProcessGroup
from pipeline.registry.checkpoints import locate
from pipeline.registry.records import CheckpointRef, Pointer, StoredVerdict, read_pointer
from pipeline.settings import Settings

PRODUCTION, NONE = "production", "none"
SAVE_EVERY_S = 30.0
"""Scored rows are saved this often."""


@dataclass(frozen=True)
class Models:
    """Who is judged, against whom.

    `in_workspace`: the candidate lies in this workspace, so that it can be promoted. `pointer`: what is in production
    when this attempt started. `compared` is None when there is nothing to compare with.
    """

    candidate: Checkpoint
    in_workspace: bool
    pointer: Pointer | None
    compared: Checkpoint | None
    against_production: bool

    def inputs(self, settings: Settings, ctx: StageContext, sets: Sequence[TokenSet]) -> dict[str, str]:
        """Name what is judged by what: all that decides the verdict, and whether it is acted on.

        Reads a catalogue file and golden queries for their fingerprints. Raises DataError when there is none.
        """
        dimensions, chunks = settings.embed.output.dimensions, settings.embed.chunks
        retrieval, precision = settings.evaluate.retrieval, settings.embed.precision
        path = retrieval.catalogue if retrieval.enabled else None
        states = [one.state for one in (self.candidate, self.compared) if one]
        limit = max(settings.embed.row_limit(state.max_tokens, state.model.max_positions) for state in states)
        # All but what is done with the verdict; settings that are gone count as before, so that verdicts stand.
        asked = with_retired(settings.evaluate) | {"vector_rows": 512}
        asked["retrieval"] |= {"window_rows": 16_384}
        apart = ("promote", "force_reason", "candidate", "golden")
        asked = {name: value for name, value in asked.items() if name not in apart}
        golden = [one.model_dump(mode="json") for one in read_golden(settings, ctx.stop)]
        gate = {name: value for name, value in with_retired(settings.gate).items() if name != "golden"}
        # What is as it is by default is left out, so that verdicts of earlier versions stand.
        more = {
            "dimensions": dimensions,
            "chunks": chunks if chunks > 1 else "",
            "embed_precision": precision if precision != "fp32" else "",
            "row_tokens": limit,
            "catalogue": open_catalogue(retrieval, path, ctx.stop).content if path else "",
            "golden": fingerprint([settings.gate.golden, golden]) if golden else "",
        }
        return {
            "candidate": self.candidate.digest,
            "incumbent": self.compared.digest if self.compared else "",
            "data": fingerprint([token_set.info.fingerprint for token_set in sets]),
            "evaluate": fingerprint(asked),
            "gate": fingerprint(gate),
            "precision": settings.train.precision,
            "code_version": ctx.code_version,
            **{name: str(value) for name, value in more.items() if value},
        }

    def verdict(self, settings: Settings, ctx: StageContext, report: EvaluationReport) -> StoredVerdict:
        """Convert a report to what the registry keeps of it."""
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
    """Open both models. Raises ConfigError, DataError without a candidate, CheckpointError if one is damaged."""
    config = settings.evaluate
    if config.candidate:
        storage, prefix = locate(config.candidate, settings, ctx.workspace)  # the workspace itself when it lies there
    elif (trained := ctx.earlier("train")) is not None:
        storage, prefix = ctx.workspace, trained.outputs["checkpoint"]
    else:
        raise DataError(
            f"cycle {ctx.cycle} has no trained model",
            expected="the result of the train stage",
            next_command=f"trnpipe train --cycle {ctx.cycle}, with the same settings; or --evaluate.candidate NAME",
        )
    in_workspace = storage is ctx.workspace
    if not in_workspace and config.promote:
        raise ConfigError(
            f"the candidate {storage.uri(prefix)} lies outside the workspace, so it cannot be promoted",
            expected=f"a checkpoint below {ctx.workspace.uri('checkpoints')}",
            next_command="trnpipe import it first, or --no-evaluate.promote",
        )
    candidate = open_checkpoint(storage, prefix, ctx.scratch / "candidate")
    check_data(candidate, sets, "candidate", "prepare the data with its settings, or name another --evaluate.candidate")
    found = read_pointer(ctx.workspace, settings.model_name)
    pointer = found[0] if found else None
    compared, named, cache = None, config.incumbent, ctx.scratch / "incumbent"
    if named not in (NONE, PRODUCTION):
        compared = open_checkpoint(*locate(named, settings, ctx.workspace), cache)
    elif named == PRODUCTION and pointer is not None:
        try:
            compared = open_checkpoint(ctx.workspace, pointer.checkpoint, cache)
        except CheckpointError as error:
            raise CheckpointError(
                f"what is in production cannot be opened: {error.seen}",
                expected=error.expected,
                next_command="trnpipe registry rollback --reason TEXT; or --evaluate.incumbent none with"
                " --evaluate.force-reason TEXT",
            ) from error
    if compared is not None:
        hint = "--evaluate.incumbent none, and --evaluate.force-reason to promote on record"
        check_data(compared, sets, "incumbent", hint)
    return Models(candidate, in_workspace, pointer, compared, config.incumbent == PRODUCTION or pointer is None)


def check_data(checkpoint: Checkpoint, sets: Sequence[TokenSet], role: str, hint: str) -> None:
    """Raise ConfigError unless the model reads this data: its tokenizer, classes, features and lengths.

    The gains of the classes may differ: both models are ranked by those of the data.
    """
    state, info = checkpoint.state, sets[0].info
    theirs, ours = state.inputs.model_dump(exclude={"label_gains"}), spec_of(info).model_dump(exclude={"label_gains"})
    theirs["tokenizer"], ours["tokenizer"] = state.tokenizer_fingerprint, info.tokenizer_fingerprint
    for name in ("tokenizer", *theirs):
        if theirs[name] != ours[name]:
            raise ConfigError(
                f"the data has other {name} than the {role} {checkpoint.uri} was trained with:"
                f" {difference(ours[name], theirs[name])}",
                expected="data that the model can read",
                next_command=hint,
            )
    longest = max(max(int(side) for side in bucket.split("x")) for bucket in info.buckets)
    if longest > state.model.max_positions:
        raise ConfigError(
            f"the longest bucket has {longest} tokens, the {role} reads {state.model.max_positions}",
            expected="buckets that fit its position embeddings",
            next_command=hint,
        )


@dataclass
class ModelScorer:
    """Scores one model after the other, and keeps the scores in the cycle.

    Models of one architecture share a program and its graphs.
    """

    settings: Settings
    ctx: StageContext
    backend: Backend
    process_group: ProcessGroup
    _watches: dict[str, GraphWatch] = field(default_factory=dict)
    _programs: dict[str, ScoreProgram] = field(default_factory=dict)

    def run(self, role: str, checkpoint: Checkpoint, holdout: Holdout) -> tuple[ScoreSet | None, str]:
        """Scores on rank 0 (None elsewhere), and the key they lie under. Raises Preempted with what is done saved."""
        ctx = self.ctx
        key = self._key(checkpoint, holdout)
        if self.process_group.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            return load_scores(ctx.workspace, key, ctx.scratch / "scores") if ctx.world.is_main else None, key
        program, train = self._loaded(checkpoint, holdout), self.settings.train
        batch_size = min(train.micro_batch_size, train.global_batch_size)  # as in training: the same graphs
        scorer = Scorer(self.backend, self.process_group, ctx.stop, batch_size, SAVE_EVERY_S)
        folder = key.replace("/scores/", "/parts/")
        parts = PartStore.open(ctx.workspace_after_stop, folder, ctx.scratch, ctx.console.warn)

        def logits(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return {"logits": program.outputs(batch).logits}

        with ctx.console.progress(f"{role}, split {holdout.split}", holdout.order.total, "rows") as advance:
            arrays = scorer.run(logits, holdout.rows, holdout.order, parts, advance)
        if not ctx.world.is_main:
            return None, key
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
        """Texts to vectors with the encoder of a checkpoint, which is opened when the first text comes."""
        watch = self._watch(checkpoint, holdout)
        embedder = cache(
            lambda: open_embedder(checkpoint, self.backend, self.settings.embed, watch, stop=self.ctx.stop)
        )
        return lambda windows: embedder().stream(windows)

    def _loaded(self, checkpoint: Checkpoint, holdout: Holdout) -> ScoreProgram:
        """Load the weights of this model into the program of its architecture."""
        state = checkpoint.state
        with torch.device("meta"):  # structure only
            model = RelevanceModel(state.model, state.inputs)
        template = model.state_dict()
        name = _architecture(state.model)
        if name not in self._programs:
            self._programs[name] = ScoreProgram(
                model,
                self.backend,
                self.settings.train.precision,
                self._watch(checkpoint, holdout),
                has_one_rate=self.settings.train.optimizer.has_one_rate,
            )
        self._programs[name].load(from_hf(checkpoint.weights(), template, source=checkpoint.prefix))
        return self._programs[name]

    def _watch(self, checkpoint: Checkpoint, holdout: Holdout) -> GraphWatch:
        """Open the watch over graphs: they must be those of training with these settings and this architecture."""
        if not (self.backend.is_lazy or self.backend.compiles_steps):
            return GraphWatch()
        name = _architecture(checkpoint.state.model)
        if name not in self._watches:
            dropout = self.settings.model.dropout  # of no effect here, but part of the plan of training
            model = checkpoint.state.model.model_copy(update={"dropout": dropout})
            trained, spec = self.settings.model_copy(update={"model": model}), spec_of(holdout.sets[0].info)
            ranks, device = self.ctx.world.world_size, self.backend.device_name()
            plan = evaluation_plan(trained, spec, holdout.rows.buckets, ranks, device)
            self._watches[name] = open_part_guard(
                self.ctx.workspace, plan, self.backend, self.settings.compile, self.ctx.console
            )
        return self._watches[name]

    def _key(self, checkpoint: Checkpoint, holdout: Holdout) -> str:
        """Name the scores by all that decides them, so that another attempt finds those of the same question only."""
        decides: dict[str, Json] = {
            "holdout": holdout.name,
            "query_tokens": list(QUERY_EDGES),
            "precision": self.settings.train.precision,
            "device": self.backend.device_name(),
        }
        if renamed := sorted({PARTITION, QUERY_TOKENS}.intersection(holdout.sets[0].info.slice_columns)):
            decides["renamed"] = renamed
        mark = fingerprint(decides)[:8]
        return f"cycles/{self.ctx.cycle}/evaluate/scores/{holdout.split}-{checkpoint.digest[:16]}-{mark}"


def _architecture(model: ModelConfig) -> str:
    """Models of one name have the same parameters and graphs."""
    unused = ("preset", "dropout", "init_from")
    return fingerprint({name: value for name, value in model.shape().items() if name not in unused})
