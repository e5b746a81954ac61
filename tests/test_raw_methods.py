"""The qk and the scores seam against float64 loops: every way a call can be computed, and planted faults."""

import copy
import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import reference
import reference_scores as naive
import torch
from conftest import LargestTensor
from tolerances import GRADIENT, OUTPUT

from rope_ext import registry
from rope_ext.attention import Layout, attend, blockwise, choosing, computing
from rope_ext.encodings import qk, rotary, scores
from rope_ext.encodings.raw import Encoder, Host, log_length
from rope_ext.encodings.rotary import Rotary

N, D, BASE, L0, HEADS, GROUPS, DIM = 70, 12, 100.0, 32, 4, 2, 16
HOST = Host(Rotary(D, BASE, L0), layers=1, heads=HEADS, head_dim=DIM, width=24)
SCALE = 0.3
THETA = reference.rope(D, BASE, L0)[0]
SHORT, LONG = [1.0 + 0.1 * i for i in range(D // 2)], [1.0 + i for i in range(D // 2)]


def tensors(length=N):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, length, DIM, generator=generator)
    k, v = (torch.randn(1, GROUPS, length, DIM, generator=generator) for _ in range(2))
    return q, k, v


def wide(x):
    """As the references take it: one row, a key for every head, float64."""
    return x[0].repeat_interleave(HEADS // len(x[0]), 0).double()


def learned(method):
    generator = torch.Generator().manual_seed(1)
    return {
        name: (start + 0.5 * torch.randn(start.shape, generator=generator))[0]
        for name, start in method.parameters(HOST).items()
    }


def comay(q, k, scale, frequency, phase, **where):
    return naive.comay(
        q, k, scale, [r * t for r, t in zip(frequency.tolist(), THETA, strict=True)], phase.tolist(), **where
    )


CASES = {
    "dynamic": (qk.Dynamic(factor=4, step=5), lambda q, k, s, **w: naive.dynamic(q, k, s, D, BASE, L0, 4, 5, **w)),
    "dynamic, step by L0": (qk.Dynamic(factor=2), lambda q, k, s, **w: naive.dynamic(q, k, s, D, BASE, L0, 2, 1, **w)),
    "dynamic_yarn": (
        qk.DynamicYarn(step=3, beta_fast=4),
        lambda q, k, s, **w: naive.dynamic_yarn(q, k, s, D, BASE, L0, 3, 4, **w),
    ),
    "dynamic_longrope": (
        qk.DynamicLongRope(factor=4, short_factor=tuple(SHORT), long_factor=tuple(LONG)),
        lambda q, k, s, **w: naive.longrope_exact(q, k, s, D, BASE, L0, SHORT, LONG, 4, **w),
    ),
    "xpos": (qk.XPos(scale_base=16), lambda q, k, s, **w: naive.xpos(q, k, s, D, BASE, 16, **w)),
    "comay": (qk.CoMay(), comay),
    "self_extend": (
        scores.SelfExtend(group_size=3, neighbor_window=10),
        lambda q, k, s, **w: naive.self_extend(q, k, s, THETA, 10, 3, **w),
    ),
    "self_extend, automatic": (
        scores.SelfExtend(factor=2),  # W = 8, G = ceil(56 / 16)
        lambda q, k, s, **w: naive.self_extend(q, k, s, THETA, 8, 4, **w),
    ),
    "rerope": (
        scores.ReRope(neighbor_window=9, log_scale=True),
        lambda q, k, s, **w: naive.rerope(q, k, s, THETA, 9, L0, **w),
    ),
    "leaky_rerope": (
        scores.LeakyReRope(neighbor_window=9, leak=2.5),
        lambda q, k, s, **w: naive.leaky_rerope(q, k, s, THETA, 9, 2.5, **w),
    ),
    "dca": (
        scores.DualChunk(chunk_size=13, local_window=4),
        lambda q, k, s, **w: naive.dca(q, k, s, THETA, 13, 4, **w),
    ),
    "dca, automatic": (scores.DualChunk(), lambda q, k, s, **w: naive.dca(q, k, s, THETA, 24, 2, **w)),
    "shaw": (
        scores.Shaw(max_distance=5, value_vectors=True),
        lambda q, k, s, key_vectors, value_vectors, **w: naive.shaw(q, k, s, key_vectors, **w),
    ),
    "transformer_xl": (
        scores.TransformerXL(),
        lambda q, k, s, u, v, projection, **w: naive.transformer_xl(q, k, s, u, v, projection, 24, **w),
    ),
    "cope": (scores.CoPE(max_positions=7), lambda q, k, s, vectors, **w: naive.cope(q, k, s, vectors)),
}
every = pytest.mark.parametrize("case", CASES)


def test_every_method_has_a_case():
    built_in = {
        m for m in registry.METHODS.values() if m.seam in ("qk", "scores") and m.__module__.startswith("rope_ext")
    }
    assert {type(method) for method, _ in CASES.values()} == built_in


@functools.cache
def expected(case, window=None, sinks=0, tokens=(), positions=None, length=N):
    """(1, heads, length, head_dim): what the references give."""
    method, score = CASES[case]
    q, k, v = tensors(length)
    wide_v, given = wide(v), {name: value.double() for name, value in learned(method).items()}
    seen = naive.visible(length, window=window, sinks=sinks, global_tokens=tokens)
    where = {"positions": positions} if positions else {}
    if sinks:
        where["place"] = lambda m, n: naive.streaming_positions(m, n, window, sinks)
    if window and ("dynamic" in case or case == "rerope"):
        where["reach"] = window + sinks  # the length so far is what a query sees
    if isinstance(method, scores.CoPE):
        found = naive.cope(wide(q), wide(k), SCALE, given["vectors"], seen)
    else:
        found = score(wide(q), wide(k), SCALE, **given, **where)
    weights = naive.softmax(found, seen)
    if "value_vectors" in given:
        return naive.shaw_output(weights, wide_v, given["value_vectors"], **where)[None]
    return (weights @ wide_v)[None]


def encoder(case, **changes):
    method = replace(CASES[case][0], **changes)
    return Encoder(method, HOST, True, learned(method))


def computed(case, layout=None, length=N, **changes):
    q, k, v = tensors(length)
    made = encoder(case, **changes)
    layout = (layout or Layout(1, length, length, causal=True)).patterned(*made.method.pattern)
    return attend(q, k, v, layout, made, SCALE)


def deviation(found, wanted):
    return float((found.double() - wanted).abs().max())


@every
def test_one_call_equals_the_loops(case, monkeypatch):
    wanted = expected(case)
    assert deviation(computed(case), wanted) < OUTPUT
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(choosing, "SMALL", 0)
    assert deviation(computed(case), wanted) < OUTPUT


FAULTS = {
    "dynamic": {"factor": 4.2},
    "dynamic, step by L0": {"step": 3},
    "dynamic_yarn": {"step": 4},
    "dynamic_longrope": {"long_factor": (*LONG[:-2], LONG[-2] + 0.2, LONG[-1])},
    "xpos": {"scale_base": 17},
    "self_extend": {"group_size": 4},
    "self_extend, automatic": {"neighbor_window": 9},
    "rerope": {"neighbor_window": 10},
    "leaky_rerope": {"leak": 2.6},
    "dca": {"local_window": 5},
    "dca, automatic": {"chunk_size": 25},
    "shaw": {"value_vectors": False},
}


@every
def test_the_comparison_fails_on_planted_faults(case):
    wanted, changed = expected(case), FAULTS.get(case, {})
    made = encoder(case, **changed)
    if not changed:  # one learned number off
        name = list(made.parameters)[-1]
        made.parameters[name].flatten()[0] += 1.0
    q, k, v = tensors()
    assert deviation(attend(q, k, v, Layout(1, N, N, causal=True), made, SCALE), wanted) > 10 * OUTPUT


@every
@pytest.mark.parametrize("ways", ["short calls", "long calls"])
def test_queries_in_chunks_and_one_by_one_equal_one_call(case, ways, monkeypatch):
    if ways == "long calls":
        monkeypatch.setattr(choosing, "SMALL", 0)
    wanted = expected(case)
    q, k, v = tensors()
    for cuts in ((0, 33, 40, N), (*range(60, N + 1),)):
        for a, b in pairwise(cuts):
            layout = Layout(1, b - a, b, offset=a, causal=True)
            part = attend(q[:, :, a:b], k[:, :, :b], v[:, :, :b], layout, encoder(case), SCALE)
            assert deviation(part, wanted[:, :, a:b]) < OUTPUT, (a, b)


PATTERNS = [{"window": 11}, {"window": 11, "sinks": 3}, {"window": 9, "global_tokens": (0, 20)}]


@pytest.mark.parametrize(
    ("case", "pattern"),
    # contextual positions count what is seen: with sinks there is no capped distance to compare with
    [(case, pattern) for case in CASES for pattern in PATTERNS if case != "cope" or "sinks" not in pattern],
)
def test_patterns_equal_the_loops(case, pattern, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 20000)
    monkeypatch.setattr(choosing, "SMALL", 0)
    wanted = expected(case, pattern["window"], pattern.get("sinks", 0), pattern.get("global_tokens", ()))
    assert deviation(computed(case, **pattern), wanted) < OUTPUT
    worse = {**pattern, "window": pattern["window"] + 1}
    assert deviation(computed(case, **worse), wanted) > 10 * OUTPUT


@pytest.mark.parametrize("case", [case for case in CASES if case != "cope"])  # which reads no positions
def test_jumping_positions(case):
    positions = (*range(20), *range(31, 31 + N - 20))
    layout = Layout(1, N, N, causal=True).with_positions(torch.tensor([positions]))
    assert deviation(computed(case, layout), expected(case, positions=positions)) < OUTPUT


@every
def test_weights_on_request(case):
    q, k, v = tensors()
    output, weights = computing.attend_with_weights(q, k, v, Layout(1, N, N, causal=True), encoder(case), SCALE)
    assert deviation(output, expected(case)) < OUTPUT
    assert weights.shape == (1, HEADS, N, N)
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)


@every
def test_gradients_equal_those_of_one_block(case, monkeypatch):
    """Blocks recomputed in the backward pass, stage by stage or a few queries at a time, against one block."""

    def gradients(dtype, blocks):
        monkeypatch.setattr(blockwise, "BLOCK_BYTES", 3000 if blocks else 2**30)
        inputs = [part.to(dtype).requires_grad_() for part in tensors()]
        made = encoder(case)
        own = {name: value.clone().to(dtype).requires_grad_() for name, value in made.parameters.items()}
        made = replace(made, parameters=own)
        output = attend(*inputs, Layout(1, N, N, causal=True), made, SCALE)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        return torch.autograd.grad((output * weights).sum(), [*inputs, *own.values()])

    for found, wanted in zip(gradients(torch.float32, True), gradients(torch.float32, False), strict=True):
        assert found.any()
        assert (found - wanted).abs().max() < GRADIENT * max(1, wanted.abs().max())


@every
def test_memory_grows_with_the_length_not_its_square(case, monkeypatch):
    """The largest tensor of a forward and a backward pass over 700 tokens, against one number per head and pair."""
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 2**17)
    monkeypatch.setattr(choosing, "SMALL", 0)
    length = 700
    inputs = [part.requires_grad_() for part in tensors(length)]
    with LargestTensor() as largest:
        output = attend(*inputs, Layout(1, length, length, causal=True), encoder(case), SCALE)
        torch.autograd.grad(output.sum(), inputs)
    assert 4 * HEADS * length * DIM <= largest.bytes < 4 * HEADS * length * length / 4


def test_dynamic_golden_values():  # F05
    host = Rotary(64, 1e4, 4096)
    dynamic = qk.Dynamic(factor=4)
    inside = dynamic.stages(torch.tensor([0, 4095]), Host(host, 1, 1, 64, 64))
    assert inside.tolist() == [4096, 4096]
    assert torch.equal(dynamic.table(host, 4096)[0], rotary.schedule(64, 1e4))
    twice = int(dynamic.stages(torch.tensor([8191]), Host(host, 1, 1, 64, 64)))
    assert twice == 8192
    assert torch.allclose(dynamic.table(host, twice)[0], rotary.schedule(64, 1e4 * 5 ** (64 / 62)), rtol=1e-6)


def test_lengths_grow_in_steps_of_a_64th():
    host = Host(Rotary(64, 1e4, 4096), 1, 1, 64, 64)
    found = qk.Dynamic(factor=2).stages(torch.tensor([4095, 4096, 4159, 4160]), host)
    assert found.tolist() == [4096, 4160, 4160, 4224]


def test_self_extend_and_dca_choose_for_the_target():
    host = Host(Rotary(64, 1e4, 4096), 1, 1, 64, 64)
    for factor in (1.5, 2, 4, 16):
        method = scores.SelfExtend(factor=factor)
        near, group, last = method.near(host), method.group(host), round(4096 * factor) - 1
        assert last // group + near - near // group < 4096
    leaky = scores.LeakyReRope(factor=8)
    near, leak = leaky.near(host), leaky.squeeze(host)
    assert near + (8 * 4096 - near) / leak < 4096
    assert scores.DualChunk().sizes(host) == (3072, 3072 - 256)


def test_a_million_tokens_of_xpos_stay_finite():
    q, k, v = tensors(8)
    layout = Layout(1, 8, 8, causal=True).with_positions(torch.arange(999_990, 999_998)[None])
    far = attend(q, k, v, layout, encoder("xpos"), SCALE)
    near = attend(q, k, v, Layout(1, 8, 8, causal=True), encoder("xpos"), SCALE)
    assert torch.isfinite(far).all()
    assert (far - near).abs().max() < 0.02  # fp32 angles of a million radians
    apart = Layout(1, 8, 8, causal=True).with_positions(
        torch.tensor([[0, 1, 2, 3, 10**6, 10**6 + 1, 10**6 + 2, 10**6 + 3]])
    )
    assert torch.isfinite(attend(q, k, v, apart, encoder("xpos"), SCALE)).all()


def test_log_length():
    assert torch.allclose(log_length(torch.tensor([0, 31, 1023]), 32), torch.tensor([1.0, 1.0, 2.0]))


def test_a_call_leaves_no_trace_in_its_layout_that_another_method_would_read():
    q, k, v = tensors()
    layout = Layout(1, N, N, causal=True)
    first = attend(q, k, v, layout, encoder("comay"), SCALE)
    other = Encoder(qk.XPos(scale_base=512), HOST, True)
    alone = attend(q, k, v, copy.copy(Layout(1, N, N, causal=True)), other, SCALE)
    assert torch.equal(attend(q, k, v, layout, other, SCALE), alone)
    assert torch.equal(attend(q, k, v, layout, encoder("comay"), SCALE), first)
