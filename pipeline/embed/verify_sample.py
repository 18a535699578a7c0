"""Stored vectors against the same texts embedded again, in fp32 on the CPU, whatever device made them."""

from collections.abc import Sequence

import numpy as np

from pipeline.data.tokenizer import TextTokenizer, pieces
from pipeline.embed.drift import cosine
from pipeline.embed.embedder import counted
from pipeline.embed.flow import TextEmbedder
from pipeline.embed.output import from_stored, shorten_vectors
from pipeline.embed.texts import cut_tokens
from pipeline.embed.vector_set import VectorSet
from pipeline.embed.verify_catalogue import Picked
from pipeline.embed.verify_report import Check, judge, skipped

_WINDOW = 64


def check_sample(
    vectors: VectorSet,
    picked: Sequence[Picked],
    tokenizer: TextTokenizer,
    embedder: TextEmbedder,
    *,
    max_tokens: int,
    min_cosine: float,
) -> Check:
    """The smallest cosine between a stored vector and the one made now."""
    there: list[Picked] = []
    stored = []
    for part in sorted({one.part for one in picked}):
        hashes = vectors.hashes(part)[0]
        order = np.argsort(hashes)
        mine = [one for one in picked if one.part == part]
        wanted = np.array([one.id_hash for one in mine], dtype=np.uint64)
        at = np.minimum(np.searchsorted(hashes, wanted, sorter=order), max(0, len(hashes) - 1))
        found = hashes[order[at]] == wanted if len(hashes) else np.zeros(len(mine), dtype=np.bool_)
        there += [one for one, is_there in zip(mine, found.tolist(), strict=True) if is_there]
        stored.append(from_stored(*vectors.stored(part, order[at[found]])))
    if not there:
        return skipped("sample", "no text was picked")
    tokens = cut_tokens(tokenizer.encode([one.text for one in there]), max_tokens, tokenizer.sep_id)
    fresh = np.concatenate(list(counted(embedder.stream(pieces(tokens, _WINDOW)), "embedding a sample", len(there))))
    cosines = cosine(shorten_vectors(fresh, vectors.layout.dim), np.concatenate(stored))
    least = int(cosines.argmin())
    seen = f"{len(there)} texts embedded again in fp32 on the CPU, cosine at least {cosines[least]:.6f}"
    problems = [
        f"the vector of {there[row].text[:60]!r} has cosine {cosines[row]:.4f} to its recomputation"
        for row in np.flatnonzero(~(cosines >= min_cosine)).tolist()
    ]
    return judge("sample", problems, seen, {"min_cosine": float(cosines[least])})
