"""Every bias method against plain Python loops written from the papers, and against transformers."""

import math

import pytest
import reference
import torch
from tolerances import BIAS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from rope_ext import registry
from rope_ext.encodings.bias import METHODS, Alibi, Bias, Fire, Kerple, Sandwich, T5Bias, alibi_slopes

VARIANTS = {
    "alibi": (Alibi(), {}),
    "alibi x4": (Alibi(factor=4), {"factor": 4}),
    "t5_bias": (T5Bias(), {}),
    "t5_bias x4": (T5Bias(factor=4), {"factor": 4}),
    "t5_bias interpolated": (T5Bias(factor=4, interpolate=True), {"factor": 4, "interpolate": True}),
    "t5_bias 8 buckets": (T5Bias(num_buckets=8, max_distance=20), {"buckets": 8, "max_distance": 20}),
    "kerple": (Kerple(), {}),
    "kerple power": (Kerple(kernel="power"), {"kernel": "power"}),
    "fire": (Fire(threshold=20), {"start": 20}),
    "sandwich": (Sandwich(), {}),
}


def learned(method, heads):
    """Parameters somewhere else than where they start."""
    torch.manual_seed(1)
    return {name: value + 0.3 * torch.rand_like(value) for name, value in method.parameters(heads).items()}


def matrix(method, heads, causal, parameters, length=200):
    places = torch.arange(length)
    distances = places[None] - places[:, None]
    return Bias(method, heads, causal, parameters)(distances, places[:, None])


def agrees(name, heads, causal, change=lambda found: found):
    method, options = VARIANTS[name]
    parameters = learned(method, heads)
    found = change(matrix(method, heads, causal, parameters))
    plain = {key: value.tolist() for key, value in parameters.items()}
    function = getattr(reference, method.name)
    if method.name == "t5_bias":
        options = {**options, "causal": causal}
    for m in (0, 1, 7, 60, 199):
        for n in range(m + 1 if causal else 200):
            for h in range(heads):
                wanted = function(m, n, h, heads, **plain, **options)
                if abs(float(found[h, m, n]) - wanted) > BIAS * max(1, abs(wanted)):
                    return False
    return True


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_papers(name, heads, causal):
    assert agrees(name, heads, causal)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_check_fails_on_planted_faults(name):
    assert not agrees(name, 4, True, lambda found: -found)
    assert not agrees(name, 4, True, lambda found: found.roll(1, -1))
    if name != "fire":  # its network may be flat in places
        assert not agrees(name, 4, True, lambda found: found.flip(0))


def test_every_method_is_checked_and_starts_the_same_every_time():
    assert {method for method, _ in VARIANTS.values()} >= {type(m)() for m in (v[0] for v in VARIANTS.values())} - {
        Fire()
    }
    assert {type(method) for method, _ in VARIANTS.values()} == set(METHODS)
    for method in METHODS:
        first, second = method().parameters(6), method().parameters(6)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_f19_slopes_of_six_heads():
    assert alibi_slopes(6).tolist() == [2.0**-k for k in (2, 4, 6, 8, 1, 3)]
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 25, 112])
def test_slopes_are_those_of_bloom(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi_slopes(heads), theirs, rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (32, 512), (8, 20), (64, 1000)])
def test_buckets_are_those_of_t5_to_the_last_distance(causal, buckets, reach):
    distances = torch.arange(-(2**20), 2**20)
    ours = T5Bias(num_buckets=buckets, max_distance=reach).buckets(distances, causal)
    theirs = T5Attention._relative_position_bucket(distances, not causal, buckets, reach)
    assert torch.equal(ours, theirs)
    shifted = T5Attention._relative_position_bucket(distances - 1, not causal, buckets, reach)
    assert not torch.equal(ours, shifted)


@pytest.mark.parametrize(
    ("distance", "half"),
    [(1_000_000, Alibi(factor=2)), (262_144, Alibi(factor=2)), (4000, Alibi(factor=2))],
)
def test_interpolated_alibi_is_alibi_at_the_divided_distance(distance, half):
    whole = Alibi().bias(torch.tensor([-distance // 2]), 8, {}, True)
    assert torch.allclose(half.bias(torch.tensor([-distance]), 8, {}, True), whole)


def test_sandwich_is_exact_a_million_tokens_away():
    found = Sandwich().bias(torch.tensor([-1_000_003]), 1, {}, True)
    assert float(found) == pytest.approx(reference.sandwich(1_000_003, 0, 0, 1), abs=1e-4)


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerple_has_gradients_at_distance_zero(kernel):
    method = Kerple(kernel=kernel)
    parameters = {name: value.requires_grad_() for name, value in method.parameters(4).items()}
    method.bias(torch.arange(-5, 1), 4, parameters, True).sum().backward()
    assert all(torch.isfinite(value.grad).all() and value.grad.any() for value in parameters.values())


@pytest.mark.parametrize("kernel", ["log", "power"])
@pytest.mark.parametrize("value", [-5.0, 0.0, 0.005])
def test_kerple_can_come_back_from_below_its_range(kernel, value):
    parameters = {name: torch.full((4,), value).requires_grad_() for name in ("r1", "r2")}
    Kerple(kernel=kernel).bias(torch.arange(-5, 1), 4, parameters, True).sum().backward()
    assert all(given.grad.all() for given in parameters.values())


@pytest.mark.parametrize("name", ["c", "threshold"])
def test_fire_is_finite_where_a_parameter_is_zero(name):
    parameters = {key: value.requires_grad_() for key, value in Fire().parameters(4).items()}
    parameters[name] = torch.tensor(0.0, requires_grad=True)
    places = torch.arange(9)
    found = Fire().bias(places[None] - places[:, None], 4, parameters, True, places[:, None])
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert all(torch.isfinite(value.grad).all() for value in parameters.values())


REFUSED = [
    ("alibi", {"factor": 0.5}, "`factor`.*>= 1"),
    ("alibi", {"factor": 1e300}, "`factor`.*<= 1e.06"),
    ("t5_bias", {"factor": 1e308}, "`factor`"),
    ("t5_bias", {"original_max_position_embeddings": 10**400}, "`original_max_position_embeddings`"),
    ("fire", {"width": 10**13}, "`width`.*<= 4096"),
    ("fire", {"threshold": 10**400}, "`threshold`"),
    ("alibi", {"factor": 0}, "`factor`"),
    ("alibi", {"factor": math.inf}, "`factor`"),
    ("t5_bias", {"factor": 0.5}, "`factor`"),
    ("t5_bias", {"num_buckets": 2}, "`num_buckets`"),
    ("t5_bias", {"num_buckets": 64, "max_distance": 32}, "`max_distance`=32"),
    ("t5_bias", {"interpolate": 1}, "`interpolate`"),
    ("kerple", {"kernel": "linear"}, "`kernel`.*'log', 'power'.*'linear'"),
    ("kerple", {"factor": 2}, "`factor`"),
    ("fire", {"width": 0}, "`width`"),
    ("sandwich", {"dim": 1}, "`dim`"),
]


@pytest.mark.parametrize(("name", "options", "said"), REFUSED)
def test_bad_options_are_named(name, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        registry.find_method(name).from_options(options)


@pytest.mark.parametrize("name", VARIANTS)
def test_options_survive_a_round_trip(name):
    method, _ = VARIANTS[name]
    assert type(method).from_options(method.options()) == method
