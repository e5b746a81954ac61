"""The embedding seam on whole models, against stock models that are handed the vectors and have no positions left."""

import pytest
import reference_scores as naive
import torch
from conftest import build, ids, logits
from tolerances import LOGITS

from rope_ext import patch_model

hosts = pytest.mark.parametrize("host", ["llama", "qwen3", "mistral"])


def without_positions(host):
    """A stock model whose rotation turns by nothing."""
    model = build(host)
    model.model.rotary_emb.inv_freq.zero_()
    return model


def with_vectors(model, x, vectors, mask=None, first=0):
    embedded = model.get_input_embeddings()(x)
    embedded = embedded + vectors[torch.arange(x.shape[1]) - first].float()
    with torch.no_grad():
        return model(inputs_embeds=embedded, attention_mask=mask).logits


def vectors_of(method, patched, length):
    """By the formulas, float64; what is drawn or learned is read from the patched model."""
    width = patched.config.hidden_size
    if method == "learned":
        return patched.model.position_encoding.table.detach().double()
    if method == "fourier":
        encoding = patched.model.position_encoding.method
        w = torch.randn((width + 1) // 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
        assert encoding.options().get("sigma", 0.1) == 0.1
        one = torch.stack([naive.fourier(m, w) for m in range(length)])
    else:
        one = torch.stack([naive.sinusoidal(m, width) for m in range(length)])
    tokens = patched.get_input_embeddings().weight.detach().double()
    return one * tokens.square().mean().sqrt() * 2**0.5


@hosts
@pytest.mark.parametrize("method", ["sinusoidal", "fourier", "learned"])
def test_the_vectors_are_added_and_nothing_else(host, method):
    model, x = build(host), ids(50)
    patch_model(model, method)
    vectors, stock = vectors_of(method, model, 60), without_positions(host)
    found = logits(model, x)
    assert (found - with_vectors(stock, x, vectors)).abs().max() < LOGITS
    assert (found - with_vectors(stock, x, vectors[1:])).abs().max() > 10 * LOGITS
    assert (found - with_vectors(build(host), x, vectors)).abs().max() > 10 * LOGITS


@hosts
@pytest.mark.parametrize("method", ["sinusoidal", "fourier", "learned"])
def test_padding_on_the_left_takes_no_positions(host, method):
    model, x = build(host), ids(50)
    patch_model(model, method)
    mask = torch.ones_like(x)
    mask[:, :9] = 0
    vectors, stock = vectors_of(method, model, 60), without_positions(host)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, x, attention_mask=mask, position_ids=positions)[:, 9:]
    padded = torch.cat((vectors[:50], vectors[-9:]))  # negative positions stand before padding: they are not seen
    wanted = with_vectors(stock, x, padded, mask, first=9)[:, 9:]
    assert (found - wanted).abs().max() < LOGITS
    assert (found - with_vectors(stock, x, vectors, mask)[:, 9:]).abs().max() > 10 * LOGITS
