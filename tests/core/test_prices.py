import pytest

from pipeline.core.footprint import INSTANCES
from pipeline.core.prices import PRICES_USD_PER_HOUR, price_usd_per_hour, usd_per_million


def test_every_instance_we_estimate_for_has_a_price() -> None:
    assert INSTANCES.keys() <= PRICES_USD_PER_HOUR.keys()


def test_what_the_settings_say_goes_first() -> None:
    assert price_usd_per_hour("trn1.2xlarge", None) == 1.34375
    assert price_usd_per_hour("trn1.2xlarge", 0.0) == 0.0
    assert price_usd_per_hour("abacus.large", None) is None
    assert price_usd_per_hour("abacus.large", 3.0) == 3.0


def test_dollars_per_million() -> None:
    # The page behind peers: 3,421.6 texts/s at 0.512 dollars an hour are 0.042 dollars per million.
    assert usd_per_million(0.512, 34_216, 10.0) == pytest.approx(0.0416, abs=1e-4)
    assert usd_per_million(0.512, 0, 10.0) is None
