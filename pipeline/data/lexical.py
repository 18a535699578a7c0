"""Split texts in any script into words, and compute features of the word overlap between a query and a title.

The same words are indexed for BM25. Some scripts do not separate words by spaces (Chinese, Japanese, Thai, Khmer, Lao,
Burmese and related scripts). In these scripts, every character and every pair of adjacent characters is treated as a
word, which ensures that a query matches any title that contains it. In all other scripts, a word is a run of letters
and digits. Vowel signs and other combining marks (categories Mn and Mc) belong to the preceding character.

The features depend only on the two texts. As a result, they can be computed at serving time without any corpus
statistics.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from math import log, log1p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.config import DataConfig

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"  # Myanmar
    "\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf"  # Khmer; Tai Le, New Tai Lue, Tai Tham, Tai Viet
    "\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303c"  # ideographic marks and numbers
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001b000-\U0001b16f"  # Hiragana, Katakana
    "\u3100-\u312f\u31a0-\u31bf"  # Bopomofo
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han
)
"""Character ranges of scripts without spaces between words. Korean is not included because it uses spaces."""
_JOINERS = "\u200c\u200d"
"""Zero-width joiners. They only select the form of a letter, so they are part of a word if they follow a mark."""
_LAST_MARK = 0x1FFFF  # all marks above this code point are variation selectors


class _Patterns(NamedTuple):
    marks: str
    word: re.Pattern[str]
    unspaced: re.Pattern[str]
    unit: re.Pattern[str]


@cache
def _patterns() -> _Patterns:
    ranges = list[list[int]]()
    for code in range(0x300, _LAST_MARK + 1):
        if unicodedata.category(chr(code)) in ("Mn", "Mc"):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    chars = "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
    marks = f"(?:[{chars}][{_JOINERS}]?)*"
    return _Patterns(
        marks=marks,
        word=re.compile(rf"(?:\w{marks})+"),
        unspaced=re.compile(rf"(?=\w)[{_UNSPACED}]"),
        unit=re.compile(rf"(?=\w)(?P<unspaced>[{_UNSPACED}]{marks})|(?:[^\W{_UNSPACED}]{marks})+"),
    )


_ASCII_WORD = re.compile(r"\w+")
_HALF_WIDTH = re.compile("[\uff66-\uff9f]+")  # half-width Katakana, which is converted to full width


def lowered(text: str) -> str:
    """Convert a text to lower case and to Unicode normalization form C."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text.lower())


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words. Underscores are treated as letters."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return [word for run in _patterns().word.findall(lowered(text)) for word in split_run(run)]


def split_run(run: str) -> list[str]:
    """Split a run of letters into words. The run is a single word unless it contains a script without spaces."""
    if run.isascii():
        return [run]
    if not _patterns().unspaced.search(run):
        return [_without_joiners(run)]
    run = _HALF_WIDTH.sub(lambda kana: unicodedata.normalize("NFKC", kana[0]), run)
    units, previous = list[str](), ""
    for match in _patterns().unit.finditer(run):
        char = match["unspaced"]
        if char is None:
            units.append(_without_joiners(match[0]))
            previous = ""
            continue
        char = _without_joiners(char)
        units += [previous + char, char] if previous else [char]
        previous = char
    return units


def _without_joiners(text: str) -> str:
    return text.replace("\u200c", "").replace("\u200d", "")


# Features for texts that encoders represent poorly, such as model numbers and units.

LEXICAL_NAMES = (
    "lex_jaccard",
    "lex_query_coverage",
    "lex_title_coverage",
    "lex_code_coverage",
    "lex_codes_missed",
    "lex_title_codes_missed",
    "lex_squeezed_coverage",
    "lex_longest_found",
    "lex_trigram_cosine",
    "lex_trigram_coverage",
    "lex_prefix_share",
    "lex_first_word",
    "lex_units_shared",
    "lex_units_conflict",
    "lex_units_only_title",
    "lex_query_words",
    "lex_title_words",
    "lex_query_word_length",
    "lex_title_word_length",
)
"""Names of the features. A coverage is the fraction of words in one text that occur in the other text. A code is a word
that contains a digit. A squeezed text has no spaces."""


@cache
def _part(*, ascii_only: bool) -> re.Pattern[str]:
    """Return a pattern that matches runs of letters and digits, including decimal points and commas before a digit."""
    letter = r"[^\W_]" if ascii_only else rf"(?:[^\W_]{_patterns().marks})"
    return re.compile(rf"{letter}+(?:[.,](?=\d){letter}+)*")


_UNIT = re.compile(r"(?<![^\W_])(\d+(?:[.,]\d+)?)\s?([^\W\d_]{1,4}|\"|%)(?![^\W_])")
_LOG20 = log(20)
_DIGIT = re.compile(r"\d")


class _Text(NamedTuple):
    words: tuple[str, ...]
    word_set: frozenset[str]
    codes: frozenset[str]
    squeezed: str
    trigrams: frozenset[str]
    units: dict[str, frozenset[str]]
    num_letters: int


def _analyse(text: str) -> _Text:
    text = lowered(text)
    parts = _part(ascii_only=text.isascii()).findall(text)
    words = tuple(word for part in parts for word in split_run(part))
    padded = " " + " ".join(parts) + " "
    units: dict[str, set[str]] = {}
    for number, unit in _UNIT.findall(text):
        units.setdefault(unit, set()).add(number.replace(",", ".").removesuffix(".0"))
    return _Text(
        words,
        word_set := frozenset(words),
        frozenset(word for word in word_set if _DIGIT.search(word)),
        "".join(parts),
        frozenset([padded[i : i + 3] for i in range(len(padded) - 2)]),
        {unit: frozenset(numbers) for unit, numbers in units.items()},
        sum(map(len, words)),
    )


def numeric_names(config: DataConfig) -> tuple[str, ...]:
    """Return the names of all numeric features: the configured columns, the attributes, and the lexical features."""
    attributes = tuple(name for attribute in config.attributes for name in attribute.features)
    return config.numeric + attributes + (LEXICAL_NAMES if config.lexical else ())


def lexical_features(queries: Sequence[str], titles: Sequence[str]) -> npt.NDArray[np.float32]:
    """Compute the lexical features of N pairs as an array of shape [N, len(LEXICAL_NAMES)].

    All values are between 0 and about 1. Counts and lengths are on a logarithmic scale.
    """
    analyse = lru_cache(maxsize=_CACHED_TEXTS)(_analyse)
    values = [_pair_features(analyse(query), analyse(title)) for query, title in zip(queries, titles, strict=True)]
    return np.array(values, dtype=np.float32).reshape(len(values), len(LEXICAL_NAMES))


class _Code(NamedTuple):
    squeezed: str
    trigrams: frozenset[str]


def _analyse_code(text: str) -> _Code:
    """Return the letters and digits of a text in lower case, without spaces and punctuation."""
    squeezed = _analyse(text).squeezed.replace(".", "").replace(",", "")
    padded = f" {squeezed} "
    return _Code(squeezed, frozenset(padded[i : i + 3] for i in range(len(padded) - 2)))


def code_features(queries: Sequence[str], products: Sequence[str]) -> npt.NDArray[np.float32]:
    """Compare the values of a text attribute in N pairs, ignoring case, punctuation and spaces. Returns [N, 2].

    The features are whether the values are equal and how similar they are, which is the cosine of their trigrams or, if
    one value contains the other, at least the ratio of their lengths. Both are NaN if one side has no value.
    """
    analyse = lru_cache(maxsize=_CACHED_TEXTS)(_analyse_code)
    values = np.full((len(queries), 2), np.nan, dtype=np.float32)
    for row, (query, product) in enumerate(zip(map(analyse, queries), map(analyse, products), strict=True)):
        shorter, longer = sorted((query.squeezed, product.squeezed), key=len)
        if shorter:
            cosine = len(query.trigrams & product.trigrams) / (len(query.trigrams) * len(product.trigrams)) ** 0.5
            contained = len(shorter) / len(longer) if shorter in longer else 0.0
            values[row] = shorter == longer, max(cosine, contained)
    return values


# The rows of a query are usually adjacent, so a small cache suffices. A text of 100 characters takes 20 KB of memory, a
# text of 1,000 characters 130 KB.
_CACHED_TEXTS = 1024


def _scaled(count: float) -> float:
    """Map a count to a logarithmic scale on which 0 is mapped to 0 and 19 to 1."""
    return log1p(count) / _LOG20


def _pair_features(query: _Text, title: _Text) -> tuple[float, ...]:
    shared = len(query.word_set & title.word_set)
    num_query, num_title = len(query.word_set) or 1, len(title.word_set) or 1
    matches = [word for word in query.word_set if word in title.squeezed]
    matched_letters = sum(map(len, matches))
    trigrams = len(query.trigrams & title.trigrams)
    common_units = query.units.keys() & title.units.keys()
    shared_units = sum(1 for unit in common_units if query.units[unit] & title.units[unit])
    codes = len(query.codes & title.codes)
    prefix = 0
    for query_word, title_word in zip(query.words, title.words, strict=False):
        if query_word != title_word:
            break
        prefix += 1
    return (
        shared / (num_query + num_title - shared),
        shared / num_query,
        shared / num_title,
        codes / (len(query.codes) or 1),
        _scaled(len(query.codes) - codes),
        _scaled(len(title.codes) - codes),
        matched_letters / (query.num_letters or 1),
        _scaled(max(map(len, matches), default=0)),
        trigrams / ((len(query.trigrams) * len(title.trigrams)) ** 0.5 or 1.0),
        trigrams / (len(query.trigrams) or 1),
        prefix / num_query,
        float(bool(query.words) and query.words[0] in title.word_set),
        _scaled(shared_units),
        _scaled(len(common_units) - shared_units),
        _scaled(len(title.units) - len(common_units)),
        _scaled(len(query.words)),
        _scaled(len(title.words)),
        _scaled(query.num_letters / (len(query.words) or 1)),
        _scaled(title.num_letters / (len(title.words) or 1)),
    )
