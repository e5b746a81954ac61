"""Each way to compute attention with a bias against float64 loops over pairs; memory; gradients; the chooser."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from tolerances import GRADIENT, OUTPUT, TWICE

from rope_ext.attention import Layout, blockwise, choose, choosing, computing, cuda, toeplitz
from rope_ext.encodings.bias import Alibi, Bias, Fire, Kerple, Sandwich, T5Bias

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 48, 8
SCALE = 0.3

METHODS = {
    "nothing": None,
    "alibi": Alibi(),
    "alibi x2": Alibi(factor=2),
    "t5_bias": T5Bias(),
    "kerple": Kerple(),
    "fire": Fire(threshold=16),
    "sandwich": Sandwich(dim=16),
}


def documents(kind):
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    if kind == "left":
        ids[1, :11] = -1
    if kind == "right":
        ids[0, -9:] = -1
    if kind == "packed":
        ids[:, 20:] = 1
        ids[1, 33:] = 2
    if kind == "hole":
        ids[0, 10:15] = -1
    return None if kind == "plain" else ids


def layout(kind, queries=LENGTH, causal=True):
    """The last ``queries`` tokens of LENGTH."""
    offset = LENGTH - queries if causal else 0
    if kind == "window":
        return Layout(BATCH, queries, LENGTH, offset=offset, causal=causal, window=10)
    if kind == "static":  # keys that are not written yet
        return Layout(BATCH, queries, LENGTH, offset=max(offset - 7, 0), causal=causal)
    if kind == "counted":
        return layout("hole", queries, causal).counted()
    if kind == "jumps":
        positions = torch.cat((torch.arange(20), 100 + torch.arange(LENGTH - 20)))[None]
        return layout("plain", queries, causal).with_positions(positions)
    if kind == "mask":
        seen = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
        seen = seen[:, :, LENGTH - queries :] | torch.eye(LENGTH, dtype=torch.bool)[LENGTH - queries :]
        return Layout(BATCH, queries, LENGTH, offset=LENGTH - queries, causal=False, mask=seen)
    return Layout(BATCH, queries, LENGTH, offset=offset, causal=causal, documents=documents(kind))


def bound(method, causal=True):
    if method is None:
        return None
    torch.manual_seed(2)
    return Bias(method, HEADS, causal, {k: v + torch.randn_like(v) / 2 for k, v in method.parameters(HEADS).items()})


def inputs(queries=LENGTH, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = ((HEADS, queries), (KV_HEADS, LENGTH), (KV_HEADS, LENGTH))
    return [torch.randn(BATCH, *shape, DIM, dtype=dtype) for shape in shapes]


def loops(query, key, value, where, bias):
    """float64, one query and row at a time; zeros for queries that see nothing."""
    rows, heads, queries, _ = query.shape
    key, value = (part.double().repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    ids = where.documents if where.documents is not None else torch.zeros(rows, key.shape[2], dtype=torch.long)
    places = where.key_positions(query.device).expand(rows, -1)
    output = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(rows):
        for i in range(queries):
            own = i + where.offset
            seen = [
                j
                for j in range(key.shape[2])
                if ids[b, j] >= 0
                and (not where.causal or (j <= own and ids[b, j] == ids[b, own]))
                and (where.window is None or j > own - where.window)
                and (where.mask is None or where.mask[b, 0, i, j])
            ]
            if not seen:
                continue
            scores = torch.einsum("hd,hjd->hj", query[b, :, i].double(), key[b][:, seen]) * SCALE
            if bias is not None:
                by_place = where.positions is not None or not bias.method.toeplitz
                distances = torch.tensor([int(places[b, j] - places[b, own]) if by_place else j - own for j in seen])
                m = places[b, own].expand(len(seen)) if own < key.shape[2] else None
                scores = scores + bias(distances, m).double()
            output[b, :, i] = torch.einsum("hj,hjd->hd", torch.softmax(scores, -1), value[b][:, seen])
    return output


def error(found, wanted, where):
    """Largest difference, over queries that are no padding."""
    difference = (found.double() - wanted).abs().amax((1, 3))
    if where.documents is not None and where.causal:
        difference = difference * (where.documents[:, where.offset : where.offset + where.q_length] >= 0)
    return float(difference.max())


def wide(key, value):
    return key.repeat_interleave(HEADS // KV_HEADS, 1), value.repeat_interleave(HEADS // KV_HEADS, 1)


def in_blocks(q, k, v, where, bias):
    return blockwise.attend(q, (k,), v, where, bias, SCALE, 0.0)


WAYS = {
    "chosen": lambda q, k, v, where, bias: computing.attend(q, k, v, where, bias, SCALE),
    "toeplitz": lambda q, k, v, where, bias: toeplitz.attend(q, *wide(k, v), where, bias, SCALE),
    "blockwise": lambda q, k, v, where, bias: in_blocks(q, *wide(k, v), where, bias),
    "folded": lambda q, k, v, where, bias: cuda.folded(q, *wide(k, v), where, bias, SCALE),
    "flex": lambda q, k, v, where, bias: cuda.flex(q, *wide(k, v), where, bias, SCALE),
    "weights": lambda q, k, v, where, bias: computing.weights(q, k, where, bias, SCALE) @ wide(k, v)[1],
}


def takes(way, method, where):
    if way in ("toeplitz", "flex", "folded") and (where.kind == "pairs" or (method and not method.toeplitz)):
        return False
    if way == "folded":
        return isinstance(method, Alibi) and where.causal and where.window is None
    if way == "flex":  # uncompiled it is slow: whole sequences are enough
        return where.q_length == LENGTH
    return True


@pytest.fixture(params=["short calls", "long calls"])
def long_calls(request, monkeypatch):
    """Short calls build the bias of all pairs; with a limit of 0 the tests' short calls take the ways of long ones."""
    if request.param == "long calls":
        monkeypatch.setattr(choosing, "SMALL", 0)
        monkeypatch.setattr(blockwise, "BLOCK_BYTES", 4 * BATCH * HEADS * LENGTH * 5)
        monkeypatch.setattr(toeplitz, "BLOCK", 20)


CASES = [
    (kind, causal)
    for kind in ("plain", "left", "right", "packed", "hole", "counted", "window", "static", "jumps", "mask")
    for causal in (True, False)
    if causal or kind not in ("packed", "window", "static", "mask")
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("kind", "causal"), CASES, ids=lambda part: {True: "decoder", False: "encoder"}.get(part, part)
)
@pytest.mark.parametrize("name", METHODS)
def test_every_way_equals_the_loops(name, kind, causal, long_calls):
    method, checked = METHODS[name], 0
    for queries in (LENGTH, 13, 1):
        where, bias = layout(kind, queries, causal), bound(method, causal)
        if not causal and queries != LENGTH and bias is not None:
            continue
        q, k, v = inputs(queries)
        wanted = loops(q, k, v, where, bias)
        for way, function in WAYS.items():
            if takes(way, method, where):
                assert error(function(q, k, v, where, bias), wanted, where) < OUTPUT, (way, queries)
                checked += 1
    assert checked >= 3


@pytest.mark.parametrize("way", WAYS)
def test_the_check_fails_on_planted_faults(way, long_calls):
    where, bias = layout("plain"), bound(Alibi())
    q, k, v = inputs()
    wanted = loops(q, k, v, where, bias)
    steeper = dataclasses.replace(bias, method=Alibi(factor=1.1))
    assert error(WAYS[way](q, k, v, where, steeper), wanted, where) > 10 * OUTPUT
    ahead = Layout(BATCH, LENGTH, LENGTH, offset=1, causal=True)  # sees one token of the future
    if way not in ("flex", "folded"):
        assert error(WAYS[way](q, k, v, ahead, bias), wanted, where) > 10 * OUTPUT
    no_padding = layout("left")
    assert error(WAYS[way](q, k, v, where, bias), loops(q, k, v, no_padding, bias), no_padding) > 10 * OUTPUT


@pytest.mark.parametrize("way", ["chosen", "toeplitz", "blockwise", "folded"])
@pytest.mark.parametrize("kind", ["plain", "left", "packed"])
def test_gradients_equal_those_of_all_pairs(way, kind, long_calls):
    where, bias = layout(kind), bound(Alibi())
    real = torch.ones(BATCH, LENGTH) if where.documents is None else (where.documents >= 0).float()
    weight = torch.randn(BATCH, HEADS, LENGTH, DIM) * real[:, None, :, None]

    def gradients(function):
        parts = [part.requires_grad_() for part in inputs()]
        (function(*parts, where, bias) * weight).sum().backward()
        return [part.grad for part in parts]

    wanted = gradients(WAYS["weights"])
    for found, right in zip(gradients(WAYS[way]), wanted, strict=True):
        assert (found - right).abs().max() < GRADIENT
    wrong = gradients(lambda q, k, v, at, b: WAYS[way](q, k, v, at, dataclasses.replace(b, method=Alibi(factor=1.1))))
    assert max((a - b).abs().max() for a, b in zip(wrong, wanted, strict=True)) > 10 * GRADIENT


@pytest.mark.parametrize("name", ["t5_bias", "kerple", "fire"])
@pytest.mark.parametrize("kind", ["plain", "left", "jumps"])
def test_what_a_bias_learns_gets_exact_gradients(name, kind, long_calls):
    where = layout(kind)
    real = torch.ones(BATCH, LENGTH) if where.documents is None else (where.documents >= 0).float()
    weight = torch.randn(BATCH, HEADS, LENGTH, DIM) * real[:, None, :, None]

    def gradients(function):
        bias = bound(METHODS[name])
        values = tuple(value.clone().requires_grad_() for value in bias.parameters.values())
        parts = [part.requires_grad_() for part in inputs()]
        (function(*parts, where, bias.with_parameters(values)) * weight).sum().backward()
        return [*[part.grad for part in parts], *[value.grad for value in values]]

    found, wanted = gradients(WAYS["chosen"]), gradients(WAYS["weights"])
    for ours, right in zip(found, wanted, strict=True):
        assert right.any()
        assert (ours - right).abs().max() < GRADIENT * max(1, right.abs().max())


def test_dropout_drops_the_same_in_both_directions(long_calls):
    """The output is linear in v, so <output, g> = <v, gradient of v> if and only if both used the same weights."""
    where, bias = layout("left"), bound(Kerple())
    bias = bias.with_parameters(tuple(value.requires_grad_() for value in bias.parameters.values()))
    q, k, v = inputs()
    v.requires_grad_()
    torch.manual_seed(5)
    output = computing.attend(q, k, v, where, bias, SCALE, dropout=0.5)
    state = torch.get_rng_state()
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(6))
    torch.manual_seed(99)
    (output * g).sum().backward()
    assert torch.allclose((output * g).sum(), (v * v.grad).sum(), rtol=1e-4)
    assert (output - computing.attend(q, k, v, where, bias, SCALE)).abs().max() > 0.1
    torch.manual_seed(5)
    assert torch.equal(output, computing.attend(q, k, v, where, bias, SCALE, dropout=0.5))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_backward_pass_leaves_the_random_state_alone(long_calls):
    where, bias = layout("plain"), bound(Kerple())
    q, k, v = (part.requires_grad_() for part in inputs())
    output = computing.attend(q, k, v, where, bias, SCALE, dropout=0.5).sum()
    state = torch.get_rng_state()
    output.backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0, 30.0])
def test_keys_that_are_left_out_do_not_matter(size):
    """Whatever the size of the scores: outputs with and without pruning differ by rounding only."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 3000, 16) for _ in range(3))
    q = q * size
    where, bias = Layout(1, 3000, 3000, causal=True), Bias(Alibi(), 8, True)
    full = toeplitz.attend(q, k, v, where, bias, 0.25, prune=False)
    assert (toeplitz.attend(q, k, v, where, bias, 0.25) - full).abs().max() < OUTPUT


def test_pruning_leaves_out_most_of_steep_heads_and_is_needed_to_be_that_careful(monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 3000, 16) for _ in range(3))
    where, bias = Layout(1, 3000, 3000, causal=True), Bias(Alibi(), 8, True)
    numbers = bias(torch.arange(-2999, 3000))
    _, reach = toeplitz._without_what_cannot_matter(numbers, -2999, q, k, 0, 0.25)
    assert reach[0] < 150
    assert reach == sorted(reach)
    assert reach[-1] == 3000
    right = toeplitz.attend(q, k, v, where, bias, 0.25, prune=False)
    monkeypatch.setattr(toeplitz.math, "log", lambda x: -20.0)  # planted fault: a margin that is too small
    assert (toeplitz.attend(q, k, v, where, bias, 0.25) - right).abs().max() > 10 * OUTPUT


def test_pruning_in_low_precision_sees_large_scores_exactly():
    """q = k with scores above 20,000: the score of a query with its own key must not be rounded to bf16."""
    torch.manual_seed(0)
    q = (torch.randn(1, 4, 600, 16) * 75).to(torch.bfloat16)
    v = torch.randn(1, 4, 600, 16).to(torch.bfloat16)
    where, bias = Layout(1, 600, 600, causal=True), Bias(Alibi(), 4, True)
    full = toeplitz.attend(q, q, v, where, bias, 0.25, prune=False)
    assert (toeplitz.attend(q, q, v, where, bias, 0.25).float() - full.float()).abs().max() < 0.01


def test_no_pruning_where_scores_are_not_finite():
    q, k = (torch.randn(1, 2, 64, 8) for _ in range(2))
    q[0, 0, 3] = float("inf")
    numbers = Bias(Alibi(), 2, True)(torch.arange(-63, 64))
    _, reach = toeplitz._without_what_cannot_matter(numbers, -63, q, k, 0, 0.25)
    assert reach[0] == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in ("chosen", "toeplitz", "blockwise") for name in ("alibi", "t5_bias", "kerple", "sandwich")]
    + [("folded", "alibi")],
)
def test_low_precision_at_32k_is_within_twice_the_plain_error(way, name, dtype):
    """16 queries at the end of 32,768 keys; the plain computation rounds scores, bias and weights to the dtype."""
    length, queries = 32768, 16
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, HEADS, n, DIM) for n in (queries, length, length))
    low = [part.to(dtype) for part in (q, k, v)]
    q, k, v = (part.double() for part in low)
    bias = bound(METHODS[name])
    where = Layout(1, queries, length, offset=length - queries, causal=True)
    places = torch.arange(length)
    distances = places[None] - places[-queries:, None]
    numbers = bias(distances)[None].masked_fill(distances > 0, float("-inf"))
    exact = torch.softmax(q @ k.transpose(-1, -2) * SCALE + numbers.double(), -1) @ v
    scores = (low[0] @ low[1].transpose(-1, -2) * SCALE + numbers.to(dtype)).float()
    plain = torch.softmax(scores, -1).to(dtype) @ low[2]
    call = {
        "chosen": lambda: computing.attend(*low, where, bias, SCALE),
        "toeplitz": lambda: toeplitz.attend(*low, where, bias, SCALE),
        "blockwise": lambda: in_blocks(*low, where, bias),
        "folded": lambda: cuda.folded(*low, where, bias, SCALE),
    }[way]
    found = call()
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= TWICE * (plain.double() - exact).abs().max()


def test_the_fold_needs_positions_in_parts():
    """Twin of the test above: with slope * position in one channel of bf16, the fold is far off at 32K."""
    length, queries, at = 32768, 4, 9000
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 6, n, DIM).to(torch.bfloat16) for n in (queries, length, length))
    where = Layout(1, queries, length, offset=at, causal=True)
    bias = Bias(Alibi(), 6, True)
    right = toeplitz.attend(q, k, v, where, bias, SCALE).float()
    assert (cuda.folded(q, k, v, where, bias, SCALE).float() - right).abs().max() < 0.02
    ramp = torch.einsum("h,n->hn", bias.method.slopes(6), torch.arange(1 - length, 1.0)).to(torch.bfloat16)
    naive_k = torch.cat((k, ramp[None, :, :, None]), -1)
    naive_q = torch.cat((q, torch.full_like(q[..., :1], 1 / SCALE)), -1)
    scores = (naive_q[:, :, :1] @ naive_k[:, :, : at + 1].transpose(-1, -2) * SCALE).float()
    naive = torch.softmax(scores, -1).to(torch.bfloat16) @ v[:, :, : at + 1]
    assert (naive.float() - right[:, :, :1]).abs().max() > 0.2


def resident(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def peak(function):
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    function()
    return resident("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["alibi", "t5_bias", "trained kerple", "dropout"])
def test_no_matrix_of_all_pairs(name):
    """8 heads, 8192 tokens, forward and backward: the bias of all pairs alone would be 2 GiB."""
    length, heads = 8192, 8
    q, k, v = (torch.randn(1, heads, length, 16, requires_grad=True) for _ in range(3))
    method = {"alibi": Alibi(), "t5_bias": T5Bias(), "trained kerple": Kerple(), "dropout": Alibi()}[name]
    values = method.parameters(heads)
    if name == "trained kerple":
        values = {key: value.requires_grad_() for key, value in values.items()}
    where, bias = Layout(1, length, length, causal=True), Bias(method, heads, True, values)

    def step():
        computing.attend(q, k, v, where, bias, SCALE, dropout=0.1 if name == "dropout" else 0.0).sum().backward()

    assert peak(step) < 450
    if name == "trained kerple":
        assert all(value.grad is not None for value in values.values())


CHOICES = [
    ({"device": "cpu"}, Alibi(), "toeplitz"),
    ({"device": "cpu", "mask": "runs"}, T5Bias(), "toeplitz"),
    ({"device": "cpu", "mask": "pairs"}, Alibi(), "blockwise"),
    ({"device": "cpu"}, Fire(), "blockwise"),
    ({"device": "cpu", "gradient": True}, T5Bias(), "blockwise"),
    ({"device": "cpu", "dropout": True}, Alibi(), "blockwise"),
    ({"device": "cpu", "bytes_of_all_pairs": 1000}, Alibi(), "dense"),
    ({"device": "cpu"}, None, "toeplitz"),
    ({"device": "cuda"}, Alibi(), "folded"),
    ({"device": "cuda", "causal": False}, Alibi(), "flex"),
    ({"device": "cuda"}, T5Bias(), "flex"),
    ({"device": "cuda", "gradient": True}, Kerple(), "blockwise"),
    ({"device": "cuda", "flash": True, "dtype": torch.bfloat16}, Alibi(), "flash"),
    ({"device": "cuda", "flash": True, "dtype": torch.bfloat16, "dropout": True}, Alibi(), "flash"),
    ({"device": "cuda", "flash": True}, Alibi(), "folded"),
    ({"device": "cuda", "flash": True, "dtype": torch.bfloat16}, T5Bias(), "flex"),
    ({"device": "cuda", "dropout": True}, T5Bias(), "blockwise"),
    ({"device": "mps"}, Alibi(), "blockwise"),
]


@pytest.mark.parametrize(("asked", "method", "way"), CHOICES)
def test_the_chooser(asked, method, way):
    choice = choose(method, **{"dtype": torch.float32, **asked})
    assert choice.way == way
    assert choice.reason


def test_flash_attention_is_called_as_it_wants(monkeypatch):
    """No flash-attn here: what it is given is checked, and answered by the reference."""
    called = {}

    def flash_attn_func(q, k, v, **options):
        called.update(options, shapes=(q.shape, k.shape))
        where = Layout(q.shape[0], q.shape[1], k.shape[1], offset=k.shape[1] - q.shape[1], causal=True)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return (computing.weights(q, k, where, bound(Alibi()), SCALE) @ v).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", type("flash_attn", (), {"flash_attn_func": flash_attn_func}))
    q, k, v = inputs(13)
    where = layout("left", 13)
    found = cuda.flash(q, *wide(k, v), where, bound(Alibi()), SCALE, 0.1)
    assert error(found, loops(q, k, v, where, bound(Alibi())), where) < OUTPUT
    assert called["alibi_slopes"].tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    assert (called["causal"], called["softmax_scale"], called["dropout_p"]) == (True, SCALE, 0.1)
