"""Settings resolution: precedence, spelling, provenance, refusals, hash."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from jobs.settings import CycleSettings
from pipeline.core.errors import ConfigError
from pipeline.core.record import Record, coerce_texts
from pipeline.settings import (
    DEFAULT,
    Resolved,
    SettingField,
    Settings,
    as_json,
    format_value,
    leaves,
    nearest,
    reference,
    resolve,
    settings_hash,
    table_text,
)

Flags = list[tuple[str, str | None]]
LEAVES = list(leaves(Settings).values())
REFERENCE = Path(__file__).parents[1] / "docs" / "settings.md"
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def with_flags(*flags: tuple[str, str | None]) -> Settings:
    return resolve([], {}, list(flags)).settings


def toml(folder: Path, text: str, name: str = "a.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def value_of(resolved: Resolved[Settings], leaf: SettingField) -> object:
    value: object = resolved.settings
    for word in leaf.name.split("."):
        value = getattr(value, word)
    return value


def test_without_any_source_everything_is_default() -> None:
    resolved = resolve([], {"HOME": "/x", "trnpipe_workspace": "no"}, [])
    assert resolved.settings == Settings()
    assert set(resolved.sources.values()) == {DEFAULT}


@pytest.mark.parametrize("num_sources", [0, 1, 2, 3, 4])
def test_later_sources_win_and_are_named(tmp_path: Path, num_sources: int) -> None:
    first = toml(tmp_path, "[train]\nmax_steps = 11", "first.toml")
    second = toml(tmp_path, "[train]\nmax_steps = 12", "second.toml")
    resolved = resolve(
        [first, second][:num_sources],
        {"TRNPIPE_TRAIN__MAX_STEPS": "13"} if num_sources >= 3 else {},
        [("--train.max-steps", "14")] if num_sources == 4 else [],
    )
    expected = [
        (0, DEFAULT),
        (11, str(first)),
        (12, str(second)),
        (13, "env TRNPIPE_TRAIN__MAX_STEPS"),
        (14, "flag --train.max-steps"),
    ][num_sources]
    assert (resolved.settings.train.max_steps, resolved.sources["train.max_steps"]) == expected


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_every_default_can_be_typed_back(leaf: SettingField) -> None:
    """What help and `trnpipe config` show is what flags and variables take, for every setting."""
    text, env = (
        format_value(value_of(Resolved(Settings(), {}), leaf)),
        f"TRNPIPE_{leaf.name.replace('.', '__').upper()}",
    )
    by_flag = resolve([], {}, [(leaf.flag, text)])
    by_env = resolve([], {env: text}, [])
    assert by_flag.settings == by_env.settings == Settings()
    assert by_flag.sources[leaf.name] == f"flag {leaf.flag}"
    assert by_env.sources[leaf.name] == f"env {env}"


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_every_setting_has_one_line_of_help(leaf: SettingField) -> None:
    assert leaf.field.description
    assert "\n" not in leaf.field.description


def test_the_page_of_all_settings_is_current() -> None:
    assert REFERENCE.read_text() == f"{reference(CycleSettings)}\n", "make docs"


@pytest.mark.parametrize("flag", ["--train.max-steps", "--train.max_steps", "--Train.Max-Steps"])
def test_kebab_and_snake_are_the_same(flag: str) -> None:
    assert with_flags((flag, "7")).train.max_steps == 7


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("--log.tensorboard", None, True),
        ("--no-log.tensorboard", None, False),
        ("--log.tensorboard", "true", True),
        ("--log.tensorboard", "false", False),
    ],
)
def test_booleans(flag: str, text: str | None, expected: bool) -> None:
    assert with_flags((flag, text)).log.tensorboard is expected


@pytest.mark.parametrize("text", ["a,b", " a , b ", '["a", "b"]'])
def test_lists(text: str) -> None:
    assert with_flags(("--data.numeric", text)).data.numeric == ("a", "b")
    assert resolve([], {"TRNPIPE_DATA__NUMERIC": text}, []).settings.data.numeric == ("a", "b")


def test_list_of_numbers_and_of_tables() -> None:
    assert with_flags(("--model.mlp-sizes", "64")).model.mlp_sizes == (64,)
    feature = with_flags(("--data.categorical", '[{"column": "brand", "num_ids": 8}]')).data.categorical[0]
    assert (feature.column, feature.num_ids) == ("brand", 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("brand", [("brand", 1024)]),
        ("brand=4096", [("brand", 4096)]),
        (" brand=8 , color", [("brand", 8), ("color", 1024)]),
        ('["brand=8", "a,b", {"column": 7}]', [("brand", 8), ("a,b", 1024), ("7", 1024)]),
        ('{"column": "brand", "num_ids": 8}', [("brand", 8)]),
    ],
)
def test_a_table_in_a_list_has_a_short_form(text: str, expected: list[tuple[str, int]], tmp_path: Path) -> None:
    for settings in (
        with_flags(("--data.categorical", text)),
        resolve([], {"TRNPIPE_DATA__CATEGORICAL": text}).settings,
        resolve([], {}, overrides={"data": {"categorical": [f"{name}={ids}" for name, ids in expected]}}).settings,
    ):
        assert [(one.column, one.num_ids) for one in settings.data.categorical] == expected


def test_a_step_of_the_jobs_has_a_short_form() -> None:
    steps = resolve([], {}, [("--jobs.steps", "tell=python tell.py 'a b'")], CycleSettings).settings.jobs.steps
    assert [(step.name, step.command) for step in steps] == [("tell", ("python", "tell.py", "a b"))]


TEXT_LISTS = [leaf for leaf in LEAVES if leaf.field.annotation in (tuple[str, ...], dict[str, str])]


@pytest.mark.parametrize("leaf", TEXT_LISTS, ids=lambda leaf: leaf.name)
def test_numbers_in_a_list_of_texts_are_texts(leaf: SettingField, tmp_path: Path) -> None:
    """As the readers of data make them: a label 1.0 is that of 1."""
    section, _, key = leaf.name.rpartition(".")
    texts = ["0", "1", "2.5", "true", "2026-11-20", "x"]
    items = ["0", "1.0", "2.5", "true", "2026-11-20", "'x'"]
    is_list = tuple in leaf.origins
    value = f"[{', '.join(items)}]" if is_list else f"{{{', '.join(f'k{i} = {item}' for i, item in enumerate(items))}}}"
    expected = texts if is_list else {f"k{i}": text for i, text in enumerate(texts)}
    tree = tomllib.loads(f"value = {value}")["value"]
    assert coerce_texts(leaf.field.annotation, tree) == expected
    if leaf.name in ("data.labels", "data.filter"):
        found = value_of(resolve([toml(tmp_path, f"[{section}]\n{key} = {value}")], {}), leaf)
        assert found == (tuple(texts) if is_list else expected)


def test_labels_may_be_typed_as_numbers() -> None:
    assert with_flags(("--data.labels", "[0,1,2]")).data.labels == ("0", "1", "2")
    assert resolve([], {}, overrides={"data": {"labels": [0, 1.0]}}).settings.data.labels == ("0", "1")


def test_mappings() -> None:
    assert with_flags(("--data.filter", "a=1,b=x=y")).data.filter == {"a": "1", "b": "x=y"}
    assert with_flags(("--data.filter", '{"a": "1"}')).data.filter == {"a": "1"}
    assert with_flags(("--data.filter.Locale", "us"), ("--data.filter.b", "2")).data.filter == {
        "Locale": "us",
        "b": "2",
    }
    assert resolve([], {"TRNPIPE_DATA__FILTER__Locale": "us"}, []).settings.data.filter == {"Locale": "us"}


@pytest.mark.parametrize("text", ["foo", "[1]", "{"])
def test_one_key_beside_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.filter = .* \(flag --data\.filter\): .* valid dictionary"):
        with_flags(("--data.filter", text), ("--data.filter.b", "2"))
    env = {"TRNPIPE_DATA__FILTER": text, "TRNPIPE_DATA__FILTER__b": "2"}
    with pytest.raises(ConfigError, match=r"data\.filter = .* \(env TRNPIPE_DATA__FILTER\)"):
        resolve([], env, [])
    assert with_flags(("--data.filter", ""), ("--data.filter.b", "2")).data.filter == {"b": "2"}


def test_null_unsets_an_optional_value_only(tmp_path: Path) -> None:
    path = toml(tmp_path, "[data]\npath = 'x'")
    assert resolve([path], {}, [("--data.path", "null")]).settings.data.path is None
    assert with_flags(("--workspace", "null")).workspace == "null"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4, unique=True))
def test_any_list_survives_as_json(values: list[str]) -> None:
    assert with_flags(("--data.numeric", json.dumps(values))).data.numeric == tuple(values)


@pytest.mark.parametrize(
    ("toml_text", "env", "flags", "words"),
    [
        ("[train]\nmax_step = 3", {}, [], ["train.max_step ", "a.toml", "train.max_steps"]),
        ("[trian]\nmax_steps = 3", {}, [], ["trian.max_steps ", "a.toml"]),
        ("[train.optimizer]\nlearning-rate = 3", {}, [], ["learning-rate", "train.optimizer.learning_rate"]),
        ("", {"TRNPIPE_TRAIN__MAX_STEP": "3"}, [], ["env TRNPIPE_TRAIN__MAX_STEP", "train.max_steps"]),
        ("", {"TRNPIPE_WORKSPCE": "3"}, [], ["env TRNPIPE_WORKSPCE", "workspace"]),
        ("", {"TRNPIPE_": "3"}, [], ["env TRNPIPE_"]),
        ("", {}, [("--max-steps", "3")], ["flag --max-steps", "--train.max-steps"]),
        ("", {}, [("--train.max-stepz", None)], ["flag --train.max-stepz", "--train.max-steps"]),
        ("", {}, [("--no-train.max-steps", None)], ["flag --no-train.max-steps"]),
        ("", {}, [("--data.categorical.x", "3")], ["data.categorical.x"]),
    ],
)
def test_unknown_keys_are_refused_with_source_and_nearest(
    tmp_path: Path, toml_text: str, env: dict[str, str], flags: Flags, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([toml(tmp_path, toml_text)], env, flags)
    assert "unknown setting" in caught.value.seen
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        (
            "--train.max-steps",
            "many",
            ["train.max_steps = 'many'", "flag --train.max-steps", "integer", "int - Number of optimizer"],
        ),
        ("--train.max-steps", "-1", ["train.max_steps = '-1'", "greater than or equal to 0"]),
        ("--backend", "tpu", ["backend = 'tpu'", "auto|xla|neuron|cpu|cuda"]),
        ("--data.categorical", '[{"column": "a", "num_ids": 1}]', ["data.categorical[0][num_ids] = 1"]),
        (
            "--data.categorical",
            "[{",
            ["data.categorical = '[{'", "valid tuple", "expected: column[=num_ids],...|JSON list"],
        ),
        ("--data.filter", "locale", ["data.filter = 'locale'", "valid dictionary", "expected: key=value"]),
        ("--data.buckets", "16x", ["bucket '16x'", "data.buckets from flag --data.buckets"]),
        ("--storage.first-wait-s", "30", ["larger than max_wait_s", "flag --storage.first-wait-s"]),
        ("--train.deadline", "20260801", ["train.deadline = '20260801'", "such as 2026-08-01T18:00Z"]),
        ("--train.deadline", "+1e9", ["train.deadline = '+1e9'", "such as 2026-08-01T18:00Z"]),
        ("--train.seed", str(2**63), ["train.seed", "less than 9223372036854775808"]),
        ("--model.mlp-sizes", "64,-1", ["model.mlp_sizes[1] = '-1'", "greater than or equal to 1"]),
        ("--model.feature-sizes", "0", ["model.feature_sizes[0] = '0'", "greater than or equal to 1"]),
        (
            "--model.num-heads",
            "5",
            ["model.hidden_size 128 is not a multiple of 5", "model.num_heads from flag", "--model.hidden-size 130"],
        ),
        ("--train", "3", ["is a section", "max_steps"]),
        ("--train.max-steps", None, ["has no value"]),
        ("--cycle", "../up", ["cycle = '../up'"]),
    ],
)
def test_bad_values_are_refused_with_value_and_source(flag: str, text: str | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        with_flags((flag, text))
    assert caught.value.exit_code == 78
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_mined_negatives_without_a_loss_that_learns_of_them_are_refused() -> None:
    flags = [("--train.mined-per-query", "2"), ("--train.loss.contrastive-weight", "0")]
    with pytest.raises(ConfigError, match="mined_per_query 2 has no effect without a contrastive loss"):
        with_flags(*flags)
    assert with_flags(flags[0]).train.mined_per_query == 2


def test_a_positive_cannot_be_repeated_in_groups_of_a_single_product() -> None:
    flags = [("--train.repeat-positives", None), ("--train.candidates-per-query", "1")]
    with pytest.raises(ConfigError, match="repeat_positives requires candidates_per_query of at least 2"):
        with_flags(*flags)
    assert with_flags(flags[0]).train.repeat_positives


def test_a_deadline_is_a_time_of_toml_or_a_text_and_no_number(tmp_path: Path) -> None:
    expected = datetime(2026, 8, 1, 18, tzinfo=UTC)
    for text in ("2026-08-01T18:00:00Z", "2026-08-01T20:00:00+02:00", '"2026-08-01T18:00Z"'):
        path = toml(tmp_path, f"[train]\ndeadline = {text}")
        assert resolve([path], {}, []).settings.train.deadline == expected
    without_zone = toml(tmp_path, "[train]\ndeadline = 2026-08-01T18:00:00")
    assert resolve([without_zone], {}, []).settings.train.deadline == expected.replace(tzinfo=None)
    assert with_flags(("--train.deadline", "2026-08-01")).train.deadline == datetime(2026, 8, 1)
    with pytest.raises(ConfigError, match=r"train\.deadline = 20260801 .*a deadline cannot be a number"):
        resolve([toml(tmp_path, "[train]\ndeadline = 20260801")], {}, [])


def test_all_bad_values_are_reported_at_once(tmp_path: Path) -> None:
    path = toml(tmp_path, "[train]\nseed = 'x'\n[log]\nevery_steps = 0")
    with pytest.raises(ConfigError) as caught:
        resolve([path], {"TRNPIPE_BACKEND": "y"}, [])
    assert all(word in str(caught.value) for word in ("train.seed", "log.every_steps", "env TRNPIPE_BACKEND"))


@pytest.mark.parametrize(
    ("text", "word"),
    [("train = 3", "a table [train]"), ("[train", "not valid TOML"), ("workspace = 3", "workspace = 3")],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=r".*a\.toml") as caught:
        resolve([toml(tmp_path, text)], {}, [])
    assert word in str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid_and_do_something(path: Path) -> None:
    resolved = resolve([path], {}, [])
    assert resolved.settings != Settings()
    assert resolved.settings.model.encoder.hidden_size > 0
    assert (
        max(bucket.product_tokens for bucket in resolved.settings.data.bucket_shapes)
        <= resolved.settings.model.max_positions
    )


NOT_HASHED = frozenset(
    {
        *(
            "workspace",
            "cycle",
            "scratch",
            "launch",
            "compile",
            "estimate",
            "health",
            "parity",
            "storage",
            "log",
        ),
        *("report", "data.num_workers", "data.workers", "train.deadline", "train.collective_timeout_s"),
        *("train.parallel", "evaluate.candidate", "evaluate.promote", "evaluate.force_reason"),
        *("evaluate.golden", "gate.golden", "registry"),
        *(
            "mine.workers",
            "mine.queries_per_part",
            "teach",
            "embed.worker",
            "embed.workers",
        ),
    }
)
"""Settings, and whole sections, that change where, when and how fast a cycle runs, and not what it makes."""


def names_above(name: str) -> set[str]:
    words = name.split(".")
    return {".".join(words[: number + 1]) for number in range(len(words))}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_hash_sees_every_setting_but_those_named_here() -> None:
    base = settings_hash(Settings())

    def changed(model: BaseModel, words: list[str]) -> BaseModel:
        """Without validation: any other value will do."""
        name, *more = words
        value = getattr(model, name)
        return model.model_copy(update={name: changed(value, more) if more else ["another value"]})

    seen = {leaf.name for leaf in LEAVES if settings_hash(changed(Settings(), leaf.name.split("."))) != base}  # type: ignore[arg-type]
    assert seen == {leaf.name for leaf in LEAVES if not NOT_HASHED & names_above(leaf.name)}
    assert set().union(*(names_above(leaf.name) for leaf in LEAVES)) >= NOT_HASHED


def test_hash_is_the_same_in_another_process() -> None:
    code = "from pipeline.settings import *; print(settings_hash(Settings()))"
    env = os.environ | {"PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == settings_hash(Settings())


def test_tables_name_the_source() -> None:
    resolved = resolve([], {}, [("--train.seed", "9")])
    line = next(line for line in table_text(resolved).splitlines() if line.startswith("train.seed "))
    assert line.split() == ["train.seed", "9", "flag", "--train.seed"]
    record = json.loads(as_json(resolved))
    assert record["sources"] == {"train.seed": "flag --train.seed"}
    assert Settings.model_validate(record["settings"]) == resolved.settings
    assert record["settings_hash"] == settings_hash(resolved.settings)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_steps", "train.max_steps"),
        ("train.max-stps", "train.max_steps"),
        ("qqqqqq", None),
        ("data.paht", "data.path"),
    ],
)
def test_nearest(name: str, expected: str | None) -> None:
    near = nearest(name, leaves(Settings))
    assert near[:1] == ([] if expected is None else [expected]) and len(near) <= 3


def test_a_json_file_says_the_same_as_a_toml_file(tmp_path: Path) -> None:
    """What `trnjobs` leaves for the jobs of a cycle; null is a value there."""
    said = {"train": {"max_steps": 7, "deadline": None}, "data": {"filter": {"tier": "large"}}}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(said))
    resolved = resolve([path], {}, [])
    assert (resolved.settings.train.max_steps, resolved.settings.data.filter) == (7, {"tier": "large"})
    assert resolved.sources["train.max_steps"] == str(path)
    for text, reason in (("{", "not valid JSON"), ("[1]", "not contain an object"), ('{"x": 1}', "unknown setting x")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            resolve([path], {}, [])


def test_a_file_or_variable_of_an_earlier_version_may_name_settings_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(
        json.dumps({"health": {"max_clock_skew_s": 30.0, "nccom_across_nodes": False, "check_limit_s": 2.0}})
    )
    assert resolve([path], {"TRNPIPE_EVALUATE__VECTOR_ROWS": "20"}, []).settings.health.check_limit_s == 2.0
    with pytest.raises(ConfigError, match=r"unknown setting evaluate\.vector-rows"):
        resolve([], {}, [("--evaluate.vector-rows", "20")])


class Width(Record):
    retired: ClassVar[Mapping[str, Any]] = {"halves": 2}
    whole: int = 1


class Earlier(Settings):
    retired: ClassVar[Mapping[str, Any]] = {"search": ...}
    width: Width = Width()


def test_a_retired_setting_is_read_at_its_neutral_value_alone(tmp_path: Path) -> None:
    assert Earlier.model_validate({"search": {"trials": 3}, "width": {"halves": 2, "whole": 4}}).width.whole == 4
    path = toml(tmp_path, "[search]\ntrials = 3\n[width]\nhalves = 2\nwhole = 4")
    assert resolve([path], {"TRNPIPE_WIDTH__HALVES": "2"}, [], Earlier).settings.width.whole == 4
    for files, env in (([toml(tmp_path, "[width]\nhalves = 3")], {}), ([], {"TRNPIPE_WIDTH__HALVES": "3"})):
        with pytest.raises(ConfigError, match=r"width\.halves from .*halves = 3: this setting was removed"):
            resolve(files, env, [], Earlier)
    with pytest.raises(ValueError, match="halves = 3"):
        Width.model_validate({"halves": 3})


def test_the_settings_of_the_jobs_stand_in_the_same_files(tmp_path: Path) -> None:
    path = toml(tmp_path, "[jobs]\nanything = 1\n[train]\nmax_steps = 9")
    assert resolve([path], {"TRNPIPE_JOBS__QUEUE": "q"}, []).settings.train.max_steps == 9
    with pytest.raises(ConfigError, match=r"jobs\.queue .* is not a setting of trnpipe"):
        resolve([], {}, [("--jobs.queue", "q")])
