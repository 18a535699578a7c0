"""A run continues only what is its own, and says what differs."""

import pytest
from pydantic import BaseModel

from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.data.token_sets import Partition, Selection
from pipeline.model.config import ModelConfig, check_architecture
from pipeline.train.inputs import check_identity, identity_parts
from tests.kit.fields import check_named, variants, without_effect
from tests.train.rows import MODEL, SPEC, TRAIN

FIELDS = type(TRAIN).model_fields
SELECTION = Selection((Partition("dt=2026-01-02", "2026-01-02", "new"),), (), ())


def identity(**changes: object) -> dict[str, str]:
    """Fingerprints with `train_x`, `model_x` or whole arguments replaced."""

    def updated(config: BaseModel, prefix: str) -> dict[str, object]:
        return {name.removeprefix(prefix): value for name, value in changes.items() if name.startswith(prefix)}

    return identity_parts(
        TRAIN.model_copy(update=updated(TRAIN, "train_")),
        MODEL.model_copy(update=updated(MODEL, "model_")),
        SPEC.model_copy(update=updated(SPEC, "spec_")),
        changes.get("selection", SELECTION),  # type: ignore[arg-type]
        ("4x6", "6x8"),
        str(changes.get("parent", "")),
        str(changes.get("negatives", "")),
    )


OUTSIDE = {
    "start": "the digest of the parent is a part of its own",
    "teacher": "what it computed is a part of its own",
    "micro_batch_size": "how a batch is cut for memory",
    "step_boundary": "how a step is cut into graphs",
    "parallel": "how ranks share a step",
    "evaluate_every": "which of its checkpoints is chosen, as the next two",
    "evaluate_rows": "on how many rows",
    "patience": "whether later ones are worth waiting for",
    "deadline": "when it has to end",
    "on_deadline": "what happens then",
    "collective_timeout_s": "how long ranks wait for each other",
}
"""Settings of training that decide where, when and in what pieces the same weights come about."""


def test_every_setting_of_training_is_in_the_identity_or_named_as_outside() -> None:
    found = without_effect(TRAIN, lambda one: identity(**{f"train_{name}": getattr(one, name) for name in FIELDS}))
    check_named(found, OUTSIDE)
    for name, changed in variants(TRAIN, loss__matryoshka_sizes=(4,)):
        if (top := name.split(".")[0]) not in OUTSIDE:
            ours = identity(**{f"train_{one}": getattr(TRAIN, one) for one in FIELDS})
            theirs = identity(**{f"train_{one}": getattr(changed, one) for one in FIELDS})
            assert dict(set(ours.items()) ^ set(theirs.items())).keys() == {f"train.{top}"}


def test_every_field_of_the_model_and_its_inputs_is_in_the_identity() -> None:
    models = [
        MODEL.model_copy(update={"token_match": True}),
        MODEL.model_copy(update={"architecture": "modernbert"}),
        MODEL.model_copy(update={"factory": "package:function"}),
    ]
    unused = [without_effect(one, lambda one: identity(**{f"model_{n}": v for n, v in one})) for one in models]
    assert set.intersection(*unused) == set(), "each is of some architecture"
    spec = SPEC.model_copy(update={"query_prefix": "query: ", "product_prefix": "passage: "})
    assert without_effect(spec, lambda one: identity(**{f"spec_{n}": v for n, v in one})) == set()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train_seed": 2, "model_hidden_size": 32}, "model.hidden_size, train.seed"),
        ({"spec_labels": ("x", "y")}, "inputs"),
        ({"parent": "digest"}, "parent"),
        ({"negatives": "digest"}, "negatives"),
        ({"train_queries_per_topic": 4}, "train.queries_per_topic"),
        ({"train_link_queries": True}, "train.link_queries"),
        ({"selection": Selection((Partition("dt=2026-01-02", "2026-01-02", "rewritten"),), (), ())}, "data.new"),
        ({"selection": Selection(SELECTION.new, SELECTION.new, ())}, "data.old"),
    ],
)
def test_differences_are_named(changes: dict[str, object], named: str) -> None:
    check_identity(identity(), identity(), where="x")
    with pytest.raises(ConfigError) as caught:
        check_identity(identity(), identity(**changes), where="checkpoints/c/step-3")
    assert caught.value.seen == f"checkpoints/c/step-3 was trained with different {named}"


def test_a_run_under_way_continues_with_another_cadence() -> None:
    stored = identity() | {
        f"train.{name}": fingerprint(200) for name in ("evaluate_every", "evaluate_rows", "patience")
    }
    check_identity(stored, identity(), where="a run of an earlier version, which stored them")


def test_runs_from_before_there_were_topics_and_links_are_those_without() -> None:
    assert not {"train.queries_per_topic", "train.link_queries", "train.average"} & set(identity())


def test_a_retired_setting_stands_in_the_identity_as_it_was() -> None:
    retired = {name: value for name, value in TRAIN.loss.retired.items() if name != "memory_batches"}
    loss = TRAIN.loss.model_dump(mode="json", exclude={"teacher_weight"})
    assert identity()["train.loss"] == fingerprint({**loss, **retired})
    assert {"train.row_tokens", "train.average_decay"} <= identity().keys()


def test_a_part_that_one_side_lacks_is_a_difference() -> None:
    with pytest.raises(ConfigError, match=r"different model.pooling, train.seed"):
        found = {name: value for name, value in identity().items() if name != "model.pooling"}
        check_identity(found, identity(train_seed=7), where="x")


def test_architecture_is_compared_by_shape_not_by_how_it_was_written() -> None:
    tiny = ModelConfig(preset="tiny")
    spelled = ModelConfig(
        preset="small", hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512, dropout=0.1
    )
    check_architecture(tiny, spelled, source="x")
    for changes, named in (
        ({"num_layers": 3}, "num_layers 2"),
        ({"pooling": "cls"}, "pooling mean"),
        ({"mlp_sizes": (8,)}, "mlp_sizes"),
        ({"max_positions": 64}, "max_positions 512"),
    ):
        with pytest.raises(ConfigError, match=f"parent has model.{named}"):
            check_architecture(tiny, tiny.model_copy(update=changes), source="parent")
