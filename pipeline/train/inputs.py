"""Select the data of a training run and verify that it matches the parent, before anything is loaded onto a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.checkpoint.store import Checkpoint, Parent
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import with_retired
from pipeline.data.judgements import training_warnings
from pipeline.data.token_sets import (
    Selection,
    TokenSet,
    TokenSetInfo,
    check_trainable,
    read_token_sets,
    select_partitions,
    spec_of,
)
from pipeline.data.training_groups import GroupedRows
from pipeline.io.storage import Storage
from pipeline.mine.store import MINE, NegativeSet, check_negatives, find_negatives
from pipeline.model.config import InputSpec, ModelConfig, check_architecture, difference
from pipeline.teach.store import Taught, gather_taught
from pipeline.train.config import TrainConfig


@dataclass(frozen=True)
class RunInputs:
    """The data that a run trains on, and the checkpoint that it starts from."""

    sets: tuple[TokenSet, ...]
    selection: Selection
    spec: InputSpec
    parent: Checkpoint | None
    replays: bool
    """True if some of the training samples come from `old_sets`."""
    negatives: NegativeSet | None
    taught: Taught | None
    """What the teacher computed for `sets`, if there is one."""
    identity: Mapping[str, str]

    @property
    def new_sets(self) -> list[TokenSet]:
        return [s for s in self.sets if s.partition in self.selection.new]

    @property
    def old_sets(self) -> list[TokenSet]:
        return [s for s in self.sets if s.partition in self.selection.old]

    @property
    def parent_record(self) -> Parent | None:
        if self.parent is None:
            return None
        state = self.parent.state
        return Parent(uri=self.parent.uri, digest=self.parent.digest, cycle=state.cycle, step=state.step)

    @property
    def partitions(self) -> dict[str, str]:
        """Fingerprints by name of the partitions that the trained weights depend on, including those of the parent."""
        inherited = dict(self.parent.state.partitions) if self.parent else {}
        return inherited | {p.name: p.fingerprint for p in self.selection.new}

    @property
    def also_seen(self) -> dict[str, str]:
        """Names by fingerprint of older versions of partitions that the weights were also trained on."""
        names: dict[str, str] = {}
        if self.parent is not None:
            state = self.parent.state
            names = state.also_seen | {fingerprint: name for name, fingerprint in state.partitions.items()}
        if self.replays:
            names |= {p.fingerprint: p.name for p in self.selection.old}
        current = set(self.partitions.values())
        return {fingerprint: name for fingerprint, name in names.items() if fingerprint not in current}

    @property
    def watermark(self) -> str:
        return max(self.parent.state.watermark if self.parent else "", self.selection.watermark)

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest text that the encoder is trained on, in this run or by its parent."""
        inherited = self.parent.state.max_tokens if self.parent else None
        return max(inherited or 0, self.sets[0].info.longest)


def gather_inputs(
    workspace: Storage,
    prefixes: Sequence[str],
    parent: Checkpoint | None,
    train: TrainConfig,
    model: ModelConfig,
    negatives: str | None = None,
    taught: Mapping[str, str] | None = None,
) -> RunInputs:
    """Read the prepared partitions, determine which ones are new, and verify that they match the parent.

    `negatives` is the path of the negatives that were mined for this cycle, if any, and `taught` are the outputs of the
    teach stage. Raises ConfigError or DataError if the data, the negatives, the parent and the settings are
    inconsistent.
    """
    sets = read_token_sets(workspace, prefixes)
    info = sets[0].info
    spec = spec_of(info)
    if parent is not None:
        spec = spec.continuing(parent.state.inputs)
    check_trainable(info, model.max_positions)
    if parent is not None:
        _check_parent(parent, spec, info.tokenizer_fingerprint, model)
    selection = select_partitions(
        [s.partition for s in sets],
        parent_watermark=parent.state.watermark if parent else None,
        parent_partitions=parent.state.partitions if parent else {},
    )
    mined = None
    if train.mined_per_query:
        mined = None if negatives is None else find_negatives(workspace, negatives)
        if mined is None:
            raise ConfigError(
                "train.mined_per_query requires mined negatives, but none were mined for this cycle",
                expected="the result of the mine stage",
                next_command=f"{MINE}, with the settings of this run, or --train.mined-per-query 0",
            )
        check_negatives(mined, [token_set.info.fingerprint for token_set in sets], workspace)
    digests = parent.digest if parent else "", mined.digest if mined else ""
    teacher = None
    if train.teacher:
        names = [token_set.info.fingerprint for token_set in sets]
        teacher = gather_taught(workspace, taught or {}, names, mined.digest if mined else "")
    identity = identity_parts(
        train, model, spec, selection, info.buckets, *digests, teacher.identity if teacher else ""
    )
    return RunInputs(tuple(sets), selection, spec, parent, train.replay_share > 0, mined, teacher, identity)


def _check_parent(parent: Checkpoint, spec: InputSpec, tokenizer_fingerprint: str, model: ModelConfig) -> None:
    """Verify that the tokenizer, classes, features and architecture match the parent. Raises ConfigError if not."""
    state = parent.state
    if state.tokenizer_fingerprint != tokenizer_fingerprint:
        raise ConfigError(
            f"the data was tokenised with {tokenizer_fingerprint}, but {parent.uri} uses {state.tokenizer_fingerprint}",
            expected="data tokenised with the tokenizer of the checkpoint",
            next_command=f"trnpipe prepare --data.tokenizer.path {parent.uri}/tokenizer.json "
            "--data.tokenizer.split-digits false, or --train.start scratch",
        )
    if state.inputs != spec:
        current, required = spec.model_dump(), state.inputs.model_dump()
        name = next(name for name in current if current[name] != required[name])
        raise ConfigError(
            f"{name} differs between the data and {parent.prefix}: {difference(current[name], required[name])}",
            expected="the same values as in the parent",
            next_command="prepare the data with the parent's settings, or --train.start scratch",
        )
    check_architecture(state.model, model, source=parent.prefix)


# The identity of a run consists of fingerprints of everything that determines its weights. It ensures that a run never
# resumes from a checkpoint that was trained with different settings or data.

# These settings affect how a run is executed, or which of its checkpoints is chosen, but not its weights (except for
# the masks of dropout).
_NOT_IDENTITY = {
    "evaluate_every",
    "evaluate_rows",
    "patience",
    "start",
    "teacher",  # what it computed has a fingerprint of its own
    "micro_batch_size",
    "step_boundary",
    "batches_per_execution",  # this setting and the next two existed only in earlier versions
    "chunk_mib",
    "average",
    "parallel",
    "deadline",
    "on_deadline",
    "collective_timeout_s",
}


def identity_parts(
    train: TrainConfig,
    model: ModelConfig,
    inputs: InputSpec,
    selection: Selection,
    buckets: Sequence[str],
    parent: str,
    negatives: str,
    teacher: str = "",
) -> dict[str, str]:
    """Return the fingerprint of every setting and input that determines the weights, by name.

    `parent` and `negatives` are manifest digests, and `teacher` is a fingerprint of what the teacher computed. They may
    be empty.
    """
    # With these values, the batches are the same as before the settings were introduced, so they are left out to keep
    # the identity of older checkpoints.
    neutral = {
        "queries_per_topic": 1,
        "link_queries": False,
        "repeat_positives": False,
        "metric_rows": "all",
    }
    unused = _NOT_IDENTITY | {name for name, value in neutral.items() if getattr(train, name) == value}
    unused |= set() if train.compiled else {"compiled"}
    fields = with_retired(train) | {"loss": train.loss.used_fields()}
    parts = {f"train.{name}": value for name, value in fields.items() if name not in unused}
    parts |= {f"model.{name}": value for name, value in model.used_fields().items()}
    parts |= {
        "inputs": inputs.used_fields(),
        "data.new": [p.fingerprint for p in selection.new],
        "data.old": [p.fingerprint for p in selection.old],
        "data.buckets": list(buckets),
        "parent": parent,
        "negatives": negatives,
    }
    parts |= {"teacher": teacher} if teacher else {}
    return {name: fingerprint(value) for name, value in parts.items()}


def check_identity(stored: Mapping[str, str], current: Mapping[str, str], *, where: str) -> None:
    """Verify that a checkpoint belongs to this run. Raises ConfigError that lists the differences if it does not."""
    ignored = {f"train.{name}" for name in _NOT_IDENTITY}  # earlier versions stored some of them
    if current.get("data.old") == fingerprint([]):
        ignored.add("train.replay_share")  # nothing to replay
    names = (stored.keys() | current.keys()) - ignored
    different = sorted(name for name in names if stored.get(name) != current.get(name))
    if different:
        raise ConfigError(
            f"{where} was trained with different {', '.join(different)}",
            expected="the same settings and data that this cycle was started with",
            next_command="restore them, or start a new cycle with --cycle NAME",
        )


# Warnings about problems in the data that would limit model quality without failing the run. `prepare` also
# logs those that depend only on the prepared data (see data/judgements).

_POOR_FILL = 0.6
"""Fraction of filled slots below which to log a warning."""


def data_warnings(groups: GroupedRows, train: TrainConfig, infos: Sequence[TokenSetInfo]) -> list[str]:
    """Return warnings about problems in the training rows that would limit model quality.

    `infos` describes the partitions that the rows come from.
    """
    warnings, fill = [], groups.groups.fill
    if fill < _POOR_FILL:
        warnings.append(
            f"only {fill:.0%} of the {groups.slots} product slots per query are filled, so batches have fewer samples"
            " than train.global_batch_size. Consider lowering train.candidates_per_query"
        )
    if groups.mined is not None and groups.mined.fill < _POOR_FILL:
        warnings.append(
            f"only {groups.mined.fill:.0%} of the {train.mined_per_query} slots per query for mined negatives are"
            " filled. Lower train.mined_per_query, or raise mine.depth or mine.negatives_per_query and mine again"
        )
    if not train.loss.trains_head:
        warnings.append(
            "the relevance head is not trained, because train.loss.graded_weight is 0. As a result, evaluate reports no"
            " pair metrics, and gate.floors, gate.drops and gate.baseline_drops must use retrieval metrics"
            " (for example retrieval_ndcg@10=0.01)"
        )
    contrastive = train.loss.contrastive_weight > 0
    return warnings + list(training_warnings(infos, train.loss.positive_gain, contrastive=contrastive).values())
