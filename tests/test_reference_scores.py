"""The references of tests/reference_scores.py: special cases that must coincide, numbers by hand, other libraries."""

import math
from functools import partial

import pytest
import reference
import reference_scores as ref
import torch
from tolerances import FREQUENCY, OUTPUT
from transformers import LlamaConfig, Wav2Vec2BertConfig, XLNetConfig, XLNetModel
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

rotary_embedding_torch = pytest.importorskip("rotary_embedding_torch")
x_transformers = pytest.importorskip("x_transformers.x_transformers")

HEADS, LENGTH, DIM, BASE = 2, 24, 8, 100.0
SCALE = DIM**-0.5
THETA = reference.rope(DIM, BASE, 0)[0]
INTERLEAVED = [0, 4, 1, 5, 2, 6, 3, 7]
"""Channels i and i + 4 side by side."""


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Q, K, V = draw(3, HEADS, LENGTH, DIM)


def content(q=Q, k=K):
    return q @ k.mT * SCALE


def close(found, wanted):
    """Against a library that computes (some of) it in fp32."""
    return torch.allclose(found.detach().double(), wanted.detach().double(), rtol=0, atol=OUTPUT)


# special cases


@pytest.mark.parametrize(
    ("method", "options", "wrong"),
    [
        ("dynamic", (DIM, BASE, LENGTH, 4), (DIM, BASE, LENGTH - 1, 4)),
        ("dynamic_yarn", (DIM, BASE, LENGTH), (DIM, BASE, LENGTH - 1)),
        ("longrope_exact", (DIM, BASE, LENGTH, [1] * 4, [2] * 4, 1), (DIM, BASE, LENGTH - 1, [1] * 4, [2] * 4, 1)),
        ("xpos", (DIM, BASE, math.inf), (DIM, BASE, 512)),
        ("comay", (THETA, [0.0] * 4), (THETA, [0.0] * 3 + [0.01])),
        ("self_extend", (THETA, 5, 1), (THETA, 5, 2)),
        ("self_extend", (THETA, LENGTH, 3), (THETA, LENGTH - 2, 3)),
        ("rerope", (THETA, LENGTH), (THETA, LENGTH - 2)),
        ("rerope", (THETA, LENGTH, LENGTH), (THETA, LENGTH, LENGTH - 1)),
        ("leaky_rerope", (THETA, 5, 1), (THETA, 5, 1.01)),
        ("leaky_rerope", (THETA, LENGTH, 8), (THETA, LENGTH - 2, 8)),
        ("dca", (THETA, LENGTH + 4, 4), (THETA, LENGTH - 2, 4)),
    ],
)
def test_equals_rotary(method, options, wrong):
    wanted = ref.rotary(Q, K, SCALE, THETA).tril()
    assert torch.allclose(getattr(ref, method)(Q, K, SCALE, *options).tril(), wanted)
    assert not torch.allclose(getattr(ref, method)(Q, K, SCALE, *wrong).tril(), wanted)


def test_nothing_learned_is_content_only():
    zeros = torch.zeros(HEADS, DIM, dtype=torch.float64)
    table, projection = draw(5, DIM), draw(HEADS, DIM, 6)
    transformer_xl = partial(ref.transformer_xl, Q, K, SCALE)
    assert torch.allclose(ref.shaw(Q, K, SCALE, table * 0), content())
    assert torch.allclose(ref.cope(Q, K, SCALE, table * 0), content())
    assert torch.allclose(transformer_xl(zeros, draw(HEADS, DIM), projection * 0, 6), content())
    assert torch.allclose(ref.rotary(Q, K, SCALE, [0.0] * 4), content())
    wrong = ref.shaw(Q, K, SCALE, table), ref.cope(Q, K, SCALE, table), ref.rotary(Q, K, SCALE, THETA)
    for scores in (
        *wrong,
        transformer_xl(zeros, zeros, projection, 6),
        transformer_xl(zeros + 1, zeros, 0 * projection, 6),
    ):
        assert not torch.allclose(scores, content())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("rotary", ([1.0, 0.2, 0.05],)),
        ("xpos", (6, BASE)),
        ("comay", ([1.0, 0.2, 0.05], [0.1, 0.2, 0.3])),
        ("self_extend", ([1.0, 0.2, 0.05], 5, 3)),
    ],
)
def test_channels_past_the_rotary_dimension_have_no_position(method, options):
    turned = getattr(ref, method)(Q[..., :6], K[..., :6], SCALE, *options)
    found = getattr(ref, method)(Q, K, SCALE, *options)
    assert torch.allclose(found, turned + content(Q[..., 6:], K[..., 6:]))
    assert not torch.allclose(found, turned + content(Q[..., 2:4], K[..., 2:4]))


def test_factor_scales_turned_channels_only():
    found = ref.rotary(Q, K, SCALE, THETA[:3], factor=1.5)
    turned = ref.rotary(Q[..., :6], K[..., :6], SCALE, THETA[:3])
    assert torch.allclose(found, 1.5**2 * turned + content(Q[..., 6:], K[..., 6:]))
    assert torch.allclose(ref.rotary(Q, K, SCALE, THETA, factor=1.5), 1.5**2 * ref.rotary(Q, K, SCALE, THETA))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dynamic", (DIM, BASE, 10, 4)),
        ("dynamic", (DIM, BASE, 10, 4, 8)),
        ("dynamic_yarn", (DIM, BASE, 10, 4)),
        ("longrope_exact", (DIM, BASE, 10, [1, 1, 2, 2], [2, 3, 4, 5], 4)),
        ("rerope", (THETA, 6, 10)),
        ("cope", (draw(9, DIM),)),
    ],
)
def test_a_row_does_not_depend_on_what_follows(method, options):
    """Decoding from a cache is the last row of the text so far, at every length."""
    whole = getattr(ref, method)(Q, K, SCALE, *options)
    for m in (8, 10, 17):
        so_far = getattr(ref, method)(Q[:, : m + 1], K[:, : m + 1], SCALE, *options)
        assert torch.allclose(so_far[:, m], whole[:, m, : m + 1])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("rotary", (THETA,)),
        ("xpos", (DIM, BASE)),
        ("comay", (THETA, [0.3] * 4)),
        ("rerope", (THETA, 6)),
        ("leaky_rerope", (THETA, 6, 4)),
        ("shaw", (draw(7, DIM),)),
        ("transformer_xl", (*draw(2, HEADS, DIM), draw(HEADS, DIM, 6), 6)),
        ("self_extend", (THETA, 6, 4)),
    ],
)
def test_scores_depend_on_distance_only(method, options):
    """Padding on the left moves positions. Groups are counted from the first token, so 4 is a shift for them too."""
    scores = partial(getattr(ref, method), Q, K, SCALE, *options)
    assert torch.allclose(scores(positions=range(4, 4 + LENGTH)), scores())
    assert not torch.allclose(scores(positions=range(0, 2 * LENGTH, 2)), scores())


def test_cope_counts_tokens_where_gates_are_open():
    table = draw(9, DIM)
    ahead = [[min(max(m - n + 1, 0), 8) for n in range(LENGTH)] for m in range(LENGTH)]
    q = torch.full_like(Q, 100.0)
    position = ref.cope(q, q, SCALE, table) - content(q, q)
    wanted = torch.einsum("hmd,mnd->hmn", q, table[torch.tensor(ahead)])
    assert torch.allclose(position, wanted)
    assert not torch.allclose(position[:, 1:], wanted[:, :-1])
    half = ref.cope(Q, 0 * K, SCALE, table)[:, 10, 8]  # gates of 1/2 at 8, 9, 10
    assert torch.allclose(half, ref.dot(Q[:, 10], (table[1] + table[2]) / 2))
    hidden = torch.arange(LENGTH) != 9
    assert torch.allclose(ref.cope(Q, 0 * K, SCALE, table, hidden.expand(LENGTH, -1))[:, 10, 8], Q[:, 10] @ table[1])


def test_shaw_values():
    weights, offset = ref.softmax(content(), ref.visible(LENGTH)), draw(DIM)
    assert torch.allclose(ref.shaw_output(weights, V, torch.zeros(5, DIM)), weights @ V)
    assert torch.allclose(ref.shaw_output(weights, V, offset.expand(5, -1)), weights @ V + offset)
    one = torch.zeros(5, 1, dtype=torch.float64)
    one[1] = 1.0  # one token before the query
    found = ref.shaw_output(weights, 0 * V[..., :1], one)[..., 0]
    assert torch.allclose(found[:, 1:], weights.diagonal(-1, 1, 2))


# numbers by hand


@pytest.mark.parametrize(
    ("distance", "arguments", "wanted"),
    [
        ("self_extend", (100, 10, 16, 4), 25 - 2 + 16 - 4),
        ("self_extend", (100, 85, 16, 4), 15),
        ("self_extend", (100, 84, 16, 4), 16),
        ("self_extend", (100, 90, 10, 4), 25 - 22 + 10 - 2),
        ("rerope", (100, 10, 16), 16),
        ("rerope", (100, 84, 16), 16),
        ("rerope", (100, 85, 16), 15),
        ("leaky_rerope", (100, 84, 16, 8), 16),
        ("leaky_rerope", (100, 10, 16, 8), 16 + 74 / 8),
    ],
)
def test_distances(distance, arguments, wanted):
    assert getattr(ref, f"{distance}_distance")(*arguments) == wanted


def test_dca_positions():
    """Chunks of 6 with 4 exact tokens across a border; the paper's example, but for its last position, S - 1."""
    to_first_key = [ref.dca_distance(m, 0, 10, 4) for m in range(24)]
    assert to_first_key == [0, 1, 2, 3, 4, 5] + [6, 7, 8, 9, 10, 10] + [10] * 12
    assert [ref.dca_distance(13, n, 10, 4) for n in range(14)] == [10, 9, 8, 7, 6, 5, 7, 6, 5, 4, 3, 2, 1, 0]
    assert ref.dca_distance(8, 0, 10, 6) == 7  # 2c - 1 is below S
    for m in range(40):
        for n in range(m + 1):
            assert ref.dca_distance(m, n, 10, 4) == m - n or m - n > 4
            assert 0 <= ref.dca_distance(m, n, 10, 4) <= 10


def test_schedules():
    assert [ref.stepped(length, 100, 32) for length in (99, 100, 101, 132, 133)] == [99, 100, 132, 132, 164]
    assert [ref.stepped(length, 100) for length in (99, 101)] == [99, 101]
    theta, factor = ref.dynamic_schedule(128, DIM, BASE, 64, 4)  # 4 * 2 - 3 = 5
    assert factor == 1
    assert theta == pytest.approx([(BASE * 5 ** (8 / 6)) ** (-i / 4) for i in range(4)])
    theta, factor = ref.dynamic_yarn_schedule(256, DIM, BASE, 64)
    assert factor == pytest.approx(1.1386, abs=1e-4)
    assert theta == pytest.approx([t * share for t, share in zip(THETA, [1, 3 / 4, 1 / 2, 1 / 4], strict=True)])
    for length, wanted in (64, [1, 1, 2, 2]), (65, [1, 2, 3, 4]):
        theta, factor = ref.longrope_schedule(length, DIM, BASE, 64, [1, 1, 2, 2], [1, 2, 3, 4], 4)
        assert theta == pytest.approx([t / w for t, w in zip(THETA, wanted, strict=True)])
        assert factor == pytest.approx(math.sqrt(4 / 3))  # log 4 / log 64


def test_two_channels():
    one = torch.tensor([[[1.0, 0.0]] * 4], dtype=torch.float64)
    assert torch.allclose(ref.turn(one[0, 0], [math.pi / 2]), torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert float(ref.xpos(one, one, 1, 2, BASE, 1)[0, 3, 2]) == pytest.approx(2 / 7 * math.cos(1))
    assert float(ref.xpos(one, one, 1, 2, BASE)[0, 2, 2]) == 1
    assert float(ref.comay(one, one, 1, [0.5], [0.25])[0, 3, 1]) == pytest.approx(math.cos(1.25))
    assert float(ref.comay(one, one, 1, [0.5], [0.25])[0, 1, 3]) == pytest.approx(math.cos(-0.75))
    assert ref.log_n_scaled(torch.ones(1, 64, 1), 8)[0, [3, 7, 63], 0].tolist() == pytest.approx([1, 1, 2])
    assert [ref.shaw_row(5, n, 2) for n in (0, 3, 4, 5, 6, 9)] == [0, 0, 1, 2, 3, 4]


def test_embeddings():
    assert ref.sinusoidal(3, 4).tolist() == pytest.approx([math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)])
    assert ref.fourier(2, [0.5, 1]).tolist() == pytest.approx([math.cos(1), math.cos(2), math.sin(1), math.sin(2)])
    w = draw(5)
    assert float(ref.fourier(9, w) @ ref.fourier(7, w)) == pytest.approx(float((2 * w).cos().sum()))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "#.... ##... ###.. ####. #####"),
        ({"window": 2}, "#.... ##... .##.. ..##. ...##"),
        ({"window": 2, "sinks": 1}, "#.... ##... ###.. #.##. #..##"),
        ({"window": 2, "global_tokens": (2,)}, "#.... ##... ###.. ..##. ..###"),
        ({"window": 2, "causal": False}, "##... ###.. .###. ..### ...##"),
        ({"window": 1, "causal": False, "global_tokens": (3,)}, "#..#. .#.#. ..##. ##### ...##"),
    ],
)
def test_visible(options, wanted):
    seen = ref.visible(5, **options)
    assert " ".join("".join(".#"[cell] for cell in row) for row in seen.tolist()) == wanted


def test_attention():
    seen = ref.visible(LENGTH, window=3)
    found = ref.attention(0 * content(), V, seen)
    assert torch.allclose(found[:, 10], V[:, 8:11].mean(1))
    assert torch.allclose(found[:, 0], V[:, 0])
    wanted = torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=seen, scale=SCALE)
    assert torch.allclose(ref.attention(content(), V, seen), wanted)
    assert not torch.allclose(ref.attention(content(), V, ref.visible(LENGTH, window=4)), wanted)


@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (1, 3), (8, 1)])
def test_streaming_positions_count_the_kept_cache(window, sinks):
    seen, wrong = ref.visible(LENGTH, window=window, sinks=sinks), 0
    for m in range(LENGTH):
        kept = seen[m].nonzero()[:, 0].tolist()
        for n in kept:
            query, key = ref.streaming_positions(m, n, window, sinks)
            assert query - key == kept.index(m) - kept.index(n)
            query, key = ref.streaming_positions(m, n, window, sinks + 1)
            wrong += query - key != kept.index(m) - kept.index(n)
    assert wrong
    place = partial(ref.streaming_positions, window=window, sinks=sinks)
    cached = ref.rotary(Q[:, kept], K[:, kept], SCALE, THETA)
    assert torch.allclose(ref.rotary(Q, K, SCALE, THETA, place=place)[:, -1, kept], cached[:, -1])
    assert not torch.allclose(ref.rotary(Q, K, SCALE, THETA)[:, -1, kept], cached[:, -1])


# other libraries


def test_llama():
    """The pairing and the direction of rotation of the host, which needs no conversion of channels."""
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=DIM, rope_parameters={"rope_type": "default", "rope_theta": BASE})
    )
    cos, sin = rotary(Q[None], torch.arange(LENGTH)[None])
    q, k = apply_rotary_pos_emb(Q[None], K[None], cos, sin)
    assert close(ref.rotary(Q, K, SCALE, THETA), content(q[0], k[0]))
    assert not close(ref.rotary(Q[..., INTERLEAVED], K[..., INTERLEAVED], SCALE, THETA), content(q[0], k[0]))


def theirs(q, k, positions_q, positions_k):
    """Scores by rotary-embedding-torch, which pairs channels side by side."""
    rotary = rotary_embedding_torch.RotaryEmbedding(DIM, theta=BASE).double()
    turned = [
        rotary_embedding_torch.apply_rotary_emb(
            rotary(torch.tensor(list(places), dtype=torch.float64)), x[..., INTERLEAVED]
        )
        for x, places in ((q, positions_q), (k, positions_k))
    ]
    return content(*turned)


FAR = {
    "self_extend": ((7, 3), 7, lambda m: m // 3 + 7 - 2, lambda n: n // 3),
    "rerope": ((7,), 7, lambda m: 7, lambda n: 0),
    "leaky_rerope": ((7, 4), 7, lambda m: m / 4 + 7 - 7 / 4, lambda n: n / 4),
}
"""Options, first distance that is far, and where queries and keys stand for keys that are far."""


@pytest.mark.parametrize("method", FAR)
def test_rotary_embedding_torch_in_two_passes(method):
    """How these are computed in practice: plain attention for near keys, another one for far keys."""
    options, border, query, key = FAR[method]
    places = range(LENGTH)
    far = torch.tensor([[m - n >= border for n in places] for m in places])
    near = theirs(Q, K, places, places)
    found = getattr(ref, method)(Q, K, SCALE, THETA, *options)
    for shift in (0, 1):
        passes = theirs(Q, K, [query(m) + shift for m in places], [key(n) for n in places])
        assert close(found, torch.where(far, passes, near)) == (shift == 0)


def test_rotary_embedding_torch_in_three_passes():
    size, window, chunk = 10, 4, 6
    places = range(LENGTH)
    apart = torch.tensor([[m // chunk - n // chunk for n in places] for m in places])
    keys = [n % chunk for n in places]
    same = theirs(Q, K, keys, keys)
    found = ref.dca(Q, K, SCALE, THETA, size, window).tril()
    for last in (10, 9):
        following = theirs(Q, K, [min(m % chunk + chunk, last) for m in places], keys)
        others = theirs(Q, K, [last] * LENGTH, keys)
        passes = torch.where(apart == 0, same, torch.where(apart == 1, following, others))
        assert close(found, passes.tril()) == (last == 10)


@pytest.mark.parametrize("scale_base", [512, 20])
def test_rotary_embedding_torch_xpos(scale_base):
    rotary = rotary_embedding_torch.RotaryEmbedding(DIM, theta=BASE, use_xpos=True, xpos_scale_base=scale_base).double()
    q, k = rotary.rotate_queries_and_keys(Q[..., INTERLEAVED], K[..., INTERLEAVED])
    assert close(ref.xpos(Q, K, SCALE, DIM, BASE, scale_base), content(q, k))
    assert not close(ref.xpos(Q, K, SCALE, DIM, BASE, scale_base - 1), content(q, k))
    assert not close(ref.xpos(Q, K, SCALE, DIM, BASE, -scale_base), content(q, k))


def test_x_transformers_xpos():
    rotary = x_transformers.RotaryEmbedding(DIM, base=BASE, use_xpos=True).double()
    angles, scale = rotary.forward_from_seq_len(LENGTH)
    q = x_transformers.apply_rotary_pos_emb(Q[None][..., INTERLEAVED], angles, scale)
    k = x_transformers.apply_rotary_pos_emb(K[None][..., INTERLEAVED], angles, 1 / scale)
    assert close(ref.xpos(Q, K, SCALE, DIM, BASE), content(q[0], k[0]))
    assert not close(ref.xpos(Q, K, SCALE, DIM, BASE, 511), content(q[0], k[0]))


@pytest.mark.parametrize("positions", [4, 30])
def test_x_transformers_cope(positions):
    module = x_transformers.CoPE(DIM, HEADS, positions).double()
    torch.nn.init.normal_(module.pos_emb, generator=torch.Generator().manual_seed(1))
    seen = ref.visible(LENGTH)
    logits = content().masked_fill(~seen, torch.finfo(torch.float64).min)
    wanted = (content() + module(Q[None], logits[None])[0]).tril()
    table = module.pos_emb.detach()
    assert torch.allclose(ref.cope(Q, K, SCALE, table).tril(), wanted)
    assert not torch.allclose(ref.cope(Q, K, SCALE, table.roll(1, 0)).tril(), wanted)


def test_x_transformers_sinusoidal():
    module = x_transformers.ScaledSinusoidalEmbedding(DIM)
    wanted = (module(torch.zeros(1, LENGTH, DIM), pos=torch.arange(LENGTH).float()) * DIM**0.5)[
        :, INTERLEAVED
    ]  # sines first, cosines after them
    assert close(torch.stack([ref.sinusoidal(m, DIM) for m in range(LENGTH)]), wanted)
    assert not close(torch.stack([ref.sinusoidal(m + 1, DIM) for m in range(LENGTH)]), wanted)


def test_wav2vec2_bert_shaw():
    """Attention from hidden states to output, left and right."""
    torch.manual_seed(0)
    config = Wav2Vec2BertConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=5,
        right_max_position_embeddings=5,
        attn_implementation="eager",
    )
    module = Wav2Vec2BertSelfAttention(config).eval().double()
    torch.nn.init.eye_(module.linear_out.weight)
    torch.nn.init.zeros_(module.linear_out.bias)
    hidden = draw(1, LENGTH, HEADS * DIM)
    with torch.no_grad():
        wanted = module(hidden)[0][0].view(LENGTH, HEADS, DIM).transpose(0, 1)
        q, k, v = (
            linear(hidden)[0].view(LENGTH, HEADS, DIM).transpose(0, 1)
            for linear in (module.linear_q, module.linear_k, module.linear_v)
        )
    table, seen = module.distance_embedding.weight.detach(), ref.visible(LENGTH, causal=False)
    assert torch.allclose(ref.attention(ref.shaw(q, k, SCALE, table), v, seen), wanted)
    assert not torch.allclose(ref.attention(ref.shaw(q, k, SCALE, table.flip(0)), v, seen), wanted)
    assert not torch.allclose(ref.attention(ref.shaw(q, k, SCALE, table[1:-1]), v, seen), wanted)


def test_xlnet_transformer_xl():
    """XLNet's attention is Transformer-XL's, with sines in the first half of R and cosines in the second."""
    width = HEADS * DIM
    model = XLNetModel(XLNetConfig(vocab_size=2, d_model=width, n_layer=1, n_head=HEADS, d_inner=4)).eval()
    module, (u, v), w = model.layer[0].rel_attn.double(), draw(2, HEADS, DIM), draw(HEADS, DIM, width, seed=1)
    module.r_w_bias.data, module.r_r_bias.data = u, v
    relative = model.relative_positional_encoding(LENGTH, LENGTH)[:, 0].double()
    halves = torch.cat((w[..., ::2], w[..., 1::2]), dim=-1)
    relative = torch.einsum("jw,hdw->jhd", relative, halves)[:, None]
    with torch.no_grad():
        wanted = module.rel_attn_core(*(x.transpose(0, 1)[:, None] for x in (Q, K, V)), relative)[:, 0].transpose(0, 1)
    seen = ref.visible(LENGTH, causal=False)

    def output(u, v, w):
        return ref.attention(ref.transformer_xl(Q, K, SCALE, u, v, w, width), V, seen)

    assert close(output(u, v, w), wanted)
    assert not close(output(v, u, w), wanted)
    assert not close(output(u, v, w * torch.tensor([-1.0, 1.0]).repeat(width // 2)), wanted)  # n - m instead of m - n


@pytest.mark.parametrize("length", [60, 64, 65, 128, 200])
@pytest.mark.parametrize("method", ["dynamic", "dynamic_yarn", "longrope"])
def test_transformers_frequencies(method, length):
    lists = {"short_factor": [1, 1, 2, 2], "long_factor": [1, 2, 3, 4]}
    schedule, kind, options = {
        "dynamic": (partial(ref.dynamic_schedule, s=4), "dynamic", {"factor": 4.0}),
        "dynamic_yarn": (ref.dynamic_yarn_schedule, "yarn", {"factor": max(1.0, length / 64)}),
        "longrope": (partial(ref.longrope_schedule, short=[1, 1, 2, 2], long=[1, 2, 3, 4], s=4), "longrope", lists),
    }[method]
    options = {"rope_type": kind, "rope_theta": BASE, "original_max_position_embeddings": 64, "factor": 4.0, **options}
    config = LlamaConfig(head_dim=DIM, max_position_embeddings=64, rope_parameters=options)
    wanted, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)

    def agrees(theta, factor):
        return theta == pytest.approx(wanted.tolist(), rel=FREQUENCY) and factor == pytest.approx(attention_factor)

    assert agrees(*schedule(length, d=DIM, base=BASE, trained=64))
    assert not agrees(*schedule(length, d=DIM, base=BASE + 1, trained=64))
    if length > 64:
        assert not agrees(*schedule(length, d=DIM, base=BASE, trained=length if method == "longrope" else 63))


def test_transformers_window():
    theirs = sliding_window_causal_mask_function(5)
    wanted = torch.tensor([[bool(theirs(0, 0, torch.tensor(m), n)) for n in range(LENGTH)] for m in range(LENGTH)])
    assert torch.equal(ref.visible(LENGTH, window=5), wanted)
    assert not torch.equal(ref.visible(LENGTH, window=6), wanted)
