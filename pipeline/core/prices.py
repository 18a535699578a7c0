"""What a machine costs, for lines such as dollars per million texts. Pure.

On-demand list prices of us-east-1 in USD an hour, from third-party tables as of November 2026; other regions, spot and
reserved machines differ by a factor of two to three, so `estimate.price_usd_per_hour` goes before this table.
"""

PRICES_USD_PER_HOUR: dict[str, float] = {
    "trn1.2xlarge": 1.34375,
    "trn1.32xlarge": 21.50,
    "trn1n.32xlarge": 24.78,
    "trn2.3xlarge": 2.235,  # capacity block
    "trn2.48xlarge": 35.76,  # 16 times the chip of trn2.3xlarge
}


def price_usd_per_hour(instance: str, given: float | None) -> float | None:
    """The price in the settings, else that of the table; None for an instance that nobody has priced."""
    return PRICES_USD_PER_HOUR.get(instance) if given is None else given


def usd_per_million(price_usd_per_hour: float, items: int, seconds: float) -> float | None:
    """Dollars for a million items, at the pace of `items` in `seconds` on one such machine; None before any is done."""
    return price_usd_per_hour * seconds / 3600 / items * 1e6 if items else None
