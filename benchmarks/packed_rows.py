"""A row of packed documents: a training step of a small Llama, stock against patched, time and peak memory.

python benchmarks/packed_rows.py [--length 8192] [--document 512] [--method rope] [--attention sdpa]

Both are told the documents by positions that start again. Stock transformers builds a mask of all pairs for them;
patched models compute document by document. Each side runs in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rope_ext import patch_model


def measure(length: int, document: int, method: str, attention: str) -> str:
    """ "seconds MiB" of one forward and backward pass, the best of three; memory beyond that of a short one."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=1000, max_position_embeddings=length)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    if method != "stock":
        patch_model(model, method)

    def step(tokens: int) -> float:
        words = torch.randint(0, 1000, (1, tokens))
        places = torch.arange(tokens)[None] % document
        start = time.perf_counter()
        model(words, position_ids=places, labels=words, use_cache=False).loss.backward()
        return time.perf_counter() - start

    step(document + 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = min(step(length) for _ in range(3))
    return f"{best} {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Packed rows, stock against patched.")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--document", type=int, default=512)
    parser.add_argument("--method", default="rope")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of the model")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(measure(given.length, given.document, given.side, given.attention))
        return
    sides = {}
    for side in ("stock", given.method):
        found = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--side", side], check=True, capture_output=True, text=True
        )
        sides[side] = tuple(map(float, found.stdout.split()))
    print(f"{given.length} tokens in documents of {given.document}, {given.attention}, forward and backward")
    for side, (seconds, memory) in sides.items():
        print(f"  {side:10} {seconds:7.2f} s  {memory:7.0f} MiB")
    stock, ours = sides["stock"], sides[given.method]
    print(f"  {given.method} over stock: time {ours[0] / stock[0]:.2f}, memory {ours[1] / stock[1]:.2f}")


if __name__ == "__main__":
    main()
