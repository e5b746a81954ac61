"""One layer's attention in zones (self_extend, rerope, dca ...), beside plain causal attention and block by block.

    python benchmarks/zoned.py [--lengths 4096 16384] [--backward]

9 heads (3 for keys) x 64 channels, L0 8192, random input, the same process, in turn, the least of three rounds. Plain
is PyTorch's scaled_dot_product_attention with is_causal. "Blocks" is self_extend with explicit scores, a block of
queries at a time, as on devices without a kernel for zones; one round.
"""

import argparse
import time
from unittest.mock import patch

import torch

from rope_ext.attention import Layout, attend, zoned
from rope_ext.encodings.raw import Encoder, Host
from rope_ext.encodings.rotary import Rotary
from rope_ext.encodings.scores import DualChunk, LeakyReRope, ReRope, SelfExtend

HOST = Host(Rotary(64, 100000.0, 8192), layers=1, heads=9, head_dim=64, width=576)


def side(method: SelfExtend | ReRope | LeakyReRope | DualChunk | None, length: int, backward: bool) -> float:
    torch.manual_seed(0)
    shapes = (1, 9, length, 64), (1, 3, length, 64), (1, 3, length, 64)
    inputs = [torch.randn(shape, requires_grad=backward) for shape in shapes]
    encoder = None if method is None else Encoder(method, HOST, True)
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        output = attend(*inputs, Layout(1, length, length, causal=True), encoder, 0.125)
        if backward:
            output.sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--backward", action="store_true", help="a forward and a backward pass")
    given = parser.parse_args()
    methods = [None, SelfExtend(), ReRope(), LeakyReRope(), DualChunk()]
    print("tokens " + "".join(f"{m.name if m else 'plain':>18}" for m in methods) + f"{'blocks':>18}")
    for length in given.lengths:
        rounds = [[side(method, length, given.backward) for method in methods] for _ in range(3)]
        seconds = [min(found) for found in zip(*rounds, strict=True)]
        with patch.object(zoned, "plan", lambda *_: None):
            seconds.append(side(SelfExtend(), length, given.backward))
        print(f"{length:>6} " + "".join(f"{s:9.2f} s {s / seconds[0]:5.2f}x" for s in seconds), flush=True)


if __name__ == "__main__":
    main()
