"""What the benchmark on a GPU counts; CI has none."""

import pytest

from bench.gpu import Task, flops, peak_flops
from pipeline.model.config import PRESETS


@pytest.mark.parametrize(("tokens", "batch_size"), [(128, 64), (512, 16)])
def test_operations_of_bert_large_are_those_of_the_formula(tokens: int, batch_size: int) -> None:
    size, every = PRESETS["large"], 2 * batch_size * tokens
    weights = size.num_layers * (4 * size.hidden_size**2 + 2 * size.hidden_size * size.intermediate_size)
    attention = 12 * size.num_layers * size.hidden_size * every * tokens
    assert flops("large", batch_size, tokens) == pytest.approx(6 * weights * every + attention, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
    ],
)
def test_the_peak_of_a_card_is_that_of_its_form(name: str, tflops: float) -> None:
    assert peak_flops(name) == 1e12 * tflops
    assert peak_flops("NVIDIA T4") is None


def test_no_token_is_padding() -> None:
    rows = Task("tiny", 4, 8, "cpu").rows
    assert all((rows.arrays[name] != rows.pad_id).all() for name in ("query", "product"))
