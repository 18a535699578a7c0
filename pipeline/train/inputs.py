"""What a run trains on and starts from, chosen before anything is loaded onto a device."""

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
    """Whether a share of the samples is of `old_sets`."""
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
        """Every partition the weights have seen when the run is done: the parent's and the new ones."""
        seen = dict(self.parent.state.partitions) if self.parent else {}
        return seen | {p.name: p.fingerprint for p in self.selection.new}

    @property
    def also_seen(self) -> dict[str, str]:
        """Fingerprint to name of what the weights have seen beside `partitions`."""
        seen: dict[str, str] = {}
        if self.parent is not None:
            state = self.parent.state
            seen = state.also_seen | {mark: name for name, mark in state.partitions.items()}
        if self.replays:
            seen |= {p.fingerprint: p.name for p in self.selection.old}
        named = set(self.partitions.values())
        return {mark: name for mark, name in seen.items() if mark not in named}

    @property
    def watermark(self) -> str:
        before = self.parent.state.watermark if self.parent else ""
        return max(before, self.selection.watermark)

    @property
    def max_tokens(self) -> int:
        """The longest text the encoder has learnt to read when the run is done, by its buckets or its parent's."""
        before = self.parent.state.max_tokens if self.parent else None
        return max(before or 0, _longest(self.sets[0].info))


def gather_inputs(
    workspace: Storage,
    prefixes: Sequence[str],
    parent: Checkpoint | None,
    train: TrainConfig,
    model: ModelConfig,
    negatives: str | None = None,
) -> RunInputs:
    """Read the prepared partitions, choose the new ones, check that they fit the parent.

    `negatives`: where those lie that were mined for this cycle. Raises ConfigError, DataError, for negatives of other
    data too.
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
            next_command="map it with --data.columns.label NAME and run trnpipe prepare again",
        )
    longest = _longest(info)
    if longest > model.max_positions:
        raise ConfigError(
            f"the longest bucket has {longest} tokens, model.max_positions is {model.max_positions}",
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
                "train.mined_per_query asks for mined negatives, and none were mined for this cycle",
                expected="the result of the mine stage",
                next_command=f"{MINE}, with the settings of this run, or --train.mined-per-query 0",
            )
        check_negatives(mined, [one.info.fingerprint for one in sets], workspace)
    digests = parent.digest if parent else "", mined.digest if mined else ""
    identity = identity_parts(train, model, spec, selection, info.buckets, *digests)
    return RunInputs(tuple(sets), selection, spec, parent, train.replay_share > 0, mined, identity)


def _longest(info: TokenSetInfo) -> int:
    """Tokens of the longest text of the buckets."""
    return max(max(int(side) for side in bucket.split("x")) for bucket in info.buckets)


def _check_parent(parent: Checkpoint, spec: InputSpec, tokenizer_fingerprint: str, model: ModelConfig) -> None:
    """Tokenizer, classes, features and architecture must be the parent's. Raises ConfigError naming which is not."""
    state = parent.state
    if state.tokenizer_fingerprint != tokenizer_fingerprint:
        raise ConfigError(
            f"the data was tokenised with {tokenizer_fingerprint}, {parent.uri} with {state.tokenizer_fingerprint}",
            expected="the tokenizer of the checkpoint",
            next_command=f"trnpipe prepare --data.tokenizer.path {parent.uri}/tokenizer.json "
            "--data.tokenizer.split-digits false, or --train.start scratch",
        )
    if state.inputs != spec:
        ours, theirs = spec.model_dump(), state.inputs.model_dump()
        name = next(name for name in ours if ours[name] != theirs[name])
        raise ConfigError(
            f"the data has other {name} than {parent.prefix} was trained with: {difference(ours[name], theirs[name])}",
            expected="those of the parent",
            next_command="prepare the data with the parent's settings, or --train.start scratch",
        )
    check_architecture(state.model, model, source=parent.prefix)


# The identity of a run: a hash of all that decides its weights. A run continues only its own checkpoints.

# These change where, when and in what pieces the same run is computed, not what is computed.
_NOT_IDENTITY = {
    "start",
    "micro_batch_size",
    "step_boundary",
    "batches_per_execution",  # this and the next are of earlier versions
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
    """Name to fingerprint of each thing that decides the weights.

    `parent` and `negatives` are manifest digests, or empty.
    """
    # With these values batches are those of runs from before the settings were there.
    before = {"queries_per_topic": 1, "link_queries": False}
    unused = _NOT_IDENTITY | {name for name, value in before.items() if getattr(train, name) == value}
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


def check_identity(found: Mapping[str, str], ours: Mapping[str, str], *, where: str) -> None:
    """Raises ConfigError naming what differs, when a checkpoint is of another run."""
    different = sorted(name for name in found.keys() | ours.keys() if found.get(name) != ours.get(name))
    if different:
        raise ConfigError(
            f"{where} was trained with other {', '.join(different)}",
            expected="the settings and data this cycle was started with",
            next_command="go back to them, or start another cycle with --cycle NAME",
        )


# What in the data of a run costs quality without failing: said with counts, before training starts.
#
# `prepare` says the same of the prepared data, in the same words (data/judgements).

_POOR_FILL = 0.6
"""Of slots: below this share a warning says so."""


def warnings_of(groups: GroupedRows, train: TrainConfig, infos: Sequence[TokenSetInfo]) -> list[str]:
    """What in the chosen rows costs quality without failing, with counts. `infos`: of the partitions they are from."""
    found, fill = [], groups.groups.fill
    if fill < _POOR_FILL:
        found.append(
            f"{fill:.0%} of the {groups.slots} slots of a query hold a row, so a batch has fewer samples than"
            " train.global_batch_size says; queries have fewer judged products: lower train.candidates_per_query"
        )
    if groups.mined is not None and groups.mined.fill < _POOR_FILL:
        found.append(
            f"{groups.mined.fill:.0%} of the {train.mined_per_query} slots of a query for mined negatives hold one:"
            " lower train.mined_per_query, or raise mine.depth or mine.negatives_per_query and mine again"
        )
    if not train.loss.trains_head:
        found.append(
            "train.loss.graded_weight is 0: the relevance head is not trained, evaluate has no figures of pairs, and"
            " gate.floors, gate.drops and gate.baseline_drops must name metrics of retrieval (retrieval_ndcg@10=0.01)"
        )
    contrastive = train.loss.contrastive_weight > 0
    return found + list(training_warnings(infos, train.loss.positive_gain, contrastive=contrastive).values())
