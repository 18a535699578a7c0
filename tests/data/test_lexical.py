import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.lexical import LEXICAL_NAMES, lexical_features


def named(query: str, title: str) -> dict[str, float]:
    return dict(zip(LEXICAL_NAMES, lexical_features([query], [title])[0].tolist(), strict=True))


@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=60)), max_size=5))
def test_finite_for_any_text(pairs: list[tuple[str, str]]) -> None:
    values = lexical_features([q for q, _ in pairs], [t for _, t in pairs])
    assert values.shape == (len(pairs), len(LEXICAL_NAMES))
    assert values.dtype == np.float32
    assert np.isfinite(values).all()


def test_equal_texts_overlap_fully() -> None:
    values = named("Bosch WAT28 8kg", "bosch wat28 8kg")
    for name in ("jaccard", "query_coverage", "title_coverage", "code_coverage", "trigram_cosine", "prefix_share"):
        assert values[f"lex_{name}"] == pytest.approx(1.0), name
    assert values["lex_codes_missed"] == 0


def test_a_model_number_is_found_without_its_spaces() -> None:
    apart = named("bosch kis86af30g", "bosch kis 86 af 30g fridge")
    assert apart["lex_code_coverage"] == 0
    assert apart["lex_squeezed_coverage"] == 1


def test_units_tell_conflict_from_agreement() -> None:
    same, other = named("disk 512 gb", "disk 512gb"), named("disk 512gb", "disk 256 gb")
    assert same["lex_units_shared"] > 0 == same["lex_units_conflict"]
    assert other["lex_units_conflict"] > 0 == other["lex_units_shared"]
