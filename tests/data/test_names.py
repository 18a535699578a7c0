"""Names of prepared data and of tokenizers depend on every setting, or it is named as of no account."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.core.errors import ConfigError
from pipeline.core.manifest import Manifest
from pipeline.data.config import CategoricalFeature, DataConfig, TokenizerConfig
from pipeline.data.input_files import InputFile, InputPartition
from pipeline.data.prepare import Encoding, name_partition
from pipeline.data.sources import Source
from pipeline.data.survey import LabelSet
from pipeline.data.token_sets import FileRows, SliceInfo, TokenSetInfo, read_token_sets
from pipeline.data.tokenizer import TextTokenizer, find_tokenizer, store_tokenizer
from pipeline.io.storage import open_storage
from pipeline.model.config import Attribute
from tests.embed.catalogues import tokenizer_json
from tests.kit.fields import check_named, without_effect
from tests.train.rows import token_set_info

CONFIG = DataConfig(
    labels=("no", "yes"),
    numeric=("price",),
    categorical=(CategoricalFeature(column="brand", num_ids=64),),
    slices=("category",),
    filter={"language": "en"},
    tokenizer=TokenizerConfig(path="file:///t/tokenizer.json"),
)
GIVEN: dict[str, Any] = {
    "attributes": (Attribute(name="brand", query="", product="brand", kind="text"),),
    "format": "csv",
    "buckets": ("16x16", "32x32"),
    "categorical": (CategoricalFeature(column="brand", num_ids=65),),
}
TOKENIZER = TextTokenizer(tokenizer_json(), "a test")
LABELS = LabelSet({"no": 0.0, "yes": 1.0}, (0.0, 1.0))
OF_CONTENT = {
    "path": "files are named by their content",
    "format": "content that is read in another way than its own is refused",
    "synthetic": "the content of its days has these settings",
    "max_bad_fraction": "refuses, and changes no row",
    "num_workers": "who does it",
    "workers": "who does it",
}
NOT_IN_SHARDS = OF_CONTENT | {
    "labels": "the classes that were decided count, see below",
    "tokenizer": "the tokenizer itself counts, see below",
}
NOT_IN_TOKENIZERS = OF_CONTENT | {
    **dict.fromkeys(("labels", "numeric", "categorical", "slices", "lexical"), "no text"),
    "valid_fraction": "it is trained on rows of all splits",
    "test_fraction": "it is trained on rows of all splits",
    "split_by": "it is trained on rows of all splits",
    "rows_per_chunk": "who does it",
    "query_prefix": "put before texts that are encoded",
    "product_prefix": "put before texts that are encoded",
    "tokenizer.path": "one that is given is not trained",
}


def source_of(*contents: str, names: tuple[str, ...] = ("dt=2026-01-01", "dt=2026-01-02")) -> Source:
    files = [(InputFile(f"{name}/part-0.csv", "csv", content),) for name, content in zip(names, contents, strict=False)]
    partitions = tuple(InputPartition(name, file) for name, file in zip(names, files, strict=False))
    return cast(Source, SimpleNamespace(partitions=partitions, fixed_labels={}))


SOURCE = source_of("aa", "bb")


def prefix(config: DataConfig, source: Source = SOURCE, labels: LabelSet = LABELS) -> str:
    return name_partition(Encoding(config, TOKENIZER, labels), source.partitions[0], carve_valid=False)[0]


def test_every_setting_of_the_data_names_other_shards_or_is_named_as_none_of_them() -> None:
    check_named(without_effect(CONFIG, prefix, **GIVEN), NOT_IN_SHARDS)


@pytest.mark.parametrize(
    "labels",
    [
        LabelSet({"yes": 0.0, "no": 1.0}, (0.0, 1.0)),
        LabelSet({"no": 0.0, "yes": 1.0}, (0.0, 0.5)),
        LabelSet({"no": 0.0, "yes": 1.0, "very": 1.0}, (0.0, 1.0, 1.0)),
    ],
)
def test_other_classes_or_gains_name_other_shards(labels: LabelSet) -> None:
    assert prefix(CONFIG, labels=labels) != prefix(CONFIG)


def test_content_tokenizer_and_day_name_the_shards() -> None:
    other = TextTokenizer(tokenizer_json(), "a test").with_split_digits()
    assert name_partition(Encoding(CONFIG, other, LABELS), SOURCE.partitions[0], carve_valid=False)[0] != prefix(CONFIG)
    assert prefix(CONFIG, source_of("ab")) != prefix(CONFIG)
    assert prefix(CONFIG, source_of("aa", names=("dt=2026-01-03",))) != prefix(CONFIG)
    joined = SOURCE.partitions[0]
    joined = replace(joined, extra_ids=("products",))
    assert prefix(CONFIG, cast(Source, SimpleNamespace(partitions=(joined,), fixed_labels={}))) != prefix(CONFIG)


def test_every_setting_asks_for_another_tokenizer_or_is_named_as_of_no_account(tmp_path: Path) -> None:
    workspace = open_storage(str(tmp_path / "workspace"))
    config = CONFIG.model_copy(update={"tokenizer": TokenizerConfig(split_digits=True)})
    store_tokenizer(config, SOURCE.partitions, workspace, TOKENIZER, tmp_path)

    def is_taken(asked: DataConfig) -> bool:
        return find_tokenizer(asked, SOURCE, workspace) is not None

    assert is_taken(config)
    check_named(without_effect(config, is_taken, **GIVEN), NOT_IN_TOKENIZERS)


def test_a_tokenizer_counts_while_all_that_it_was_trained_on_is_there_unchanged(tmp_path: Path) -> None:
    workspace = open_storage(str(tmp_path / "workspace"))
    store_tokenizer(CONFIG, SOURCE.partitions, workspace, TOKENIZER, tmp_path)
    names = ("dt=2026-01-01", "dt=2026-01-02", "dt=2026-01-03")
    assert find_tokenizer(CONFIG, source_of("aa", "bb", "cc", names=names), workspace) is not None
    for contents in (("aa", "changed"), ("changed", "bb"), ("aa",)):
        assert find_tokenizer(CONFIG, source_of(*contents), workspace) is None


def test_every_field_of_prepared_data_is_common_to_the_partitions_of_a_run_or_their_own(tmp_path: Path) -> None:
    workspace = open_storage(str(tmp_path))
    one = token_set_info("dt=2026-01-01", "one").model_copy(update={"query_prefix": "q: ", "product_prefix": "p: "})

    def fits(other: TokenSetInfo) -> bool:
        for number, info in enumerate((one, other)):
            fields = info.model_dump(mode="json")
            workspace.write_bytes(
                f"tokens/{number}/MANIFEST.json",
                Manifest(kind="tokens", created_by="t", fields=fields, files={}).to_json(),
            )
        try:
            read_token_sets(workspace, ["tokens/0", "tokens/1"])
        except ConfigError:
            return False
        return True

    own = {
        "schema_version": "part of the fingerprint that names the folder",
        "dataset": "the folder it lies in",
        "vocab_size": "of the tokenizer, which is common",
        "label_gains": "the mean gains of its rows; a run takes those of the first or of its parent",
        **dict.fromkeys(("partition", "watermark", "fingerprint", "splits", "files", "judged"), "its own"),
        **dict.fromkeys(
            ("rows_read", "rows_bad", "reasons", "truncated_rows", "tokens", "without_category", "without_number"),
            "its own",
        ),
    }
    given: dict[str, Any] = {
        "splits": {"valid": ()},
        "judged": {},
        "files": (FileRows(file="x", rows=1, good=1, bad=0, filtered=0, blank=0),),
        "reasons": {"x": 1},
        "without_category": {"x": 1},
        "without_number": {"x": 1},
        "label_gains": (0.0, 0.5),
        "attributes": GIVEN["attributes"],
        "categorical": (),
        "split_by": "both",
        "slices": (SliceInfo(column="category", names=("a",)),),
    }
    fits(one)
    check_named(without_effect(one, fits, **given), own)
