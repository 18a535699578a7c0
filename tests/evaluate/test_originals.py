"""The original texts of a digest: found by what their tokens are, and only among those that begin alike."""

from pipeline.core.format import shortened
from pipeline.evaluate.originals import Text, find_originals
from pipeline.evaluate.report import MAX_TEXT


def test_an_original_has_the_same_tokens_and_its_title_is_shown() -> None:
    long = "Long " * 60
    cut = shortened(long.lower(), MAX_TEXT)
    windows: list[dict[Text, str]] = [
        {("query", "TV 32&quot;"): "TV 32&quot;", ("product", "Crème  brûlée, 2 cl"): "Crème\n brûlée"},
        {("product", 'TV 32"'): 'TV 32"', ("query", "other"): "other", ("product", long): long},
        {("query", 'TV 32"'): 'TV 32"', ("query", 'Tv 32"'): 'Tv 32"', ("query", "TV 32 inch"): "TV 32 inch"},
        {("query", "red  shoes"): "red  shoes"},
    ]
    plain = {
        'TV 32"': 'tv 32 "',
        'Tv 32"': 'tv 32 "',
        "TV 32&quot;": "tv 32 & quot ;",
        "TV 32 inch": "tv 32 inch",
        "Crème  brûlée, 2 cl": "creme brulee, 2 cl",
        long: cut,
    }
    tried: list[Text] = []

    def again(side: str, texts: list[str]) -> list[str]:
        tried.extend((side, text) for text in texts)
        return [plain[text] for text in texts]

    shown = {("query", 'tv 32 "'), ("query", "gone"), ("product", "creme brulee, 2 cl"), ("product", cut)}
    found = find_originals(shown, [*windows, *windows], again)
    assert found == {
        ("query", 'tv 32 "'): 'TV 32"',
        ("product", "creme brulee, 2 cl"): "Crème brûlée",
        ("product", cut): shortened(long, MAX_TEXT),
    }
    assert len(tried) == len(set(tried)), "each text once"
    assert {text for _, text in tried} == {'TV 32"', 'Tv 32"', "Crème  brûlée, 2 cl", long}


def test_nothing_more_is_read_when_all_are_found() -> None:
    windows = iter([{("query", "Red"): "Red"}, {("query", "red"): "red"}])
    assert find_originals({("query", "red")}, windows, lambda side, texts: ["red"]) == {("query", "red"): "Red"}
    assert next(windows) == {("query", "red"): "red"}
