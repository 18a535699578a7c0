"""A simulated user, who notices a position with its propensity, and then clicks on the product with the pair's rate."""

import numpy as np
import pyarrow as pa

from pipeline.core.arrays import Float64s

STANDARD = {"exact": 1.0, "substitute": 0.49, "complement": 0.23, "irrelevant": 0.1}
"""Rate by label: 0.1 + 0.9 (2^grade - 1) / 7 for the grades 3 to 0, as in studies of position bias (Ai et al.,
"Unbiased learning to rank with unbiased propensity estimation", SIGIR 2018)."""


def searches(pairs: pa.Table, rates: Float64s, propensities: Float64s, times: int, seed: int = 0) -> pa.Table:
    """Return `pairs`, sorted by query, once for each of `times` searches, with a random position and a click.

    Args:
        pairs: as many rows for each query as there are propensities.
        rates: [N], the probability of a click on a pair that was noticed.
        propensities: [K], the probability that a position is noticed.
    """
    random, num_places = np.random.default_rng(seed), len(propensities)
    order = np.tile(np.arange(num_places), (times * len(pairs) // num_places, 1))
    place = random.permuted(order, axis=1).ravel()
    row = np.tile(np.arange(len(pairs)), times)
    clicked = random.random(len(row)) < propensities[place] * rates[row]
    return pairs.take(row).append_column("position", pa.array(place + 1)).append_column("clicked", pa.array(clicked))


def queries(number: int, products: int) -> pa.Table:
    """Return pairs of `number` queries, each with `products` products."""
    numbers = range(number * products)
    return pa.table(
        {
            "query": [f"query {each // products}" for each in numbers],
            "product_id": [f"p{each}" for each in numbers],
            "title": [f"title {each}" for each in numbers],
        }
    )
