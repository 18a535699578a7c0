import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.lexical import LEXICAL_NAMES, lexical_features


def named(query: str, title: str) -> dict[str, float]:
    return dict(zip(LEXICAL_NAMES, lexical_features([query], [title])[0].tolist(), strict=True))


@pytest.mark.unit
@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=60)), max_size=5))
def test_finite_for_any_text(pairs: list[tuple[str, str]]) -> None:
    values = lexical_features([q for q, _ in pairs], [t for _, t in pairs])
    assert values.shape == (len(pairs), len(LEXICAL_NAMES))
    assert values.dtype == np.float32
    assert np.isfinite(values).all()


@pytest.mark.unit
def test_equal_texts_overlap_fully() -> None:
    values = named("Bosch WAT28 8kg", "bosch wat28 8kg")
    for name in ("jaccard", "query_coverage", "title_coverage", "code_coverage", "trigram_cosine", "prefix_share"):
        assert values[f"lex_{name}"] == pytest.approx(1.0), name
    assert values["lex_codes_missed"] == 0


@pytest.mark.unit
def test_unrelated_texts_do_not_overlap() -> None:
    values = named("bosch washer", "apple iphone")
    assert values["lex_jaccard"] == values["lex_query_coverage"] == values["lex_squeezed_coverage"] == 0


@pytest.mark.unit
def test_a_model_number_is_found_without_its_spaces() -> None:
    apart = named("bosch kis86af30g", "bosch kis 86 af 30g fridge")
    assert apart["lex_code_coverage"] == 0
    assert apart["lex_squeezed_coverage"] == 1


@pytest.mark.unit
def test_units_tell_conflict_from_agreement() -> None:
    same, other = named("disk 512 gb", "disk 512gb"), named("disk 512gb", "disk 256 gb")
    assert same["lex_units_shared"] > 0 == same["lex_units_conflict"]
    assert other["lex_units_conflict"] > 0 == other["lex_units_shared"]


@pytest.mark.stage
def test_beats_the_published_floor(pricerunner: str) -> None:
    """0.785 is the accuracy of gradient boosting on 8 lexical features; one tree on part of the rows does better."""
    from sklearn.tree import DecisionTreeClassifier

    table = pq.read_table(pricerunner, columns=["query", "title", "label", "split"])
    table = table.take(np.arange(0, table.num_rows, 6))
    split, label = np.array(table["split"].to_pylist()), np.array(table["label"].to_pylist())
    train, test = split == "train", split == "test"
    values = lexical_features(table["query"].to_pylist(), table["title"].to_pylist())
    model = DecisionTreeClassifier(max_depth=9, min_samples_leaf=20, random_state=0).fit(values[train], label[train])
    assert (model.predict(values[test]) == label[test]).mean() > 0.80
