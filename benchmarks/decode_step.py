"""One decoding step with a full cache: methods that map raw keys in every step, against stock transformers.

    python benchmarks/decode_step.py [--cached 8192] [--methods dynamic dynamic_yarn self_extend ...] [--steps 15]

Stock is the same checkpoint, unpatched: a static rotary step with sdpa. The cache is filled with random keys of each
side's own kind; all sides decode the same token, in turn, from caches of their own that are cut back after every step.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from rope_ext import patched
from rope_ext.evals.reading import _new_cache as buffer_cache
from rope_ext.models import load
from rope_ext.registry import compat

OPTIONS: dict[str, dict[str, Any]] = {"dynamic": {"factor": 2}, "yarn": {"factor": 2}, "self_extend": {"factor": 2}}


def filled(model: Any, cached: int) -> Any:
    """A cache of random keys and values, so that nothing has to be read first."""
    config = model.config
    shape = (1, config.num_key_value_heads, cached, config.hidden_size // config.num_attention_heads)
    cache, drawn = buffer_cache(cached + 8), torch.Generator().manual_seed(0)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, generator=drawn), torch.randn(shape, generator=drawn), layer)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cached", type=int, default=8192)
    parser.add_argument(
        "--methods", nargs="+", default=["yarn", "dynamic", "dynamic_yarn", "xpos", "self_extend", "dca"]
    )
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    model, _ = load(given.model)
    cache, name = filled(model, given.cached), compat().cache_argument(model)
    token = torch.tensor([[5]])
    seconds: dict[str, list[float]] = {side: [] for side in ("stock", *given.methods)}

    def step(side: str) -> None:
        start = time.perf_counter()
        model(token, use_cache=True, **{name: cache})
        seconds[side].append(time.perf_counter() - start)
        for layer in cache.layers:
            layer.cut(given.cached)

    with torch.inference_mode():
        for _ in range(given.steps + 2):
            step("stock")
            for method in given.methods:
                with patched(model, method, **OPTIONS.get(method, {})):
                    step(method)
    middle = {side: statistics.median(found[2:]) for side, found in seconds.items()}
    for side, median in middle.items():
        print(f"{side:<14} {1000 * median:7.1f} ms  {median / middle['stock']:.2f}x stock")


if __name__ == "__main__":
    main()
