"""Zones by fused kernels: the tiles they are cut into, and attention from them, against loops; with planted faults."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import LargestTensor
from test_raw_methods import CASES, FAULTS, HEADS, HOST, SCALE, N, computed, deviation, encoder, expected, tensors
from tolerances import GRADIENT, OUTPUT, TWICE

from rope_ext.attention import Layout, attend, blockwise, zoned
from rope_ext.attention.tiles import tiles
from rope_ext.encodings.raw import Encoder
from rope_ext.encodings.scores import DualChunk, LeakyReRope, ReRope, SelfExtend, ZonedMethod

ZONED = [case for case, (method, _) in CASES.items() if isinstance(method, ZonedMethod)]
every = pytest.mark.parametrize("case", ZONED)


def covered(found, queries, keys):
    """How often each pair is in a tile."""
    times = torch.zeros(queries, keys, dtype=torch.long)
    for rows, columns, shape in found:
        part = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.long)
        assert part.numel()
        assert shape == "full" or len(part) == part.shape[1]
        times[rows, columns] += {"full": part, "lower": part.tril(), "upper": part.triu()}[shape]
    return times


def wanted(low, high, keys):
    places = torch.arange(keys)
    return ((low[:, None] <= places) & (places < high[:, None])).long()


def ranges(seed, queries=40, keys=60):
    """Edges that stand still, move on by one, or jump; some queries see nothing."""
    generator = torch.Generator().manual_seed(seed)

    def number(top):
        return int(torch.randint(top, (), generator=generator))

    edges = []
    for _ in range(2):
        edge = [number(20)]
        while len(edge) < queries:
            kind, length = number(3), 1 + number(12)
            edge += [number(keys)] if kind == 2 else [edge[-1] + kind * (i + 1) for i in range(length)]
        edges.append(torch.tensor(edge[:queries]).clamp(max=keys))
    return edges[0], edges[0] + (edges[1] - edges[0]).clamp(min=0)


@pytest.mark.parametrize("seed", range(60))
def test_tiles_cover_each_pair_once(seed):
    low, high = ranges(seed)
    assert torch.equal(covered(tiles(low, high), 40, 60), wanted(low, high, 60))


def test_the_count_of_pairs_fails_on_planted_faults():
    low, high = torch.zeros(9, dtype=torch.long), torch.arange(1, 10)
    (causal,) = tiles(low, high)
    assert causal.shape == "lower"
    for worse in ([], [causal, causal], [causal._replace(shape="upper")], [causal._replace(shape="full")]):
        assert not torch.equal(covered(worse, 9, 9), wanted(low, high, 9))


@pytest.mark.parametrize(("width", "count"), [(100, 1), (16, 14), (2, 200), (1, 100)])
def test_a_band_needs_two_tiles_for_each_width(width, count):
    last = torch.arange(1, 101)
    found = tiles((last - width).clamp(min=0), last)
    assert torch.equal(covered(found, 100, 100), wanted((last - width).clamp(min=0), last, 100))
    assert len(found) <= count


@pytest.fixture
def fused(monkeypatch):
    """Fused kernels whatever the size of tiles, and nothing else."""
    monkeypatch.setattr(zoned, "SMALLEST", 0)

    def not_this_way(*args):
        raise AssertionError("computed block by block")

    monkeypatch.setattr(blockwise, "attend", not_this_way)


@every
def test_one_call_equals_the_loops(case, fused):
    assert deviation(computed(case), expected(case)) < OUTPUT


@every
def test_the_comparison_fails_on_planted_faults(case, fused):
    assert deviation(computed(case, **FAULTS[case]), expected(case)) > 10 * OUTPUT


@every
def test_chunks_single_queries_and_windows_equal_the_loops(case, fused):
    q, k, v = tensors()
    for window in (None, 11):
        truth, made = expected(case, window), encoder(case, window=window)
        for cuts in ((0, N), (0, 33, 40, N), (*range(55, N + 1),)):
            for a, b in pairwise(cuts):
                layout = Layout(1, b - a, b, offset=a, causal=True).patterned(*made.method.pattern)
                part = attend(q[:, :, a:b], k[:, :, :b], v[:, :, :b], layout, made, SCALE)
                assert deviation(part, truth[:, :, a:b]) < OUTPUT, (window, a, b)


ODD = [
    SelfExtend(neighbor_window=1, group_size=1),
    SelfExtend(neighbor_window=2, group_size=50),
    SelfExtend(neighbor_window=1000),
    SelfExtend(factor=1),
    ReRope(neighbor_window=1),
    ReRope(neighbor_window=69, log_scale=True),
    LeakyReRope(neighbor_window=1, leak=1e6),
    LeakyReRope(neighbor_window=70),
    DualChunk(chunk_size=2, local_window=1),
    DualChunk(chunk_size=1000, local_window=999),
    DualChunk(chunk_size=71, local_window=1),
]


@pytest.mark.parametrize("method", ODD, ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 30])
def test_odd_options_equal_block_by_block(method, window, monkeypatch):
    monkeypatch.setattr(zoned, "SMALLEST", 0)
    q, k, v = tensors()
    made = Encoder(replace(method, window=window), HOST, True)
    for a, b in ((0, N), (33, 50), (69, 70)):
        layout = Layout(1, b - a, b, offset=a, causal=True).patterned(*made.method.pattern)
        given = q[:, :, a:b], k[:, :, :b], v[:, :, :b]
        assert zoned.plan(given[0], given[2], layout, made, 0.0) is not None
        keys = made.method.keys(made, given[1], layout.key_positions(q.device))
        by_block = blockwise.attend(given[0], keys, given[2], layout, made, SCALE, 0.0)
        assert deviation(attend(*given, layout, made, SCALE), by_block.double()) < OUTPUT


@every
def test_keys_that_a_sliding_cache_has_let_go_count(case, fused):
    """The same positions with the first 25 keys gone, alone and for one row of two."""
    q, k, v = tensors()
    truth, made = expected(case, 11), encoder(case, window=11)
    for rows, first in ((1, 25), (2, torch.tensor([[25], [25]])), (2, torch.tensor([[25], [0]]))):
        layout = Layout(rows, 20, N - 25, offset=N - 45, causal=True, first=first).patterned(*made.method.pattern)
        given = (part.expand(rows, -1, -1, -1) for part in (q[:, :, -20:], k[:, :, 25:], v[:, :, 25:]))
        assert deviation(attend(*given, layout, made, SCALE)[:1], truth[:, :, -20:]) < OUTPUT


@every
def test_padded_rows_equal_their_own_calls(case, fused):
    q, k, v = (part.expand(2, -1, -1, -1).clone() for part in tensors())
    documents = torch.zeros(2, N, dtype=torch.long)
    documents[1, :20] = -1
    found = attend(q, k, v, Layout(2, N, N, causal=True, documents=documents), encoder(case), SCALE)
    alone = attend(
        *(part[1:, :, 20:] for part in (q, k, v)), Layout(1, N - 20, N - 20, causal=True), encoder(case), SCALE
    )
    assert deviation(found[:1], expected(case)) < OUTPUT
    assert deviation(found[1:, :, 20:], alone.double()) < OUTPUT


def gradients(case, dtype=torch.float32, **changes):
    inputs = [part.to(dtype).requires_grad_() for part in tensors()]
    output = attend(*inputs, Layout(1, N, N, causal=True), encoder(case, **changes), SCALE)
    weights = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


@every
def test_gradients_equal_those_block_by_block(case, monkeypatch):
    monkeypatch.setattr(zoned, "plan", lambda *args: None)
    truth = gradients(case)
    monkeypatch.undo()
    monkeypatch.setattr(zoned, "SMALLEST", 0)
    for found, exact in zip(gradients(case), truth, strict=True):
        assert (found - exact).abs().max() < GRADIENT * max(1, exact.abs().max())
    off = gradients(case, **FAULTS[case])[0]
    assert (off - truth[0]).abs().max() > 10 * GRADIENT
    for found, exact in zip(gradients(case, torch.float64), truth, strict=True):
        assert found.dtype == torch.float64
        assert (found - exact).abs().max() < GRADIENT * max(1, exact.abs().max())


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_block_by_block(case, dtype, monkeypatch):
    q, k, v = (part.to(dtype) for part in tensors())
    layout, truth = Layout(1, N, N, causal=True), expected(case)
    by_block = blockwise.attend(
        q, encoder(case).method.keys(encoder(case), k, torch.arange(N)[None]), v, layout, encoder(case), SCALE, 0.0
    )
    monkeypatch.setattr(zoned, "SMALLEST", 0)
    found = attend(q, k, v, layout, encoder(case), SCALE)
    assert found.dtype == dtype
    assert deviation(found, truth) < TWICE * deviation(by_block, truth)


@every
def test_memory_grows_with_the_length_alone(case, fused):
    """No tensor of a forward and a backward pass is larger than the inputs in fp32, or turned for every head."""
    length = 1500
    inputs = [part.requires_grad_() for part in tensors(length)]
    with LargestTensor() as largest:
        output = attend(*inputs, Layout(1, length, length, causal=True), encoder(case), SCALE)
        torch.autograd.grad(output.sum(), inputs)
    assert largest.bytes <= 8 * inputs[0].numel()
    assert inputs[0].shape[1] == HEADS


@every
def test_small_tiles_and_what_kernels_lack_are_computed_block_by_block(case):
    q, _, v = tensors()
    layout, made = Layout(1, N, N, causal=True), encoder(case)
    assert zoned.plan(q, v, layout, made, 0.1) is None
    assert zoned.plan(q, v[..., :-1], layout, made, 0.0) is None
    assert zoned.plan(q.to("meta"), v.to("meta"), layout, made, 0.0) is None
    assert zoned.plan(q, v, Layout(1, N, N, causal=True), encoder("shaw"), 0.0) is None
    many = zoned.plan(q, v, layout, made, 0.0)
    assert many is None or len(many.parts) <= 8 + N // zoned.SMALLEST
