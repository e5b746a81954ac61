"""Rotations against two other libraries, each with its own frequencies, channel pairing and code path."""

import pytest
import torch
from conftest import TRAINED, build, rotary_dim

from rope_ext import patch_model
from rope_ext.encodings.bias import Alibi, Bias, T5Bias

rotary_embedding_torch = pytest.importorskip("rotary_embedding_torch")
x_transformers = pytest.importorskip("x_transformers.x_transformers")


def ours(method, **options):
    """cos and sin of a patched Llama at positions 0 .. 199, one column per channel pair."""
    model = patch_model(build("llama"), method, **options)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(200)[None])
    pairs = rotary_dim(model) // 2
    return cos[0, :, :pairs], sin[0, :, :pairs], rotary_dim(model)


def agree(cos, sin, angles):
    return torch.allclose(cos, angles.cos(), atol=1e-4) and torch.allclose(sin, angles.sin(), atol=1e-4)


@pytest.mark.parametrize(
    ("method", "options", "theirs"),
    [
        ("rope", {}, {}),
        ("linear", {"factor": 4}, {"interpolate_factor": 4.0}),
        ("ntk", {"factor": 4}, {"theta_rescale_factor": 4.0}),
    ],
)
def test_rotary_embedding_torch(method, options, theirs):
    cos, sin, dim = ours(method, **options)
    rotary = rotary_embedding_torch.RotaryEmbedding(dim, theta=10000, **theirs)
    positions = rotary.get_seq_pos(200, device="cpu", dtype=torch.float32)
    angles = rotary(positions).detach()[:, ::2]  # it interleaves: channels 2i and 2i + 1 are a pair
    assert agree(cos, sin, angles)
    wrong = rotary_embedding_torch.RotaryEmbedding(dim, theta=11000, **theirs)
    assert not agree(cos, sin, wrong(wrong.get_seq_pos(200, device="cpu", dtype=torch.float32)).detach()[:, ::2])


@pytest.mark.parametrize(
    ("method", "options", "theirs"),
    [
        ("rope", {}, {}),
        ("linear", {"factor": 4}, {"interpolation_factor": 4.0}),
        ("ntk", {"factor": 4}, {"base_rescale_factor": 4.0}),
    ],
)
def test_x_transformers(method, options, theirs):
    cos, sin, dim = ours(method, **options)
    angles, _ = x_transformers.RotaryEmbedding(dim, **theirs).forward_from_seq_len(200)
    angles = angles.reshape(200, -1)
    half = angles[:, ::2] if torch.equal(angles[:, 0], angles[:, 1]) else angles[:, : dim // 2]
    assert agree(cos, sin, half)
    assert not agree(cos, sin, half * 1.01)


def test_scores_depend_on_distance_only():
    """The property that makes it a relative encoding: q at m and k at n score as q at m + c and k at n + c."""
    model = patch_model(build("llama"), "yarn", factor=4)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, rotary_dim(model), generator=generator)

    def rotate(vector, position):
        cos, sin = model.model.rotary_emb(vector[None, None], torch.tensor([[position]]))
        first, second = vector.chunk(2)
        return vector * cos[0, 0] + torch.cat((-second, first)) * sin[0, 0]

    score = rotate(q, 50) @ rotate(k, 20)
    for shift in (1, 77, TRAINED):
        assert torch.isclose(rotate(q, 50 + shift) @ rotate(k, 20 + shift), score, atol=1e-4)
        assert not torch.isclose(rotate(q, 50 + shift) @ rotate(k, 20), score, atol=1e-4)


def bias_of(method, heads, length, causal, **parameters):
    places = torch.arange(length)
    return Bias(method, heads, causal, parameters)(places[None] - places[:, None])


@pytest.mark.parametrize("heads", [4, 6, 8])
def test_x_transformers_alibi(heads):
    theirs = x_transformers.AlibiPositionalBias(heads=heads, total_heads=heads)(50, 50)
    assert torch.allclose(bias_of(Alibi(), heads, 50, False), theirs, atol=1e-6)
    assert not torch.allclose(bias_of(Alibi(factor=2), heads, 50, False), theirs, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_x_transformers_t5_bias(causal):
    theirs = x_transformers.RelativePositionBias(scale=1.0, causal=causal, num_buckets=32, max_distance=128, heads=4)
    table = theirs.relative_attention_bias.weight.detach()
    found, wanted = bias_of(T5Bias(), 4, 200, causal, table=table), theirs(200, 200).detach()
    assert torch.allclose(found, wanted)
    assert not torch.allclose(bias_of(T5Bias(max_distance=130), 4, 200, causal, table=table), wanted)
