"""What a window costs as the text grows, and a text of 100,000 tokens from a cache that does not.

    python benchmarks/patterns.py [--lengths 2048 4096 8192 16384] [--stream 100000]

The first table: one layer's attention of 9 heads (3 for keys) x 64, window 512 and 4 sinks, beside all pairs; the same
process, in turn. The second: the small model of tests/ generates with a streaming cache; memory is the process's own,
read from /proc (Linux).
"""

import argparse
import time
from pathlib import Path

import torch
from resident import resident
from transformers import AutoModelForCausalLM

from rope_ext import patch_model
from rope_ext.attention import Layout, attend
from rope_ext.registry import compat
from rope_ext.streaming import streaming_cache

SMALL_MODEL = Path(__file__).parent.parent / "tests" / "small_model"


def growth(lengths: list[int]) -> None:
    print("tokens   all pairs   window 512   window 512, 4 sinks")
    for length in lengths:
        q = torch.randn(1, 9, length, 64)
        k, v = torch.randn(1, 3, length, 64), torch.randn(1, 3, length, 64)
        whole = Layout(1, length, length, causal=True)
        seconds = []
        for layout in (whole, whole.patterned(512, 0, ()), whole.patterned(512, 4, ())):
            found = []
            for _ in range(3):
                start = time.perf_counter()
                with torch.inference_mode():
                    attend(q, k, v, layout, None, 0.125)
                found.append(time.perf_counter() - start)
            seconds.append(min(found))
        print(f"{length:>6}" + "".join(f"   {second:8.3f} s" for second in seconds), flush=True)


def stream(tokens: int) -> None:
    model = patch_model(AutoModelForCausalLM.from_pretrained(SMALL_MODEL).eval(), "rope", window=124, sinks=4)
    cache, name = streaming_cache(model), compat().cache_argument(model)
    token, start = torch.tensor([[1]]), time.perf_counter()
    print("tokens   kept keys   resident memory   seconds")
    with torch.inference_mode():
        for count in range(1, tokens + 1):
            token = model(token, use_cache=True, **{name: cache}).logits[:, -1:].argmax(-1)
            if count in (1000, 10000) or count % 25000 == 0:
                kept, taken = cache.layers[0].keys.shape[2], time.perf_counter() - start
                print(f"{count:>7}   {kept:>6}   {resident('VmRSS'):9.1f} MiB   {taken:7.0f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--stream", type=int, default=100_000)
    given = parser.parse_args()
    growth(given.lengths)
    stream(given.stream)
