"""The language of the product: one class name means one class, and habits that make English hard to read stay rare."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = sorted(path for package in ("pipeline", "jobs", "trnpipe") for path in (ROOT / package).rglob("*.py"))

# Matches allowed per 10,000 words of comments and strings. Write the sentence differently instead of raising a number.
HABITS = {
    "a semicolon joins sentences": (r"[a-z)`\"'];\s+[a-z]", 20),
    "what it is, as a noun": (r"\bwhat (?:it|they|the|a|an|one|is|was|has|had|this|that|every|each|comes|goes)\b", 4),
    "programs that say and tell": (r"\b(?:said|says|told|tells?)\b", 2),
    "where for if": (r"\bwhere (?:there|it|that|they|one|none|nothing|no|nobody)\b", 2),
    "data that come, go, lie and stand": (r"\b(?:comes?|came|goes|gone|lies?|lay|stands?|stood)\b", 4),
    "nobody, whoever, theirs": (r"\b(?:whoever|whatever|whichever|nobody|everybody|somebody|theirs|ours)\b", 2),
    "a try as a noun": (r"\b(?:a|each|every|one|first|last|this|that|another|of|\d+) tr(?:y|ies)\b|\btries\b", 1),
    "beside, behind, anew": (r"\b(?:beside|behind|anew|meanwhile|in vain|for want of)\b", 3),
    "of its own": (r"\bof (?:its|their|our|his) own\b", 1),
}


def test_a_class_name_means_one_class() -> None:
    files = defaultdict(list)
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def texts() -> Iterator[str]:
    """All comments and strings of the product."""
    for path in PRODUCT:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.string


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """Words, and matches by habit."""
    counts = Counter[str]()
    for text in texts():
        counts["words"] += len(text.split())
        for habit, (pattern, _) in HABITS.items():
            counts[habit] += len(re.findall(pattern, text))
    return counts


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_stays_rare(habit: str, counts: Counter[str]) -> None:
    assert counts["words"] > 50_000
    assert counts[habit] * 10_000 / counts["words"] <= HABITS[habit][1]
