"""Logits equal stock transformers configured the same way. The stock side is built by transformers alone."""

import pytest
import torch
from conftest import STOCK, TRAINED, build, ids, logits, rotary_dim
from transformers import AutoModelForCausalLM

from rope_ext import patch_model

FAMILIES = ["llama", "mistral_nemo", "qwen2", "qwen3", "qwen3_moe", "phi3", "gpt_neox", "gemma2", "cohere"]


def stock(family, **rope):
    """A stock model whose config asks for the scaling, with the weights of ``build(family)``."""
    plain = build(family)
    parameters = {**plain.config.rope_parameters, **rope}
    scaled = type(plain.config)(**{**plain.config.to_dict(), "rope_parameters": parameters})
    scaled.max_position_embeddings = round(TRAINED * rope["factor"])
    model = AutoModelForCausalLM.from_config(scaled).eval()
    model.load_state_dict(plain.state_dict())
    return model


def divisors(model, scale=3.0):
    pairs = rotary_dim(model) // 2
    return [1 + scale * i / pairs for i in range(pairs)]


@pytest.mark.parametrize("method", STOCK)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phi3"])
def test_logits_equal_stock_bit_for_bit(family, method):
    reference, model = stock(family, **STOCK[method]), patch_model(build(family), method, factor=4)
    for x in (ids(16), ids(3 * TRAINED)):
        assert torch.equal(logits(model, x), logits(reference, x))


@pytest.mark.parametrize("family", FAMILIES)
def test_longrope_equals_stock_on_its_side_of_the_switch(family):
    """Beyond L0 the long list, as stock; with factor 1 the short list, as stock within L0."""
    long, short = divisors(build(family)), divisors(build(family), 0.5)
    lists = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    reference = stock(family, factor=4.0, original_max_position_embeddings=TRAINED, **lists)
    model = patch_model(build(family), "longrope", factor=4, long_factor=long, short_factor=short)
    x = ids(3 * TRAINED)
    assert torch.equal(logits(model, x), logits(reference, x))
    assert not torch.equal(logits(model, x[:, :16]), logits(reference, x[:, :16]))  # stock switches lists, we do not
    reference = stock(family, factor=1.0, original_max_position_embeddings=TRAINED, **lists)
    model = patch_model(build(family), "longrope", factor=1, long_factor=long, short_factor=short)
    assert torch.equal(logits(model, x[:, :16]), logits(reference, x[:, :16]))


@pytest.mark.parametrize("method", STOCK)
def test_parity_fails_on_a_planted_fault(method):
    """Twin: stock with a factor that is off by one percent."""
    wrong = stock("llama", **{**STOCK[method], "factor": 4.04})
    model, x = patch_model(build("llama"), method, factor=4), ids(3 * TRAINED)
    assert (logits(model, x) - logits(wrong, x)).abs().max() > 1e-4


def test_yarn_options_reach_stock():
    given = {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.1, "truncate": False}
    reference = stock("llama", **STOCK["yarn"], **given)
    model, x = patch_model(build("llama"), "yarn", factor=4, **given), ids(3 * TRAINED)
    assert torch.equal(logits(model, x), logits(reference, x))
