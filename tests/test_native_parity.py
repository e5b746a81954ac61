"""Logits equal stock transformers configured the same way. The stock side is built by transformers alone."""

import copy
from itertools import pairwise

import pytest
import torch
from conftest import STOCK, TRAINED, build, ids, logits, rotary_dim
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

from rope_ext import load_patched, patch_model, registry

FAMILIES = ["llama", "mistral_nemo", "qwen2", "qwen3", "qwen3_moe", "phi3", "gpt_neox", "gemma2", "cohere"]


def with_rope(family, length, **rope):
    """A stock model whose config asks for the scaling and the length, with the weights of ``build(family)``."""
    plain = build(family)
    scaled = copy.deepcopy(plain.config)  # made anew from its entries, GPT-NeoX's loses `rotary_pct` before 5.5
    scaled.rope_parameters.update(rope)
    scaled.max_position_embeddings = length
    model = AutoModelForCausalLM.from_config(scaled).eval()
    model.load_state_dict(plain.state_dict())
    return model


def stock(family, **rope):
    return with_rope(family, round(TRAINED * rope["factor"]), **rope)


def stock_dynamic(family, factor=4.0):
    return with_rope(family, TRAINED, rope_type="dynamic", factor=factor)


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


@torch.no_grad()
def decoded(model, x, start):
    name, parts, cache = registry.compat().cache_argument(model), [], None
    for a, b in pairwise([0, start, *range(start + 1, x.shape[1] + 1)]):
        output = model(x[:, a:b], use_cache=True, **({name: cache} if cache is not None else {}))
        cache = getattr(output, name)
        parts.append(output.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("family", ["llama", "mistral_nemo", "qwen2", "qwen3", "qwen3_moe"])
def test_dynamic_as_stock_has_it(family, tmp_path):
    """``exact=False``: the same bits in one call, and in decoding, where cached keys keep the base of their time."""
    model = patch_model(build(family), "dynamic", factor=4, exact=False)
    for x in (ids(16), ids(TRAINED + 9), ids(3 * TRAINED), ids(20)):  # stock anew: older releases do not find back
        assert torch.equal(logits(model, x), logits(stock_dynamic(family), x)), x.shape
    x = ids(TRAINED + 24)
    assert torch.equal(decoded(model, x, TRAINED - 8), decoded(stock_dynamic(family), x, TRAINED - 8))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, ids(3 * TRAINED)), logits(model, ids(3 * TRAINED)))
    again = load_patched(tmp_path).eval()
    assert torch.equal(logits(again, ids(3 * TRAINED)), logits(model, ids(3 * TRAINED)))
    wrong = stock_dynamic(family, 4.04)
    assert (logits(model, ids(3 * TRAINED)) - logits(wrong, ids(3 * TRAINED))).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral_nemo", "qwen2", "qwen3", "bloom", "mpt"])
def test_f03_exact_dynamic_decodes_what_one_forward_gives(family):
    """And in one forward below the trained length nothing changes where positions were rotary before."""
    model, x = build(family), ids(TRAINED + 24)
    before = logits(model, x[:, :TRAINED])
    patch_model(model, "dynamic", factor=4)
    assert (decoded(model, x, TRAINED - 8) - logits(model, x)).abs().max() < LOGITS
    if family not in ("bloom", "mpt"):
        assert (logits(model, x[:, :TRAINED]) - before).abs().max() < LOGITS
        assert (decoded(stock_dynamic(family), x, TRAINED - 8) - logits(stock_dynamic(family), x)).abs().max() > 0.1


def test_dynamic_as_stock_needs_what_stock_needs():
    for given in ({"window": 9}, {"step": 3}):
        with pytest.raises(ValueError, match="`exact`=False"):
            patch_model(build("llama"), "dynamic", exact=False, **given)
    with pytest.raises(ValueError, match="needs a rotary module"):
        patch_model(build("bloom"), "dynamic", exact=False)
