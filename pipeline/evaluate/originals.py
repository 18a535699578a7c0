"""Look up the original texts of queries and titles for a score digest.

Prepared data only contains tokens, and decoding them does not restore upper case, for example. We therefore search the
input for texts that decode to the same string.
"""

import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from pipeline.context import StageContext
from pipeline.core.batch_order import Bucket
from pipeline.core.format import shortened
from pipeline.data.config import DataConfig
from pipeline.data.rows import product_text, text_characters
from pipeline.data.sources import open_source, read_products
from pipeline.data.token_sets import TokenSetInfo
from pipeline.data.tokenizer import TextTokenizer
from pipeline.embed.catalogue import cut_tokens
from pipeline.evaluate.report import MAX_TEXT, ScoreDigest
from pipeline.evaluate.retrieval import field_texts
from pipeline.retrieval.products import decode_tokens

MAX_ROWS = 1_000_000  # maximum number of input rows to search, which takes about 10 s
Text = tuple[str, str]  # the side of a pair ("query" or "product") and its text
_SIDES = {"query": "query", "product": "product", "text": "product"}  # maps fields of the digest to sides


def with_originals(
    digest: ScoreDigest, info: TokenSetInfo, tokenizer: bytes, config: DataConfig, ctx: StageContext
) -> ScoreDigest:
    """Replace the decoded texts in a digest with the original texts, as far as they occur in the newest rows.

    Raises DataError or ConfigError if the input cannot be read.
    """
    shown, tree = set[Text](), digest.model_dump(mode="json")
    _map_texts(tree, lambda text: shown.add(text))
    buckets, encoder = [Bucket.parse(text) for text in info.buckets], TextTokenizer(tokenizer)

    def round_trip(side: str, texts: list[str]) -> list[str]:
        limit = buckets[-1].query_tokens if side == "query" else buckets[-1].product_tokens
        tokens = cut_tokens(encoder.encode(texts), limit, encoder.sep_id)
        return [shortened(text, MAX_TEXT) for text in decode_tokens(tokens, tokenizer)]

    def windows() -> Iterator[dict[Text, str]]:
        attributes = {"attributes": info.attributes}
        own = config.model_copy(update=attributes)
        source = open_source(own, scratch=ctx.scratch, stop=ctx.stop, retry=ctx.settings.storage)
        num_rows = 0
        newest_first = replace(source, partitions=source.partitions[::-1])
        for batch in read_products(newest_first, ctx.stop, ("query", "title", "text")):
            window = {("query", info.query_prefix + query): query for query in field_texts(batch, "query")}
            for title, text in zip(field_texts(batch, "title"), field_texts(batch, "text"), strict=True):
                product = product_text(title, text, text_characters(buckets))
                window["product", info.product_prefix + product] = title or product
            yield window
            num_rows += batch.num_rows
            if num_rows >= MAX_ROWS:
                return

    originals = find_originals(shown, windows(), round_trip) if shown else {}
    return ScoreDigest.model_validate(_map_texts(tree, lambda text: originals.get(text, text[1])))


def _map_texts(tree: Any, change: Callable[[Text], object]) -> Any:
    """Apply `change` to the text of every query and product in a JSON tree."""
    if isinstance(tree, list):
        return [_map_texts(item, change) for item in tree]
    if isinstance(tree, dict):
        return {k: change((_SIDES[k], v)) if k in _SIDES else _map_texts(v, change) for k, v in tree.items()}
    return tree


def find_originals(
    shown: Collection[Text], windows: Iterable[dict[Text, str]], round_trip: Callable[[str, list[str]], list[str]]
) -> dict[Text, str]:
    """Find the original titles of the decoded texts in `shown`. Texts without a match are omitted.

    `windows` maps input texts to their titles. `round_trip` tokenises and decodes the texts of a side. This is slow, so
    we only call it for texts that start with the same letters as one of the decoded texts.
    """
    prefixes, originals, tried = {(side, _prefix(text)) for side, text in shown}, dict[Text, str](), set[Text]()
    for window in windows:
        chosen = [text for text in window if (text[0], _prefix(text[1])) in prefixes and text not in tried]
        tried.update(chosen)
        for side in {side for side, _ in chosen}:
            texts = [text for text_side, text in chosen if text_side == side]
            for text, decoded_text in zip(texts, round_trip(side, texts), strict=True):
                if (side, decoded_text) in shown:
                    title = " ".join(window[side, text].split())
                    originals.setdefault((side, decoded_text), shortened(title, MAX_TEXT))
        if len(originals) == len(shown):
            break
    return originals


def _prefix(text: str) -> str:
    """Return the first letters and digits of a text, which are preserved by all normalisers of `tokenizers`."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text[:80]).casefold()))[:24]
