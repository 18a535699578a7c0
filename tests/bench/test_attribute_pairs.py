"""Boosting with attributes that init proposes, against the same pairs in the form that had to be made by hand."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.quality.attribute_pairs import by_hand, offer, pairs, products, write
from pipeline.commands.init import guess_columns, read_columns
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.token_sets import Split, open_rows, read_token_sets
from pipeline.evaluate.baselines import Boosting, fit
from pipeline.io.storage import open_storage


def test_offers_of_a_product_agree_on_its_code_and_may_lack_a_price() -> None:
    stream = random.Random(3)
    (product, *_) = products(stream, 1)
    offers = [offer(stream, product, 0.5) for _ in range(60)]
    assert {each["model_number"].replace("-", "").replace(" ", "").lower() for each in offers} <= {
        "", product[2].replace("-", "").lower()
    }  # fmt: skip
    assert 10 < sum(not each["price"] for each in offers) < 50


@pytest.mark.stage
def test_f1(scores_of: Any) -> None:
    rows = list(pairs(6000))
    ours, theirs = scores_of("attributes", rows), scores_of("by_hand", list(map(by_hand, rows)))
    assert ours > theirs > 0.7


@pytest.fixture
def scores_of(tmp_path: Path) -> Any:
    """Returns the F1 of boosting on the test split, with the settings that init guesses alone."""

    def f1(name: str, rows: list[dict[str, str]]) -> float:
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "pairs.csv", rows)
        guess = guess_columns(read_columns(str(folder / "pairs.csv"), DataConfig(), StopSignal())[0])
        config = DataConfig(
            path=str(folder / "pairs.csv"),
            labels=guess.labels,
            numeric=tuple(guess.numeric),
            categorical=tuple(guess.categorical),
            attributes=tuple(guess.attributes),
            tokenizer=TokenizerConfig(vocab_size=600),
            test_fraction=0.3,
            num_workers=1,
        )
        storage, stop = open_storage(str(folder / "workspace")), StopSignal()
        done = prepare(config, storage, scratch=folder / "scratch", events=lambda *name, **fields: None, stop=stop)
        assert done.rows_bad == 0
        sets = read_token_sets(storage, done.token_set_prefixes)

        def opened(split: Split) -> Any:
            return open_rows(storage, sets, split, folder / "cache")

        model = fit(opened("train"), 2, 100_000, stop)
        assert isinstance(model, Boosting)
        test, matches, found, right = opened("test"), 0, 0, 0
        for bucket, numbers in test.blocks():
            arrays = test.read(np.full(len(numbers), bucket), numbers, bucket, ("numeric", "label"))
            if len(numbers):
                chosen = model.model.predict(arrays["numeric"]) == 1
                matches, found = matches + int((arrays["label"] == 1).sum()), found + int(chosen.sum())
                right += int((chosen & (arrays["label"] == 1)).sum())
        return 2 * right / (matches + found)

    return f1
