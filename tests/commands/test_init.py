"""`trnpipe init`: what columns are taken for, and the project file that commands in a folder read."""

import json
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from pipeline.commands.init import Column, Guess, guess_columns, project_text
from pipeline.context import load_result
from pipeline.core.errors import ConfigError, DataError
from pipeline.data.config import CategoricalFeature, DataConfig
from pipeline.data.rows import CLICK_COLUMNS
from pipeline.data.token_sets import read_token_sets, token_set_prefixes
from pipeline.io.storage import open_storage
from pipeline.model.config import Attribute
from pipeline.settings import PROJECT_FILE, project_files, resolve
from tests.docs.markdown import ROOT, blocks


def columns(**values: list[str]) -> dict[str, Column]:
    found = {name: Column(name) for name in values}
    for name, cells in values.items():
        found[name].add(cell.encode() for cell in cells)
    return found


QUERIES = [f"query {number // 4} words" for number in range(400)]
TITLES = [f"title of product {number}" for number in range(400)]
ROWS = list(enumerate(zip(QUERIES, TITLES, strict=True)))
GRADES = [str(number % 3) for number in range(400)]


def test_columns_are_found_by_their_names() -> None:
    prices = [f"{number}.5" for number in range(400)]
    brands = [f"brand{number % 7}" for number in range(400)]
    guess = guess_columns(
        columns(search_term=QUERIES, **{"Item Name": TITLES}, Grade=GRADES, price=prices, brand=brands, sku=TITLES)
    )
    assert guess.columns == {"query": "search_term", "title": "Item Name", "label": "Grade", "product_id": "sku"}
    assert guess.labels == ("0", "1", "2")
    assert (guess.numeric, guess.categorical, guess.notes) == (["price"], [CategoricalFeature(column="brand")], [])


def test_columns_are_found_by_their_content_and_said() -> None:
    guess = guess_columns(columns(a=TITLES, b=QUERIES, c=GRADES))
    assert guess.columns == {"query": "b", "title": "a", "label": "c"}
    assert len(guess.notes) == 3


def test_a_label_that_does_not_fit_is_a_mistake_if_it_is_rare() -> None:
    guess = guess_columns(columns(query=QUERIES, title=TITLES, label=[*GRADES[:-1], "n/a"]))
    assert guess.labels == ("0", "1", "2") and "n/a (1)" in guess.notes[0]
    guess = guess_columns(columns(query=QUERIES, title=TITLES, label=["good", "bad"] * 200))
    assert guess.labels == () and guess.unordered == ("bad", "good") and "IN ORDER" in guess.notes[0]


def test_gains_put_labels_in_order_and_a_category_may_be_missing() -> None:
    guess = guess_columns(
        columns(
            query=QUERIES,
            title=TITLES,
            label=["good", "bad"] * 200,
            gain=["1", "0.1"] * 200,
            brand=["", "a", "b", "c"] * 100,
        )
    )
    assert guess.labels == () and guess.columns["gain"] == "gain"
    assert (guess.numeric, guess.categorical) == ([], [CategoricalFeature(column="brand")])


def test_numbers_may_be_missing_and_configured_features_are_added_to_the_guessed_ones() -> None:
    prices = ["", *(f"{number}.5" for number in range(399))]
    file = columns(query=QUERIES, title=TITLES, label=GRADES, price=prices, size=prices, const=["x"] * 400)
    guess = guess_columns(file)
    assert guess.numeric == ["price", "size"] and "1 different values" in guess.notes[0]
    assert guess_columns(file, DataConfig(numeric=("size",))).numeric == ["size", "price"]


def attributes_of(guess: Guess) -> list[tuple[str | None, ...]]:
    return [(each.name, each.query, each.product, each.kind) for each in guess.attributes]


BRANDS = [f"Brand {number % 20}" for number in range(400)]
MODELS = [f"{910001898 + number % 150}" for number in range(400)]
GAPS = ["" if number % 9 == 0 else f"{number % 90}.5" for number in range(400)]
LONG = [f"{title} with a long description that nobody compares" for title in TITLES]


def test_attributes_of_both_sides_are_proposed_with_their_kinds() -> None:
    sides = {"query_brand": BRANDS, "brand": BRANDS[::-1], "query_mpn": MODELS, "product_mpn": MODELS}
    guess = guess_columns(columns(query=QUERIES, title=TITLES, label=GRADES, **sides, query_price=GAPS, price=GAPS))
    assert attributes_of(guess) == [
        ("brand", "query_brand", "brand", "text"),
        ("mpn", "query_mpn", "product_mpn", "text"),
        ("price", "query_price", "price", "number"),
    ]
    assert (guess.numeric, guess.categorical, guess.notes) == ([], [], [])


def test_pairs_of_offers_whose_ids_may_tell_the_label() -> None:
    names = ("id", "title", "brand", "cluster_id", "description", "price", "url")
    cells = (MODELS, TITLES, BRANDS, MODELS, LONG, GAPS, MODELS)
    sides = {f"{name}_{side}": values for side in ("left", "right") for name, values in zip(names, cells, strict=True)}
    guess = guess_columns(columns(pair_id=MODELS, label=["0", "1"] * 200, **sides))
    assert guess.columns == {
        "query": "title_left", "title": "title_right", "label": "label", "query_id": "id_left", "product_id": "id_right"
    }  # fmt: skip
    assert [each.name for each in guess.attributes] == ["brand", "price"]
    why = {note.split(" ", 2)[1]: note for note in guess.notes}
    assert "may tell the label" in why["'cluster_id_left'"] and "may tell the label" in why["'url_left'"]
    assert "are long" in why["'description_left'"]


def test_brands_are_not_taken_for_queries_and_long_texts_not_for_titles() -> None:
    file = columns(marke=BRANDS, beschreibung=LONG, suchanfrage=QUERIES, titel=TITLES, preis=GAPS, relevanz=GRADES)
    guess = guess_columns(file)
    assert guess.columns == {"query": "suchanfrage", "title": "titel", "label": "relevanz"}
    assert (guess.numeric, guess.categorical) == (["preis"], [CategoricalFeature(column="marke")])
    few = guess_columns(columns(a=["red shoe", "blue hat"] * 200, b=TITLES, label=GRADES))
    assert few.columns["query"] == "a", "unless there is no other text"


def test_attributes_of_products_alone_and_configured_ones() -> None:
    file = columns(query=QUERIES, title=TITLES, label=GRADES, MPN=MODELS, vendor=[f"v{n}" for n in range(400)])
    assert attributes_of(guess_columns(file)) == [("MPN", "", "MPN", "text"), ("vendor", "", "vendor", "text")]
    given = DataConfig(attributes=(Attribute(name="maker", product="vendor"), Attribute(name="MPN", kind="number")))
    assert attributes_of(guess_columns(file, given)) == [("maker", "", "vendor", "text"), ("MPN", "", "MPN", "number")]
    with pytest.raises(DataError, match="no column of attribute 'size'"):
        guess_columns(file, DataConfig(attributes=(Attribute(name="size"),)))


@pytest.mark.stage
def test_a_file_with_attributes_needs_no_column_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("query", "title", "label", "query_brand", "brand", "query_price", "price")
    cells = (QUERIES, TITLES, GRADES, BRANDS, BRANDS[::-1], GAPS, GAPS[::-1])
    lines = [",".join(row) for row in (names, *zip(*cells, strict=True))]
    Path("mine.csv").write_text("\n".join(lines) + "\n")
    assert cli.main(["init", "mine.csv"]) == 0
    settings = resolve(project_files(tmp_path), {}).settings
    assert [(each.query, each.kind) for each in settings.data.attributes] == [
        ("query_brand", "text"), ("query_price", "number")
    ]  # fmt: skip
    assert cli.main(["prepare", "--cycle", "c1", "--data.num-workers=1"]) == 0
    result = json.loads(Path("workspace/mine/cycles/c1/prepare/digest.json").read_text())
    (partition,) = result["partitions"]
    assert partition["bad"] == 0 and sum(partition["rows"].values()) == 400
    missing = sum(not one or not other for one, other in zip(GAPS, GAPS[::-1], strict=True))
    assert partition["without_category"] == {
        "brand_equal": 0, "brand_near": 0, "price_difference": missing, "price_log_ratio": missing
    }  # fmt: skip


def test_flags_win_over_guesses_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    header = "what_was_typed,article,verdict,cost,maker\n"
    rows = [f"{query},{title},{'good' if at % 2 else 'bad'},{at}.5,m{at % 5}\n" for at, (query, title) in ROWS]
    Path("mine.csv").write_text(header + "".join(rows))
    assert cli.main(["init", "mine.csv"]) == DataError.exit_code
    assert "next: trnpipe init mine.csv --data.columns.label COLUMN" in capsys.readouterr().err
    assert cli.main(["init", "mine.csv", "--data.columns.label", "grade"]) == DataError.exit_code
    flags = ["--data.columns.label", "verdict", "--data.labels=bad,good", "--data.categorical", "maker=64"]
    assert cli.main(["init", "mine.csv", *flags, "--train.epochs", "3", "--data.filter.maker", "m1"]) == 0
    settings = resolve(project_files(tmp_path), {}).settings
    assert (settings.data.columns.label, settings.data.labels) == ("verdict", ("bad", "good"))
    assert [(one.column, one.num_ids) for one in settings.data.categorical] == [("maker", 64)]
    assert (settings.train.epochs, settings.data.filter) == (3, {"maker": "m1"})


def test_an_unknown_order_of_labels_stops_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{query},{title},{('partial', 'exact', 'wrong')[at % 3]}\n" for at, (query, title) in ROWS]
    Path("mine.csv").write_text("query,title,label\n" + "".join(rows))
    assert cli.main(["init", "mine.csv"]) == 0
    assert "PUT data.labels IN ORDER" in capsys.readouterr().out
    assert resolve(project_files(tmp_path), {}).settings.data.labels == ()
    assert cli.main(["prepare", "--cycle", "c1", "--data.num-workers=1"]) == DataError.exit_code
    text = Path(PROJECT_FILE).read_text()
    Path(PROJECT_FILE).write_text(text.replace("# labels", "labels"))
    assert resolve(project_files(tmp_path), {}).settings.data.labels == ("exact", "partial", "wrong")


def test_a_split_column_is_one_only_with_the_names_of_splits() -> None:
    assert (
        "split"
        in guess_columns(columns(query=QUERIES, title=TITLES, label=GRADES, split=["train", "test"] * 200)).columns
    )
    guess = guess_columns(columns(query=QUERIES, title=TITLES, label=GRADES, split=["a", "b"] * 200))
    assert "split" not in guess.columns and guess.without == ["split"] and not guess.categorical


def test_columns_that_tell_the_label_are_no_features() -> None:
    numbers = [str(number / 7) for number in range(400)]
    leaks = dict.fromkeys((*CLICK_COLUMNS, "relevance_score"), numbers) | {"esci_label": ["E", "S"] * 200}
    guess = guess_columns(columns(query=QUERIES, title=TITLES, label=GRADES, **leaks, rating=numbers))
    assert (guess.numeric, guess.categorical) == (["rating"], [])
    assert sum("may tell the label" in note for note in guess.notes) == len(leaks)
    assert "gain" not in guess.columns


@pytest.mark.parametrize(
    ("label", "gain", "expected"),
    [
        (["irrelevant", "complement", "substitute", "exact"] * 100, None, (0, 0.01, 0.1, 1)),
        (["0", "1", "3", "1"] * 100, None, (0, 1 / 3, 1)),
        (["0", "1", "2", "3"] * 100, ["0", "0.01", "0.1", "1"] * 100, (0, 0.01, 0.1, 1)),
    ],
)
def test_gains_are_those_that_prepare_infers_without_init(
    label: list[str],
    gain: list[str] | None,
    expected: tuple[float, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.table({"query": QUERIES, "title": TITLES, "label": label} | ({"gain": gain} if gain else {}))
    pa_csv.write_csv(table, "mine.csv")
    assert cli.main(["init", "mine.csv"]) == 0
    assert cli.main(["prepare", "--cycle=c1", "--data.num-workers=1"]) == 0
    workspace = open_storage("workspace/mine")
    result = load_result(workspace, "c1", "prepare")
    assert result is not None
    (token_set,) = read_token_sets(workspace, token_set_prefixes(result.outputs))
    assert token_set.info.label_gains == pytest.approx(expected)


def test_a_gain_that_does_not_fit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    grades = [str(at % 4) for at, _ in ROWS]
    pa_csv.write_csv(pa.table({"query": QUERIES, "title": TITLES, "label": grades, "gain": grades}), "mine.csv")
    assert cli.main(["init", "mine.csv"]) == 0
    assert "column 'gain' is not used, because its values are not numbers from 0 to 1" in capsys.readouterr().out
    assert tomllib.loads(Path(PROJECT_FILE).read_text())["data"]["columns"] == {"gain": ""}
    assert cli.main(["prepare", "--cycle=c1", "--data.num-workers=1"]) == 0


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.parquet"])
def test_nested_columns_are_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nested = {"tags": [["a", "b"]] * 400, "meta": [{"x": 1}] * 400}
    table = pa.table({"query": QUERIES, "title": TITLES, "label": GRADES} | nested)
    if name.endswith("parquet"):
        pq.write_table(table, name)
    else:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    assert cli.main(["init", name]) == 0
    out = capsys.readouterr().out
    assert all(f"column {column!r} is not used, because it has nested values" in out for column in nested)
    assert cli.main(["prepare", "--cycle=c1", "--data.num-workers=1"]) == 0


def test_a_file_without_judgements_is_refused() -> None:
    with pytest.raises(DataError, match="label"):
        guess_columns(columns(query=QUERIES, title=TITLES))


@pytest.mark.parametrize(
    ("header", "flags", "seen"),
    [
        ("query,title,label,brand", ("--data.numeric=brand",), "'brand' of mine.csv has values that are not numbers"),
        ("query,title,label,größe", ("--data.columns.label=größe",), "has 1,200 different values"),
        ("query,title,label,größe", (), "1,200 of 1,200 values in column 'größe' are not UTF-8"),
    ],
)
def test_what_prepare_would_refuse_is_refused(
    header: str,
    flags: tuple[str, ...],
    seen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"query {at // 4},title of {at},{at % 2},größe {at}\n" for at in range(1200)]
    content = "".join([f"{header}\n", *rows])
    Path("mine.csv").write_bytes(header.encode() + content[len(header) :].encode("utf-8" if flags else "latin1"))
    assert cli.main(["init", "mine.csv", *flags]) == DataError.exit_code
    assert seen in capsys.readouterr().err and not Path(PROJECT_FILE).exists()


def test_sizes_of_splits_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{query},{title},{at % 2}\n" for at, (query, title) in ROWS]
    Path("mine.csv").write_text("query,title,label\n" + "".join(rows))
    for flag, said, fraction in (
        ("--data.test-fraction=0.2", "test about 20", 0.2),
        ("--data.split-by=product", "rows are split by product", None),
    ):
        assert cli.main(["init", "mine.csv", flag]) == 0
        assert said in capsys.readouterr().out
        assert tomllib.loads(Path(PROJECT_FILE).read_text())["data"].get("test_fraction") == fraction
        Path(PROJECT_FILE).unlink()


def test_a_file_without_a_header_is_noticed() -> None:
    guess = guess_columns(columns(query=QUERIES, title=TITLES, label=GRADES, **{"84.74": ["1"] * 400}))
    assert any("IF THE FILE HAS NO HEADER" in note for note in guess.notes)


def test_the_project_file_is_toml_whatever_columns_are_called() -> None:
    guess = guess_columns(columns(**{'que"ry\\': QUERIES}, title=TITLES, label=GRADES, **{"größe": GRADES[:200] * 2}))
    parsed = tomllib.loads(project_text("s3://bucket/a b/", guess, 0.2))
    assert parsed["data"]["columns"] == {"query": 'que"ry\\'}
    assert (parsed["data"]["path"], parsed["data"]["test_fraction"]) == ("s3://bucket/a b/", 0.2)
    assert parsed["model_name"] == "a-b"


def test_the_readme_shows_the_file_that_init_writes() -> None:
    shown = {block.info: block.text for block in blocks(ROOT / "README.md")}
    names = shown["csv"].splitlines()[0].split(",")
    prices, brands = ([f"{at % count}{end}" for at in range(400)] for count, end in ((40, ".5"), (7, " brand")))
    cells = dict(zip(names, (QUERIES, TITLES, GRADES, prices, brands), strict=True))
    assert project_text("judgements.csv", guess_columns(columns(**cells)), None).rstrip() == shown["toml"]


def test_init_writes_a_file_that_prepare_reads_from_a_folder_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{query},{title},{grade}" for query, title, grade in zip(QUERIES, TITLES, GRADES, strict=True)]
    (tmp_path / "mine.csv").write_text("search_term,item_name,grade\n" + "\n".join(rows) + "\n")
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine.csv"]) == 0
    out = capsys.readouterr().out
    assert "400 rows, 100 queries" in out and "THE GATE CANNOT JUDGE" in out
    assert len([line for line in out.splitlines() if line.startswith("query ")]) == 11
    monkeypatch.chdir(below)
    assert project_files(below) == [tmp_path / PROJECT_FILE]
    assert cli.main(["prepare", "--cycle", "c1", "--data.num-workers=1"]) == 0
    assert (tmp_path / "workspace" / "mine" / "cycles" / "c1" / "prepare" / "result.json").is_file()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine.csv"]) == ConfigError.exit_code
    assert f"{PROJECT_FILE} already exists" in capsys.readouterr().err
    (tmp_path / PROJECT_FILE).unlink()
    assert cli.main(["init", "gone.csv"]) == DataError.exit_code
    (tmp_path / "empty.csv").write_text("query,title,label\n")
    assert cli.main(["init", "empty.csv"]) == DataError.exit_code


def test_a_project_file_names_others_and_lies_below_them(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('model_name = "base"\n[train]\nepochs = 7\n')
    (tmp_path / PROJECT_FILE).write_text('config = "base.toml"\nmodel_name = "mine"\nworkspace = "s3://bucket/w"\n')
    settings = resolve(project_files(tmp_path / "gone" / "deep"), {}).settings
    assert (settings.model_name, settings.train.epochs, settings.workspace) == ("mine", 7, "s3://bucket/w")
    (tmp_path / PROJECT_FILE).write_text("config = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        project_files(tmp_path)
    assert project_files(Path("/")) == []


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('data = "judgements.csv"', r"data = 'judgements.csv' \(.*trnpipe.toml\) is a section"),
        ("registry = 3", "registry = 3 .* is a section"),
        ("[data]\ntokenizer = true", "data.tokenizer = True .* is a section"),
        ("config = 3", r"config = 3 \(.*trnpipe.toml\)"),
        ("config = [3]", r"config = \[3\] "),
    ],
)
def test_a_project_file_with_a_value_of_another_kind(tmp_path: Path, text: str, seen: str) -> None:
    (tmp_path / PROJECT_FILE).write_text(text)
    with pytest.raises(ConfigError, match=seen):
        resolve(project_files(tmp_path), {})
