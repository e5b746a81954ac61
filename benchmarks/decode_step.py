"""One decoding step with a full cache: methods that cache raw keys, against stock transformers.

    python benchmarks/decode_step.py [--cached 8192] [--methods dynamic self_extend ...] [--steps 15] [--rows 1]

Stock is the same checkpoint, unpatched: a static rotary step with sdpa. Every side decodes from a DynamicCache of its
own, filled with the same random keys; the sides take turns. "New stage" is the first step, in which a qk method maps
every cached key; with ``dynamic`` that happens once in 128 tokens on a checkpoint of 8,192. Of several rows each has
100 tokens less than the one before, and padding in front of them.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache

from rope_ext import patched
from rope_ext.models import load
from rope_ext.registry import compat

OPTIONS: dict[str, dict[str, Any]] = {"dynamic": {"factor": 2}, "yarn": {"factor": 2}, "self_extend": {"factor": 2}}


def filled(model: Any, rows: int, cached: int) -> Any:
    """A cache of random keys and values, so that nothing has to be read first."""
    config = model.config
    shape = (rows, config.num_key_value_heads, cached, config.hidden_size // config.num_attention_heads)
    cache, drawn = DynamicCache(config=config), torch.Generator().manual_seed(0)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, generator=drawn), torch.randn(shape, generator=drawn), layer)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cached", type=int, default=8192)
    methods = ["yarn", "dynamic", "dynamic_yarn", "xpos", "self_extend", "dca"]
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1)
    given = parser.parse_args()
    model, _ = load(given.model)
    sides, name, token = ["stock", *given.methods], compat().cache_argument(model), torch.full((given.rows, 1), 5)
    caches = {side: filled(model, given.rows, given.cached) for side in sides}
    shown = torch.ones(given.rows, given.cached + given.steps + 1, dtype=torch.long)
    for row in range(given.rows):
        shown[row, : 100 * row] = 0
    seconds: dict[str, list[float]] = {side: [] for side in sides}

    def step(side: str) -> None:
        end = caches[side].get_seq_length() + 1
        start = time.perf_counter()
        model(token, attention_mask=shown[:, :end], use_cache=True, **{name: caches[side]})
        seconds[side].append(time.perf_counter() - start)

    with torch.inference_mode():
        for _ in range(given.steps + 1):
            step("stock")
            for method in given.methods:
                with patched(model, method, **OPTIONS.get(method, {})):
                    step(method)
    middle = {side: statistics.median(found[1:]) for side, found in seconds.items()}
    for side, median in middle.items():
        print(
            f"{side:<14} {1000 * median:7.1f} ms  {median / middle['stock']:.2f}x stock"
            f"   new stage {1000 * seconds[side][0]:7.1f} ms"
        )


if __name__ == "__main__":
    main()
