"""Every rotary method against float64 loops written from the papers, with planted faults that must be caught."""

import dataclasses
import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FREQUENCY

from rope_ext import registry
from rope_ext.encodings.rotary import METHODS, Rotary

GEOMETRIES = [
    Rotary(64, 1e5, 8192),
    Rotary(128, 5e5, 8192),
    Rotary(128, 1e4, 4096),
    Rotary(16, 1e4, 64),
    Rotary(4, 1e4, 2048),
]
FACTORED = ("linear", "ntk", "ntk_by_parts", "yarn", "llama3", "pient")


def agrees(name: str, rotary: Rotary, expected: tuple, **options) -> bool:
    method = registry.find_method(name).from_options(options)
    frequencies, scaling = expected
    found = method.frequencies(rotary).double()
    wanted = torch.tensor(frequencies, dtype=torch.float64)
    return torch.allclose(found, wanted, rtol=FREQUENCY, atol=0) and math.isclose(
        method.attention_scaling(rotary), scaling, rel_tol=1e-12
    )


def expected(name: str, rotary: Rotary, s: float = 4.0, **options) -> tuple:
    function = getattr(reference, name)
    geometry = rotary.dim, rotary.base, rotary.trained_length
    return function(*geometry, s, **options) if name in (*FACTORED, "longrope") else function(*geometry, **options)


@pytest.mark.parametrize("rotary", GEOMETRIES, ids=lambda r: f"d{r.dim}-L{r.trained_length}")
@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("factor", [1, 2, 4, 7.5, 32])
def test_factored_methods(name, rotary, factor):
    assert agrees(name, rotary, expected(name, rotary, factor), factor=factor)


@pytest.mark.parametrize("rotary", GEOMETRIES, ids=lambda r: f"d{r.dim}-L{r.trained_length}")
def test_other_methods(rotary):
    assert agrees("rope", rotary, reference.rope(rotary.dim, rotary.base, 0))
    assert agrees("abf", rotary, expected("abf", rotary))
    assert agrees("abf", rotary, expected("abf", rotary, base=1e6), base=1e6)
    assert agrees("lrope", rotary, expected("lrope", rotary))
    divisors = [1 + i / 3 for i in range(rotary.dim // 2)]
    assert agrees(
        "longrope", rotary, expected("longrope", rotary, long_factor=divisors), factor=4, long_factor=divisors
    )


OPTION_CASES = [
    ("yarn", {"beta_fast": 8.0, "beta_slow": 2.0}),
    ("yarn", {"truncate": False}),
    ("yarn", {"attention_factor": 1.2}),
    ("ntk_by_parts", {"alpha": 2.0, "beta": 16.0}),
    ("llama3", {"low_freq_factor": 2.0, "high_freq_factor": 8.0}),
]


@pytest.mark.parametrize(("name", "given_options"), OPTION_CASES)
def test_options_reach_the_formula(name, given_options):
    rotary = GEOMETRIES[0]
    assert agrees(name, rotary, expected(name, rotary, **given_options), factor=4, **given_options)
    assert not agrees(name, rotary, expected(name, rotary), factor=4, **given_options)


PLANTED = {
    "factor": lambda f, m: ([x * 1.01 for x in f], m),
    "sign": lambda f, m: ([-x for x in f], m),
    "off by one channel": lambda f, m: (f[1:] + f[:1], m),
    "one channel": lambda f, m: ([*f[:-1], f[-1] * 1.0001], m),
    "temperature": lambda f, m: (f, m * 1.0001),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("name", FACTORED)
def test_planted_faults_are_caught(name, fault):
    rotary = GEOMETRIES[0]
    assert not agrees(name, rotary, PLANTED[fault](*expected(name, rotary)), factor=4)


def test_an_inverted_ramp_is_caught():
    """The fault a well-known library ships: interpolating the fast channels and keeping the slow ones."""
    rotary = GEOMETRIES[0]
    plain, right = reference.rope(64, 1e5, 0)[0], expected("yarn", rotary)
    inverted = [theta / 4 + theta - value for theta, value in zip(plain, right[0], strict=True)]
    assert not agrees("yarn", rotary, (inverted, right[1]), factor=4)


GOLDEN = {
    # SmolLM2: d 64, base 1e5, L0 8192, factor 4; channel pairs 0, 15, 31
    "rope": (1.0, 0.004531583637600818, 1.4330125702369631e-05),
    "linear": (0.25, 0.0011328959094002045, 3.582531425592408e-06),
    "ntk": (1.0, 0.0023171466384105, 3.582531425592408e-06),
    # dim(32) = 10.3 -> 10, dim(1) = 19.9 -> 20, so channel pair 15 is half way: theta * (0.5 / 4 + 0.5)
    "yarn": (1.0, 0.004531583637600818 * 0.625, 3.582531425592408e-06),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name):
    given = {} if name == "rope" else {"factor": 4}
    found = registry.find_method(name).from_options(given).frequencies(Rotary(64, 1e5, 8192))[[0, 15, 31]]
    assert found.tolist() == pytest.approx(GOLDEN[name], rel=1e-4)


def test_every_method_has_a_reference():
    assert all(callable(getattr(reference, method.name)) for method in METHODS)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(FACTORED),
    factor=st.floats(1, 512),
    dim=st.integers(2, 128).map(lambda pairs: 2 * pairs),
    base=st.floats(100, 1e8),
    length=st.integers(32, 1 << 20),
)
def test_any_geometry(name, factor, dim, base, length):
    """Frequencies are finite, never faster than trained (but for rounding), and at most ``factor`` times slower."""
    rotary = Rotary(dim, base, length)
    found = registry.find_method(name).from_options({"factor": factor}).frequencies(rotary).double()
    plain = torch.tensor(reference.rope(dim, base, length)[0], dtype=torch.float64)
    assert found.dtype == torch.float64
    assert found.shape == (dim // 2,)
    assert torch.isfinite(found).all()
    assert (found <= plain * (1 + 1e-4)).all()
    assert (found >= plain / factor * (1 - 1e-4)).all()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([method.name for method in METHODS]),
    option=st.sampled_from([field.name for method in METHODS for field in dataclasses.fields(method)]),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.text(max_size=3),
        st.floats(),
        st.integers(-5, 5),
        st.lists(st.floats(), max_size=3),
    ),
)
def test_any_option_value_is_taken_or_refused_by_name(name, option, value):
    method = registry.find_method(name)
    needed = {"factor": 4.0} if "factor" in {field.name for field in dataclasses.fields(method)} else {}
    message = None
    try:
        made = method.from_options({**needed, option: value})
        assert method.from_options(made.options()) == made
    except (ValueError, TypeError) as error:
        message = str(error)
    assert message is None or (name in message and f"`{option}`" in message)
