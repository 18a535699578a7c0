"""Choose the data and the parent of a run, before anything is loaded onto a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.checkpoint.store import Checkpoint, Parent
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import with_retired
from pipeline.data.judgements import training_warnings
from pipeline.data.token_sets import Selection, TokenSet, TokenSetInfo, read_token_sets, select_partitions, spec_of
from pipeline.data.training_groups import GroupedRows
from pipeline.io.storage import Storage
from pipeline.mine.store import MINE, NegativeSet, check_negatives, find_negatives
from pipeline.model.config import InputSpec, ModelConfig, check_architecture, difference
from pipeline.train.config import TrainConfig


@dataclass(frozen=True)
class RunInputs:
    """Partitions, mined negatives, model inputs and parent of one run."""

    sets: tuple[TokenSet, ...]
    selection: Selection
    spec: InputSpec
    parent: Checkpoint | None
    replays: bool
    """True if some of the samples are drawn from `old_sets`."""
    negatives: NegativeSet | None
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
        """The partitions that the trained weights depend on: the parent's and the new ones."""
        inherited = dict(self.parent.state.partitions) if self.parent else {}
        return inherited | {p.name: p.fingerprint for p in self.selection.new}

    @property
    def also_seen(self) -> dict[str, str]:
        """Name by fingerprint of further versions of partitions that the weights were trained on."""
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
        """Tokens of the longest text that this run or its parent trains the encoder on."""
        inherited = self.parent.state.max_tokens if self.parent else None
        return max(inherited or 0, _longest(self.sets[0].info))


def gather_inputs(
    workspace: Storage,
    prefixes: Sequence[str],
    parent: Checkpoint | None,
    train: TrainConfig,
    model: ModelConfig,
    negatives: str | None = None,
) -> RunInputs:
    """Read the prepared partitions, choose the new ones, and check that they match the parent.

    `negatives`: path of the negatives mined for this cycle. Raises ConfigError or DataError if the data, the negatives,
    the parent and the settings do not match.
    """
    sets = read_token_sets(workspace, prefixes)
    info = sets[0].info
    spec = spec_of(info)
    if parent is not None:
        spec = spec.model_copy(update={"label_gains": parent.state.inputs.label_gains})
    if spec.num_classes < 2:
        raise DataError(
            f"the prepared data has {spec.num_classes} relevance classes",
            expected="a label column with at least two classes",
            next_command="set --data.columns.label NAME and run trnpipe prepare again",
        )
    longest = _longest(info)
    if longest > model.max_positions:
        raise ConfigError(
            f"the longest bucket has {longest} tokens, but model.max_positions is {model.max_positions}",
            expected="buckets that fit the position embeddings",
            next_command=f"--model.max-positions {longest}, or smaller data.buckets",
        )
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
    identity = identity_parts(train, model, spec, selection, info.buckets, *digests)
    return RunInputs(tuple(sets), selection, spec, parent, train.replay_share > 0, mined, identity)


def _longest(info: TokenSetInfo) -> int:
    """Return the tokens of the longest text in any bucket."""
    return max(max(int(side) for side in bucket.split("x")) for bucket in info.buckets)


def _check_parent(parent: Checkpoint, spec: InputSpec, tokenizer_fingerprint: str, model: ModelConfig) -> None:
    """Check tokenizer, classes, features and architecture. Raises ConfigError if one differs from the parent's."""
    state = parent.state
    if state.tokenizer_fingerprint != tokenizer_fingerprint:
        raise ConfigError(
            f"the data was tokenised with {tokenizer_fingerprint}, but {parent.uri} with {state.tokenizer_fingerprint}",
            expected="the tokenizer of the checkpoint",
            next_command=f"trnpipe prepare --data.tokenizer.path {parent.uri}/tokenizer.json "
            "--data.tokenizer.split-digits false, or --train.start scratch",
        )
    if state.inputs != spec:
        current, required = spec.model_dump(), state.inputs.model_dump()
        name = next(name for name in current if current[name] != required[name])
        raise ConfigError(
            f"the data has different {name} than {parent.prefix} was trained with: "
            f"{difference(current[name], required[name])}",
            expected="the values of the parent",
            next_command="prepare the data with the parent's settings, or --train.start scratch",
        )
    check_architecture(state.model, model, source=parent.prefix)


# The identity of a run: a hash of everything that determines its weights. A run resumes only its own checkpoints.

# These settings change how a run is executed, not its weights.
_NOT_IDENTITY = {
    "start",
    "micro_batch_size",
    "step_boundary",
    "batches_per_execution",  # this and the next are settings of earlier versions
    "chunk_mib",
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
) -> dict[str, str]:
    """Return name -> fingerprint of every setting and input that determines the weights.

    `parent` and `negatives` are manifest digests, or empty.
    """
    # With these values, batches are the same as before the settings existed.
    neutral = {"queries_per_topic": 1, "link_queries": False}
    unused = _NOT_IDENTITY | {name for name, value in neutral.items() if getattr(train, name) == value}
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
    return {name: fingerprint(value) for name, value in parts.items()}


def check_identity(stored: Mapping[str, str], current: Mapping[str, str], *, where: str) -> None:
    """Check that a checkpoint belongs to this run. Raises ConfigError naming the differences if it does not."""
    different = sorted(name for name in stored.keys() | current.keys() if stored.get(name) != current.get(name))
    if different:
        raise ConfigError(
            f"{where} was trained with different {', '.join(different)}",
            expected="the settings and data this cycle was started with",
            next_command="restore them, or start another cycle with --cycle NAME",
        )


# Warnings about data that reduces quality without failing, with counts, before training starts.
#
# `prepare` prints the same warnings about the prepared data (data/judgements).

_POOR_FILL = 0.6
"""Fraction of filled slots below which a warning is printed."""


def data_warnings(groups: GroupedRows, train: TrainConfig, infos: Sequence[TokenSetInfo]) -> list[str]:
    """Return warnings about training rows that reduce quality without failing. `infos`: of their partitions."""
    warnings, fill = [], groups.groups.fill
    if fill < _POOR_FILL:
        warnings.append(
            f"only {fill:.0%} of the {groups.slots} product slots per query are filled, so batches have fewer samples"
            " than train.global_batch_size: lower train.candidates_per_query"
        )
    if groups.mined is not None and groups.mined.fill < _POOR_FILL:
        warnings.append(
            f"only {groups.mined.fill:.0%} of the {train.mined_per_query} slots per query for mined negatives are"
            " filled: lower train.mined_per_query, or raise mine.depth or mine.negatives_per_query and mine again"
        )
    if not train.loss.trains_head:
        warnings.append(
            "train.loss.graded_weight is 0: the relevance head is not trained, evaluate reports no pair metrics, and"
            " gate.floors, gate.drops and gate.baseline_drops must name retrieval metrics (retrieval_ndcg@10=0.01)"
        )
    contrastive = train.loss.contrastive_weight > 0
    return warnings + list(training_warnings(infos, train.loss.positive_gain, contrastive=contrastive).values())
