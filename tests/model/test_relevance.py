"""The whole model, with and without token_match."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import from_hf, to_hf
from pipeline.model.relevance import CrossNetwork, GroupInputs, RelevanceInputs, RelevanceModel, TokenMatch, build_model

CONFIG = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, interaction_size=8, mlp_sizes=(12,)
)
SPEC = InputSpec(
    vocab_size=30,
    pad_id=0,
    labels=("a", "b", "c"),
    label_gains=(0.0, 0.5, 1.0),
    numeric=("x", "y"),
    categorical_ids=(4, 6),
)
MODES = ("both", "match")


def inputs_of(query_tokens: int, product_tokens: int, batch: int = 5) -> RelevanceInputs:
    generator = torch.Generator().manual_seed(1)

    def text(tokens: int) -> Tensor:
        ids = torch.randint(1, 30, (batch, 4), generator=generator, dtype=torch.int32)
        return torch.cat([ids, torch.zeros(batch, tokens - 4, dtype=torch.int32)], dim=1)

    return RelevanceInputs(
        text(query_tokens),
        text(product_tokens),
        torch.randn(batch, 2, generator=generator) * 100,
        torch.randint(0, 4, (batch, 2), generator=generator, dtype=torch.int32),
    )


def config_of(mode: str) -> ModelConfig:
    """`match`: both kinds of interactions, and token_match."""
    return CONFIG.model_copy(update={"token_match": mode == "match"})


def model_of(mode: str = "both", spec: InputSpec = SPEC) -> RelevanceModel:
    return build_model(config_of(mode), spec, seed=2).eval()


def in_rows(query: list[list[int]], products: list[list[list[int]]], length: int) -> list[Tensor]:
    """Tokens, positions and segments of groups, a row each."""
    rows = torch.zeros(3, len(query), length, dtype=torch.int32)
    for number, (asked, texts) in enumerate(zip(query, products, strict=True)):
        ids = [(id, place, segment) for segment, text in enumerate([asked, *texts], 1) for place, id in enumerate(text)]
        rows[:, number, : len(ids)] = torch.tensor(ids, dtype=torch.int32).t()
    return list(rows)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("length", [14, 20])
@pytest.mark.parametrize("mode", ["both", "match"])
def test_texts_in_a_row_have_the_embeddings_and_gradients_they_have_alone(pooling: str, length: int, mode: str) -> None:
    config = config_of(mode).model_copy(update={"pooling": pooling})
    alone, together = build_model(config, SPEC, seed=2), build_model(config, SPEC, seed=2)
    query = [[3, 4, 5], [6, 7]]
    products = [[[8, 9], [10, 11, 12, 13], []], [[14, 15, 16], [17], [18, 19, 20]]]
    _, _, numeric, categorical = inputs_of(4, 4, 6)
    tokens, positions, segments = in_rows(query, products, length)
    out = together(GroupInputs(tokens, positions, segments, numeric, categorical))

    def padded(texts: list[list[int]]) -> Tensor:
        return torch.tensor([text + [0] * (5 - len(text)) for text in texts], dtype=torch.int32)

    flat = [text for texts in products for text in texts]
    wanted = alone(RelevanceInputs(padded(query), padded(flat), numeric, categorical))
    real = torch.tensor([bool(text) for text in flat])
    torch.testing.assert_close(out.query, wanted.query)
    torch.testing.assert_close(out.product[real], wanted.product[real])
    torch.testing.assert_close(out.logits[real], wanted.logits[real])
    assert not out.product[~real].any()
    for found in (out, wanted):
        (found.logits[real].square().sum() + found.query.sum() + found.product[real].sum()).backward()
    for (name, one), two in zip(alone.named_parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_and_every_input_matters(mode: str) -> None:
    model = model_of(mode)
    inputs = inputs_of(6, 6)
    outputs = model(inputs)
    assert outputs.logits.shape == (5, 3)
    assert outputs.query.shape == outputs.product.shape == (5, 16)
    outputs.logits.square().sum().backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert not unused
    for field in ("numeric", "categorical", "query", "product"):
        other = inputs._replace(**{field: getattr(inputs, field).flip(0)})
        assert not torch.allclose(model(other).logits, outputs.logits, atol=1e-7), field


def test_mean_pooling_is_over_real_tokens() -> None:
    encoder, tokens = model_of().encoder, torch.tensor([[1, 7, 8, 2, 0, 0], [0, 0, 0, 0, 0, 0]])
    pooled = encoder(tokens)
    torch.testing.assert_close(pooled[0], encoder.hidden_states(tokens)[0, :4].mean(0))
    assert torch.isfinite(pooled).all()  # also of a text of padding only


def test_initial_weights_are_a_function_of_the_seed() -> None:
    one, same, other = (build_model(CONFIG, SPEC, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert float(one["encoder.word_embeddings.weight"].std()) == pytest.approx(0.02, rel=0.1)


def test_the_cross_network_is_the_formula_of_its_paper() -> None:
    network = CrossNetwork(3, 2)
    x0 = torch.randn(4, 3)
    expected = x0
    for layer in network.layers:
        assert isinstance(layer, torch.nn.Linear)
        expected = x0 * (expected @ layer.weight.T + layer.bias) + expected
    torch.testing.assert_close(network(x0), expected)
    assert torch.equal(CrossNetwork(3, 0)(x0), x0)


@pytest.mark.parametrize("mode", ["both", "match"])
def test_a_query_with_several_products_scores_as_each_pair_alone(mode: str) -> None:
    model, inputs = model_of(mode), inputs_of(6, 9, batch=6)
    grouped = inputs._replace(query=inputs.query[::3])
    pairs = inputs._replace(query=grouped.query.repeat_interleave(3, dim=0))
    together, alone = model(grouped), model(pairs)
    torch.testing.assert_close(together.logits, alone.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together.product, alone.product, rtol=1e-5, atol=1e-6)
    assert together.query.shape == (2, 16)


def test_tokens_are_matched_as_written_out() -> None:
    """The means and the lowest of each token's best cosine, of both texts, by loops."""
    match = TokenMatch(CONFIG)
    generator = torch.Generator().manual_seed(3)
    query, product = (torch.randn(1, length, 16, generator=generator) for length in (3, 5))
    is_query, is_product = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[[1.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 1]]])
    found = match(query, is_query, product, is_product)
    for number, (first, last) in enumerate([(0, 2), (2, 5)]):
        sides = []
        for one, other in ((query[0, :2], product[0, first:last]), (product[0, first:last], query[0, :2])):
            best = torch.stack(
                [max(F.cosine_similarity(match.projection(a), match.projection(b), dim=0) for b in other) for a in one]
            )
            weights = torch.softmax(match.weights(one), dim=0)
            sides += [weights.t() @ best, best.mean()[None], best.min()[None]]
        torch.testing.assert_close(found[number], F.gelu(match.layer(torch.cat(sides))), rtol=1e-4, atol=1e-6)


def test_models_without_it_keep_their_identity() -> None:
    assert "token_match" not in CONFIG.used_fields()
    assert config_of("match").used_fields()["token_match"] is True


def test_features_are_scaled_by_the_rows_they_were_fitted_on() -> None:
    features = model_of().interactions.features
    rows = torch.stack([torch.linspace(-3, 900, 50), torch.full((50,), 7.0)], dim=1)
    features.fit(rows)
    squashed = torch.sign(rows) * torch.log(1.0 + rows.abs())
    scaled = squashed * features.scale + features.shift
    torch.testing.assert_close(scaled[:, 0].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled[:, 0].std(unbiased=False), torch.tensor(1.0), atol=1e-4, rtol=0)
    assert (scaled[:, 1] == 0).all()  # says nothing, and is divided by nothing


def test_weights_from_before_features_were_scaled_give_the_same_scores() -> None:
    model, inputs = model_of(), inputs_of(6, 9)
    old = {
        name: tensor for name, tensor in to_hf(model.state_dict()).items() if not name.endswith((".scale", ".shift"))
    }
    other = build_model(CONFIG, SPEC, seed=9).eval()
    other.interactions.features.fit(torch.randn(20, 2))
    other.load_state_dict(from_hf(old, other.state_dict(), source="old"))
    assert torch.equal(other(inputs).logits, model(inputs).logits)
