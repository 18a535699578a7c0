"""Words in scripts with and without spaces and marks, and features of the words that two texts share."""

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.lexical import LEXICAL_NAMES, lexical_features, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Red_shoe 42.5, café", ["red_shoe", "42", "5", "café"]),
        ("cafe\u0301", ["café"]),
        ("赤い靴", ["赤", "赤い", "い", "い靴", "靴"]),
        ("iPhone15ケース X", ["iphone15", "ケ", "ケー", "ー", "ース", "ス", "x"]),
        ("ｶﾞﾗｽ", ["ガ", "ガラ", "ラ", "ラス", "ス"]),
        ("หูฟัง", ["หู", "หูฟั", "ฟั", "ฟัง", "ง"]),
        ("ຫູຟັງ", ["ຫູ", "ຫູຟັ", "ຟັ", "ຟັງ", "ງ"]),
        ("កាស", ["កា", "កាស", "ស"]),
        ("နားကြပ်", ["နား", "နားကြ", "ကြ", "ကြပ်", "ပ်"]),
        ("हेडफ़ोन काला", ["हेडफ़ोन", "काला"]),
        ("தலையணி", ["தலையணி"]),
        ("שָׁלוֹם עולם", ["שָׁלוֹם", "עולם"]),
        ("مُحَمَّد", ["مُحَمَّد"]),
        ("ශ්\u200dරී", ["ශ්රී"]),
        ("می\u200cخواهم", ["می", "خواهم"]),
        ("이어폰 무선", ["이어폰", "무선"]),
        ("iPhone™ m² ½", ["iphone", "m²", "½"]),
        ("", []),
        ("、。・", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == [unicodedata.normalize("NFC", word) for word in words]


LATIN = st.text(st.characters(max_codepoint=0x2FF) | st.sampled_from("ǅαωЖя한글Ω²½™—“"), max_size=40)


@given(LATIN)
def test_scripts_with_spaces_and_without_marks_are_runs_of_letters_as_ever(text: str) -> None:
    text = text.replace("\u0130", "")  # its lower case has a mark
    assert split_words(text) == re.findall(r"\w+", unicodedata.normalize("NFC", text.lower()))


@given(st.text(max_size=30))
def test_any_text_has_words_of_letters_alone(text: str) -> None:
    for word in split_words(text):
        assert word and re.match(r"\w", word) and not re.search(r"\s", word)


@pytest.mark.parametrize(
    ("query", "title", "other"),
    [
        ("無線イヤホン", "ソニー無線イヤホン黒", "赤い革靴"),
        ("靴", "赤い靴", "黒い帽子"),
        ("หูฟังไร้สาย", "โซนี่หูฟังไร้สายสีดำ", "รองเท้าแดง"),
        ("हेडफ़ोन", "काला हेडफ़ोन", "लाल जूता"),
        ("蓝牙耳机", "索尼蓝牙耳机黑色", "红色皮鞋"),
    ],
)
def test_features_see_what_both_texts_share(query: str, title: str, other: str) -> None:
    table = lexical_features([query, query], [title, other])
    right, wrong = (dict(zip(LEXICAL_NAMES, row, strict=True)) for row in table.tolist())
    assert right["lex_query_coverage"] == pytest.approx(1.0) and right["lex_jaccard"] > wrong["lex_jaccard"]
    assert right["lex_longest_found"] > wrong["lex_longest_found"]
    assert right["lex_trigram_coverage"] > wrong["lex_trigram_coverage"] or len(query) < 3


@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=60)), max_size=5))
def test_features_are_finite_for_any_text(pairs: list[tuple[str, str]]) -> None:
    values = lexical_features([q for q, _ in pairs], [t for _, t in pairs])
    assert values.shape == (len(pairs), len(LEXICAL_NAMES)) and values.dtype == np.float32
    assert np.isfinite(values).all()


def named(query: str, title: str) -> dict[str, float]:
    return dict(zip(LEXICAL_NAMES, lexical_features([query], [title])[0].tolist(), strict=True))


def test_equal_texts_model_numbers_and_units() -> None:
    values = named("Bosch WAT28 8kg", "bosch wat28 8kg")
    for name in ("jaccard", "query_coverage", "title_coverage", "code_coverage", "trigram_cosine", "prefix_share"):
        assert values[f"lex_{name}"] == pytest.approx(1.0), name
    assert values["lex_codes_missed"] == 0
    apart = named("bosch kis86af30g", "bosch kis 86 af 30g fridge")
    assert (apart["lex_code_coverage"], apart["lex_squeezed_coverage"]) == (0, 1)
    same, other = named("disk 512 gb", "disk 512gb"), named("disk 512gb", "disk 256 gb")
    assert same["lex_units_shared"] > 0 == same["lex_units_conflict"]
    assert other["lex_units_conflict"] > 0 == other["lex_units_shared"]
