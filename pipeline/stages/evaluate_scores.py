"""Scores of a model on a holdout, kept in the cycle: found there, or computed on all ranks."""

from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.compile.plan import open_part_guard
from pipeline.compile.watch import GraphWatch, NoWatch
from pipeline.context import StageContext
from pipeline.core.fingerprint import fingerprint
from pipeline.evaluate.holdout_rows import Holdout
from pipeline.evaluate.retrieval import Vectors
from pipeline.evaluate.score import PartStore, ScoreProgram, Scorer
from pipeline.evaluate.scores import ScoreInfo, ScoreSet, load_scores, save_scores
from pipeline.io.commit import read_manifest
from pipeline.model.config import ModelConfig
from pipeline.model.hf import from_hf
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.gang import Gang
from pipeline.settings import Settings
from pipeline.stages.shapes import Shapes
from pipeline.train.inputs import spec_of


@dataclass
class ModelScorer:
    """Scores one model after the other; models of one architecture share a program and its graphs."""

    settings: Settings
    ctx: StageContext
    backend: Backend
    gang: Gang
    _watches: dict[str, GraphWatch] = field(default_factory=dict)
    _programs: dict[str, ScoreProgram] = field(default_factory=dict)

    def run(
        self, role: str, checkpoint: Checkpoint, holdout: Holdout, vectors: Vectors, vector_rows: int
    ) -> tuple[ScoreSet | None, str]:
        """Scores on rank 0 (None elsewhere), and the key they lie under. Raises Preempted with what is done saved."""
        ctx = self.ctx
        key = self._key(checkpoint, holdout, vector_rows)
        if self.gang.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            return load_scores(ctx.workspace, key, ctx.scratch / "scores") if ctx.world.is_main else None, key
        program = self._loaded(checkpoint, holdout)
        train = self.settings.train
        scorer = Scorer(
            self.backend,
            self.gang,
            ctx.stop,
            min(train.micro_batch_size, train.global_batch_size),  # as in training: the same graphs
            self.settings.evaluate.save_every_s,
        )
        parts = PartStore(ctx.workspace_after_stop, key.replace("/scores/", "/parts/"), ctx.scratch, ctx.console.warn)
        with ctx.console.progress(f"{role}, split {holdout.split}", holdout.order.total, "rows") as advance:
            arrays = scorer.run(program.scores, holdout.rows, holdout.order, parts, advance)
        if not ctx.world.is_main:
            return None, key
        sample = vectors.sample(holdout, vector_rows)
        scores = ScoreSet(
            info=self._info(role, checkpoint, holdout, 0 if sample is None else len(sample.sample_id)),
            sample_id=arrays["sample_id"],
            query_id=arrays["query_id"],
            label=arrays["label"].astype(np.int32),
            gain=arrays["gain"],
            logits=arrays["logits"],
            slices=holdout.slices(arrays, self.settings.evaluate.query_tokens),
            vectors=sample,
        )
        save_scores(ctx.workspace, key, scores, ctx.scratch)
        parts.clear()
        return scores, key

    def vectors(self, checkpoint: Checkpoint, holdout: Holdout) -> Vectors:
        """The encoder of a model, with its graphs watched."""
        watch = self._watch(checkpoint, holdout)
        return Vectors(checkpoint, self.backend, self.settings.embed, watch, self.ctx.stop)

    def _loaded(self, checkpoint: Checkpoint, holdout: Holdout) -> ScoreProgram:
        """The program of this architecture, with the weights of this model."""
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
                holdout.rows.buckets,
                self._watch(checkpoint, holdout),
                chunk_mib=self.settings.train.chunk_mib,
                by_layer=self.settings.train.optimizer.by_layer,
            )
        self._programs[name].load(from_hf(checkpoint.weights(), template, source=checkpoint.prefix))
        return self._programs[name]

    def _watch(self, checkpoint: Checkpoint, holdout: Holdout) -> GraphWatch:
        """What holds graphs against the manifest of training with these settings and this architecture."""
        if not self.backend.is_lazy:
            return NoWatch()
        name = _architecture(checkpoint.state.model)
        if name not in self._watches:
            dropout = self.settings.model.dropout  # of no effect here, but part of the plan of training
            model = checkpoint.state.model.model_copy(update={"dropout": dropout})
            shapes = Shapes(spec_of(holdout.sets[0].info), holdout.rows.buckets)
            settings = self.settings.model_copy(update={"model": model})
            plan = shapes.scoring_plan(settings, self.ctx.world.world_size, self.backend.device_name())
            self._watches[name] = open_part_guard(
                self.ctx.workspace, plan, self.backend, self.settings.compile, self.ctx.console
            )
        return self._watches[name]

    def _key(self, checkpoint: Checkpoint, holdout: Holdout, vector_rows: int) -> str:
        """Named by all that decides the scores, so that another attempt finds those of the same question only."""
        config = self.settings.evaluate
        decides = fingerprint(
            {
                "holdout": holdout.name,
                "query_tokens": list(config.query_tokens),
                "vectors": [vector_rows, self.settings.embed.precision],
                "precision": self.settings.train.precision,
                "device": self.backend.device_name(),
            }
        )
        name = f"{holdout.split}-{checkpoint.digest[:16]}-{decides[:8]}"
        return f"cycles/{self.ctx.cycle}/evaluate/scores/{name}"

    def _info(self, role: str, checkpoint: Checkpoint, holdout: Holdout, vector_rows: int) -> ScoreInfo:
        state, info = checkpoint.state, holdout.sets[0].info
        return ScoreInfo(
            role=role,
            checkpoint=checkpoint.uri,
            digest=checkpoint.digest,
            cycle=state.cycle,
            step=state.step,
            split=holdout.split,
            backend=self.backend.name,
            device=self.backend.device_name(),
            precision=self.settings.train.precision,
            data=tuple(token_set.info.fingerprint for token_set in holdout.sets),
            labels=info.labels,
            label_gains=info.label_gains,
            rows=holdout.order.total,
            vector_rows=vector_rows,
            settings_hash=self.ctx.settings_hash,
            code_version=self.ctx.code_version,
        )


def _architecture(model: ModelConfig) -> str:
    """Models of one name have the same parameters and graphs."""
    shape = model.model_dump(mode="json", exclude={"preset", "dropout", "init_from"})
    return fingerprint({**shape, **model.encoder.model_dump()})
