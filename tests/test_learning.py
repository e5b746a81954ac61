"""Every method can be trained: thirty steps lower the loss, and recomputing activations changes no gradient."""

import pytest
import torch
from conftest import TRAINED, build, ids, options
from tolerances import GRADIENT

from rope_ext import patch_model, registry

PAIRS = [("llama", method) for method in registry.METHODS]
PAIRS += [("bloom", "dynamic"), ("bloom", "dca"), ("t5", "shaw"), ("umt5", "transformer_xl"), ("mpt", "cope")]


def small(host, method):
    """One layer, patched, in training."""
    one = {"num_layers": 1, "num_decoder_layers": 1, "dropout_rate": 0.0} if "t5" in host else {"num_hidden_layers": 1}
    model = build(host, **one)
    return patch_model(model, method, **options(method, model)).train()


def loss(model, x):
    prompt = {"input_ids": ids(20, seed=9).expand(len(x), -1)} if model.config.is_encoder_decoder else {"input_ids": x}
    return model(**prompt, labels=x, use_cache=False).loss


@pytest.mark.parametrize(("host", "method"), PAIRS)
def test_thirty_steps_lower_the_loss(host, method):
    model = small(host, method)
    x = ids(TRAINED + 16)
    learned = {name: weight.clone() for name, weight in model.named_parameters() if "position_encoding." in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(loss(model, x))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert bool(learned) == registry.METHODS[method].from_options(options(method, model)).learns
    for name, weight in model.named_parameters():
        if name in learned:
            assert not torch.equal(weight, learned[name]), name


@pytest.mark.parametrize("method", [name for name, kind in registry.METHODS.items() if kind.seam != "rotary"])
def test_recomputed_activations_give_the_same_gradients(method):
    model, x, found = small("llama", method), ids(TRAINED + 16), []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        loss(model, x).backward()
        found.append(
            {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        )
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).abs().max() < GRADIENT * max(1, gradient.abs().max()), name
