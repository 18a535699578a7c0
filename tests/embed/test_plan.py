"""Which checkpoint and which catalogue a cycle is planned with, without reading either."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.checkpoint.store import Checkpoint
from pipeline.context import StageContext, open_context, store_result
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.stop import StopSignal
from pipeline.embed import plan as plan_module
from pipeline.embed.catalogue import read_footers
from pipeline.embed.config import EmbedConfig, OutputConfig
from pipeline.embed.plan import (
    EmbedPlan,
    catalogue_storage,
    check_lengths,
    cycle_plan,
    make_plan,
    model_location,
    open_pinned,
    pin_plan,
)
from pipeline.io.storage import open_storage
from pipeline.model.config import ModelConfig
from pipeline.settings import Settings
from tests.embed.catalogues import COLUMNS, products, write_catalogue
from tests.train.rows import checkpoint_of

CHECKPOINT = checkpoint_of(max_tokens=300, model=ModelConfig(preset="tiny"))
WIDTH = CHECKPOINT.state.model.encoder.hidden_size
PLACE = "checkpoints/c0/step-7"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    embed = EmbedConfig(checkpoint=PLACE)
    return Settings(workspace=str(tmp_path / "ws"), scratch=str(tmp_path / "scratch"), cycle="c1", embed=embed)


@pytest.fixture
def ctx(settings: Settings) -> Iterator[StageContext]:
    with open_context(settings, StopSignal(), {}) as made:
        yield made


@pytest.fixture(autouse=True)
def _found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of a few rows and a checkpoint, wherever they are looked for."""
    storage = open_storage(str(write_catalogue(tmp_path / "in", [products(range(4))])))
    catalogue = read_footers(storage, list(storage.list("")), COLUMNS)
    monkeypatch.setattr(plan_module, "find_catalogue", lambda *given: catalogue)
    monkeypatch.setattr(plan_module, "open_signed", lambda *given, **options: CHECKPOINT)


def test_vectors_are_as_wide_as_the_model_unless_told_otherwise(settings: Settings, ctx: StageContext) -> None:
    def dim(dimensions: int) -> int:
        embed = settings.embed.model_copy(update={"output": OutputConfig(dimensions=dimensions)})
        return make_plan(settings.model_copy(update={"embed": embed}), ctx)[0].layout.dim

    assert [dim(0), dim(8), dim(WIDTH)] == [WIDTH, 8, WIDTH]
    with pytest.raises(ConfigError, match=f"the model's vectors have {WIDTH}") as caught:
        dim(WIDTH + 1)
    assert caught.value.next_command == "--embed.output.dimensions 0 for all"


def test_the_plan_that_was_first_counts_with_its_checkpoint(
    settings: Settings, ctx: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker pinned its plan meanwhile, with the model that was promoted by then."""
    plan, _ = make_plan(settings, ctx)
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"digest": "other"})})

    def overtaken(*given: Any) -> tuple[Any, Checkpoint]:
        pin_plan(ctx.workspace, other)
        return plan, CHECKPOINT

    monkeypatch.setattr(plan_module, "make_plan", overtaken)
    assert cycle_plan(settings, ctx) == (other, None)


def test_the_plan_is_that_of_one_model(settings: Settings, ctx: StageContext) -> None:
    cycle_plan(settings, ctx)
    other = settings.model_copy(update={"model_name": "base"})
    with pytest.raises(ConfigError, match="model_name is 'base', but cycle c1 was started with"):
        cycle_plan(other, ctx)


def test_a_plan_comes_with_the_checkpoint_that_was_opened_for_it(settings: Settings, ctx: StageContext) -> None:
    plan, checkpoint = cycle_plan(settings, ctx)
    assert checkpoint is CHECKPOINT and plan.model.digest == CHECKPOINT.digest
    assert cycle_plan(settings, ctx) == (plan, None)
    chunked = settings.model_copy(update={"embed": EmbedConfig(checkpoint=PLACE, chunks=2)})
    with pytest.raises(ConfigError, match=r"embed\.chunks is 2, but cycle c1 was started with None"):
        cycle_plan(chunked, ctx)
    assert make_plan(chunked, ctx)[0].made_by["chunks"] == 2
    assert "chunks" not in plan.made_by and "embed.chunks" not in plan.asked, "as before there were any"


def test_which_checkpoint_is_meant(settings: Settings, ctx: StageContext) -> None:
    for named, place in (
        (f"{PLACE}/", PLACE),
        (ctx.workspace.uri(PLACE), PLACE),
        ("s3://other/checkpoints/c0/step-7", "s3://other/checkpoints/c0/step-7"),
    ):
        asked = settings.model_copy(update={"embed": EmbedConfig(checkpoint=named)})
        assert model_location(asked, ctx) == place
    promoted = settings.model_copy(update={"embed": EmbedConfig()})
    for trained, named in ((False, "checkpoints/<cycle>/step-<n>"), (True, PLACE)):
        if trained:
            now = datetime.now(UTC)
            store_result(ctx.workspace, ctx.finish("train", now, inputs={}, outputs={"checkpoint": PLACE}, figures={}))
        with pytest.raises(CheckpointError, match="no checkpoint of model") as caught:
            model_location(promoted, ctx)
        assert caught.value.next_command == f"trnpipe evaluate, or --embed.checkpoint {named}"
    key = f"registry/{settings.model_name}/production.json"
    ctx.workspace.write_bytes(key, b'{"checkpoint": "checkpoints/c9/step-1"}')
    assert model_location(promoted, ctx) == "checkpoints/c9/step-1"


def test_a_promoted_checkpoint_must_have_the_content_that_was_promoted(
    settings: Settings, ctx: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()

    def open_it(*given: Any, digest: str) -> Checkpoint:
        opened.append(digest)
        return CHECKPOINT

    monkeypatch.setattr(plan_module, "open_signed", open_it)
    pointer = SimpleNamespace(checkpoint=PLACE, digest="promoted")
    monkeypatch.setattr(plan_module, "read_pointer", lambda *given: (pointer, "etag"))
    ctx.workspace.write_bytes(
        f"registry/{settings.model_name}/production.json", f'{{"checkpoint": "{PLACE}"}}'.encode()
    )
    make_plan(settings.model_copy(update={"embed": EmbedConfig()}), ctx)
    make_plan(settings, ctx)  # names a checkpoint
    assert opened == ["promoted", ""]


def test_what_the_plan_pins_must_be_as_it_was(settings: Settings, ctx: StageContext, tmp_path: Path) -> None:
    """Its checkpoint, the length at which texts are cut, and where the files of the catalogue lie."""
    plan, _ = make_plan(settings, ctx)
    assert EmbedPlan.model_validate_json(plan.model_dump_json()).fingerprint == plan.fingerprint
    assert open_pinned(plan.model, settings, ctx) is CHECKPOINT
    with pytest.raises(CheckpointError, match="has digest digest"):
        open_pinned(plan.model.model_copy(update={"digest": "before"}), settings, ctx)
    check_lengths(plan, settings, CHECKPOINT)
    shorter = replace(CHECKPOINT, state=CHECKPOINT.state.model_copy(update={"max_tokens": 8}))
    with pytest.raises(ConfigError, match=rf"at 8 tokens, but cycle c1 was started with {plan.max_tokens}"):
        check_lengths(plan, settings, shorter)
    assert catalogue_storage(plan, settings, ctx).root == f"file://{tmp_path}/in"
    gathered = plan.model_copy(update={"catalogue": plan.catalogue.model_copy(update={"root": ""})})
    assert catalogue_storage(gathered, settings, ctx) is ctx.workspace
