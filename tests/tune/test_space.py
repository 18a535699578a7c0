"""What may be searched, and a trial's values as settings."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from pipeline.core.errors import ConfigError
from pipeline.settings import Settings, leaves, resolve
from pipeline.tune.journal import Space, best_toml, open_space, reason_of

pytestmark = pytest.mark.unit


def with_space(**space: str) -> Settings:
    return resolve([], {}, [(f"--tune.space.{name.replace('__', '.')}", text) for name, text in space.items()]).settings


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("train.optimizer.lerning_rate", "log 1e-5 1e-3", ["no setting", "train.optimizer.learning_rate"]),
        ("data.seed", "int 1 2", ["no setting"]),
        ("data.valid_fraction", "uniform 0.1 0.2", ["a setting of train or model"]),
        ("train.max_steps", "int 10 20", ["the same for every trial", "tune.steps"]),
        ("train.metric", "one of ndcg accuracy", ["the same for every trial"]),
        ("train.optimizer.learning_rate", "log 1e-5 10", ["10.0: input should be less than or equal to 1", "float"]),
        ("train.optimizer.learning_rate", "one of 0.1 fast", ["fast: input should be a valid number"]),
        ("model.num_layers", "uniform 1 4", ["the setting is int", "int LOW HIGH, or one of"]),
        ("model.num_layers", "int 0 4", ["0: input should be greater than or equal to 1"]),
        ("model.pooling", "int 1 2", ["the setting is mean|cls", "one of A B"]),
        ("model.pooling", "one of mean max", ["max: input should be 'mean', 'cls' or 'last'"]),
        ("model.hidden_size", "one of null 128", ["which null is not"]),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(name: str, text: str, parts: list[str]) -> None:
    settings = resolve([], {}, [(f"--tune.space.{name}", text)]).settings
    with pytest.raises(ConfigError) as caught:
        open_space(settings)
    for part in (name, *parts):
        assert part in str(caught.value)


def test_an_empty_space_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"--tune\.space\.train\.optimizer\.learning_rate"):
        open_space(Settings())


def test_a_wrong_range_is_refused_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"flag --tune\.space\.train\.seed.*expected log LOW HIGH"):
        with_space(train__seed="1 2")


def test_values_become_settings_and_the_rest_stays() -> None:
    settings = with_space(train__optimizer__learning_rate="log 1e-5 1e-3", model__mlp_sizes="one of 64 128,64")
    space = open_space(settings)
    applied = space.apply({"train.optimizer.learning_rate": 2e-4, "model.mlp_sizes": "128,64"})
    assert (applied.train.optimizer.learning_rate, applied.model.mlp_sizes) == (2e-4, (128, 64))
    optimizer = settings.train.optimizer.model_copy(update={"learning_rate": 2e-4})
    assert applied == settings.model_copy(
        update={
            "train": settings.train.model_copy(update={"optimizer": optimizer}),
            "model": settings.model.model_copy(update={"mlp_sizes": (128, 64)}),
        }
    )
    assert space.typed({"model.mlp_sizes": "128,64"}) == {"model.mlp_sizes": [128, 64]}


def test_values_that_are_not_allowed_together_have_their_types_all_the_same() -> None:
    names = ("train.loss.graded_weight", "train.loss.contrastive_weight")
    space = {name: "one of 0 0.50" for name in names}
    settings = resolve([], {}, given={"train": {"metric": "retrieval_ndcg"}, "tune": {"space": space}}).settings
    opened = open_space(settings)
    with pytest.raises(ValidationError) as caught:
        opened.apply(dict.fromkeys(names, "0"))
    assert reason_of(caught.value).startswith("no term of the loss has a weight")
    assert opened.typed(dict.fromkeys(names, "0")) == dict.fromkeys(names, 0.0)


def test_every_setting_that_may_be_searched_has_the_type_it_has_in_the_settings() -> None:
    settings = Settings()
    tree, space = settings.model_dump(mode="json"), Space(settings, {})
    for name in leaves(Settings):
        value: Any = tree
        for word in name.split("."):
            value = value[word]
        if name.startswith(("train.", "model.")) and isinstance(value, int | float | str | list):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            assert space.typed({name: text}) == {name: value}, name


def test_the_start_is_what_the_settings_have_where_it_lies_in_the_range() -> None:
    space = open_space(
        with_space(
            train__optimizer__learning_rate="log 1e-5 1e-3",  # 5e-4
            train__loss__temperature="one of 0.1 0.050",  # 0.05
            train__optimizer__head_rate="log 2 30",  # 1
            model__pooling="one of cls mean",  # mean
            model__cross_layers="int 0 4",  # 2
        )
    )
    assert space.start() == {
        "train.optimizer.learning_rate": 5e-4,
        "train.loss.temperature": "0.050",
        "model.pooling": "mean",
        "model.cross_layers": 2,
    }


values = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text('abz 0.1-"\\\n\té€'),
    st.lists(st.integers(0, 9), max_size=3),
)


@given(st.dictionaries(st.sampled_from(["train.a", "train.b", "train.loss.c", "model.d"]), values, min_size=1))
def test_the_file_of_the_best_is_toml_that_says_the_same(chosen: dict[str, JsonValue]) -> None:
    tree = tomllib.loads(best_toml(chosen, ["why = it is the best", "[and] more"]))
    for name, value in chosen.items():
        table: JsonValue = tree
        for word in name.split("."):
            assert isinstance(table, dict)
            table = table[word]
        assert table == value and type(table) is type(value)


def test_a_file_may_have_names_as_tables(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[tune.space]\ntrain.seed = "int 1 2"\n"model.cross_layers" = "int 0 2"\n')
    space = resolve([file], {"TRNPIPE_TUNE__TRIALS": "3"}, []).settings.tune.space
    assert space == {"train.seed": "int 1 2", "model.cross_layers": "int 0 2"}
