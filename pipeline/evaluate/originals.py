"""The queries and titles of a digest as the input has them: prepared data keeps tokens, without case and spacing."""

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

MAX_ROWS = 1_000_000
"""Rows of the input that are looked through, the newest days first: about 10 s."""
Text = tuple[str, str]
"""A side of a pair, query or product, and a text of it."""
_SIDES = {"query": "query", "product": "product", "text": "product"}
"""Of the fields of examples, moved queries and the products that were found."""


def with_originals(
    digest: ScoreDigest, info: TokenSetInfo, tokenizer: bytes, config: DataConfig, ctx: StageContext
) -> ScoreDigest:
    """Return the digest with original texts in place of decode_tokens ones, as far as the newest rows have them.

    Raises DataError or ConfigError if the input cannot be read.
    """
    shown, tree = set[Text](), digest.model_dump(mode="json")
    _change(tree, lambda text: shown.add(text))
    buckets, encoder = [Bucket.parse(text) for text in info.buckets], TextTokenizer(tokenizer)

    def again(side: str, texts: list[str]) -> list[str]:
        limit = buckets[-1].query_tokens if side == "query" else buckets[-1].product_tokens
        tokens = cut_tokens(encoder.encode(texts), limit, encoder.sep_id)
        return [shortened(text, MAX_TEXT) for text in decode_tokens(tokens, tokenizer)]

    def windows() -> Iterator[dict[Text, str]]:
        source, num_rows = open_source(config, scratch=ctx.scratch, stop=ctx.stop), 0
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

    found = find_originals(shown, windows(), again) if shown else {}
    return ScoreDigest.model_validate(_change(tree, lambda text: found.get(text, text[1])))


def _change(tree: Any, change: Callable[[Text], object]) -> Any:
    """Return a tree of JSON with what `change` makes of each text of a query or product."""
    if isinstance(tree, list):
        return [_change(one, change) for one in tree]
    if isinstance(tree, dict):
        return {k: change((_SIDES[k], v)) if k in _SIDES else _change(v, change) for k, v in tree.items()}
    return tree


def find_originals(
    shown: Collection[Text], windows: Iterable[dict[Text, str]], again: Callable[[str, list[str]], list[str]]
) -> dict[Text, str]:
    """Return the originals of the decoded texts `shown`, without those that are not found. Pure.

    `windows`: texts of the input with titles. `again` tokenises and decodes texts of a side; it is slow, so only
    texts that begin like one of `shown` are given to it.
    """
    begins, found, tried = {(side, _beginning(text)) for side, text in shown}, dict[Text, str](), set[Text]()
    for window in windows:
        chosen = [one for one in window if (one[0], _beginning(one[1])) in begins and one not in tried]
        tried.update(chosen)
        for side in {side for side, _ in chosen}:
            texts = [text for of, text in chosen if of == side]
            for text, words in zip(texts, again(side, texts), strict=True):
                if (side, words) in shown:
                    title = " ".join(window[side, text].split())
                    found.setdefault((side, words), shortened(title, MAX_TEXT))
        if len(found) == len(shown):
            break
    return found


def _beginning(text: str) -> str:
    """Return the first letters and digits of a text, as every normaliser of tokenizers leaves them."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text[:80]).casefold()))[:24]
