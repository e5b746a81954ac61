"""BLOOM and T5 with their own biases, stock against patched: time and peak memory of one forward by length.

    python benchmarks/bias_attention.py [--hosts bloom t5] [--lengths 1024 2048 4096 8192] [--rounds 3] [--plot FILE]

Hosts: "bloom" (the shapes of BLOOM-560m, 4 layers), "bloom-24" (all layers), "t5" (the encoder of T5-base). Sides:
"stock" (T5: "stock" is its sdpa, "eager" its eager attention), "patched", and "bare": the same model without any
position bias, SDPA with nothing but ``is_causal``, which is the limit of what a fused kernel can do here.

Weights are random, scaled so that the scores of BLOOM have a standard deviation of about 2, as in trained models; with
smaller scores ALiBi leaves out more keys and is faster. Each measurement is one forward of the model without its head
in a process of its own, after a short one to warm up; the sides take turns. Memory is the peak on top of the loaded
model (read from /proc, so on Linux). Ratios are medians of those of neighbouring runs. What would not fit into
memory is left out.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from resident import start_of_peak
from transformers import BloomConfig, BloomModel, PreTrainedModel, T5Config, T5EncoderModel

from rope_ext import patch_model
from rope_ext.evals.memory import available

SIDES = {
    "bloom": ("stock", "patched", "bare"),
    "bloom-24": ("stock", "patched", "bare"),
    "t5": ("stock", "eager", "patched", "bare"),
}
HEADS = {"bloom": 16, "bloom-24": 16, "t5": 12}
PEAK_MATRICES = {"stock": 4.5, "eager": 4.5}
"""fp32 matrices of all pairs and heads that stock holds at once, for leaving out what would not fit."""


def make(host: str, side: str) -> PreTrainedModel:
    torch.manual_seed(0)
    attention = {"stock": "sdpa", "eager": "eager"}.get(side, "sdpa")
    if host == "t5":
        config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, vocab_size=1000)
        model = T5EncoderModel._from_config(config, attn_implementation=attention).eval()
        torch.nn.init.normal_(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
        native = "t5_bias"
    else:
        layers = 24 if host == "bloom-24" else 4
        model = BloomModel(BloomConfig(hidden_size=1024, n_head=16, n_layer=layers, vocab_size=1000)).eval()
        for block in model.h:
            torch.nn.init.normal_(block.self_attention.query_key_value.weight, std=math.sqrt(2 / 1024))
        native = "alibi"
    if side in ("patched", "bare"):
        patch_model(model, native if side == "patched" else "nope")
    return model


@torch.inference_mode()
def forward(model: PreTrainedModel, length: int) -> tuple[float, torch.Tensor]:
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(length))
    cache = {} if isinstance(model, T5EncoderModel) else {"use_cache": False}
    start = time.perf_counter()
    output = model(ids, **cache).last_hidden_state
    return time.perf_counter() - start, output


def measure(host: str, side: str, length: int) -> dict[str, float]:
    """One forward, in this process."""
    model = make(host, side)
    forward(model, 64)
    peak = start_of_peak()  # the peak so far was that of loading
    seconds, _ = forward(model, length)
    return {"seconds": seconds, "mib": peak()}


def in_a_process(host: str, side: str, length: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", host, side, str(length)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def fits(host: str, side: str, length: int) -> bool:
    return PEAK_MATRICES.get(side, 0) * HEADS[host] * length**2 * 4 < 0.9 * available(torch.device("cpu"))


def exponent(by_length: dict[int, float]) -> float:
    """Slope of log(value) over log(length), least squares."""
    xs, ys = [math.log(n) for n in by_length], [math.log(v) for v in by_length.values()]
    x_mean, y_mean = statistics.mean(xs), statistics.mean(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)


def difference(host: str, length: int = 1024) -> float:
    """Largest difference of outputs between stock and patched, relative to the largest output."""
    stock, patched = (forward(make(host, side), length)[1] for side in ("stock", "patched"))
    return float((stock - patched).abs().max() / stock.abs().max())


def plot(results: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(results), 7), layout="constrained")
    axes = figure.subplots(2, len(results), squeeze=False)
    styles = {"stock": "C3o-", "eager": "C1s-", "patched": "C0o-", "bare": "k:"}
    labels = {"stock": "stock", "eager": "stock, eager", "patched": "patched", "bare": "no bias at all (bare SDPA)"}
    for column, (host, sides) in enumerate(results.items()):
        for row, (name, unit) in enumerate((("seconds", "seconds per forward"), ("mib", "peak MiB over the model"))):
            axis = axes[row][column]
            for side, lengths in sides.items():
                medians = [statistics.median(run[name] for run in runs) for runs in lengths.values()]
                axis.loglog(list(lengths), medians, styles[side], label=labels[side])
            axis.set(xlabel="tokens", ylabel=unit, title=host if row == 0 else None)
            axis.set_xticks(sorted({n for found in sides.values() for n in found}))
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0][column].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", default=["bloom", "t5"], choices=list(SIDES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        host, side, length = options.measure
        print(json.dumps(measure(host, side, int(length))))
        return

    results: dict[str, dict[str, dict[int, list[dict[str, float]]]]] = {}
    for host in options.hosts:
        results[host] = {side: {} for side in SIDES[host]}
        print(f"{host}: outputs differ by {difference(host):.1e} of the largest", flush=True)
        for length in options.lengths:
            for _ in range(options.rounds):
                for side in SIDES[host]:
                    if fits(host, side, length):
                        results[host][side].setdefault(length, []).append(in_a_process(host, side, length))
            ours = results[host]["patched"][length]
            for side, found in results[host].items():
                if length in found:
                    runs, names = found[length], ("seconds", "mib")
                    middle = [statistics.median(run[name] for run in runs) for name in names]
                    ratio = [statistics.median(a[n] / b[n] for a, b in zip(runs, ours, strict=True)) for n in names]
                    print(
                        f"{host:9} {length:6} {side:8} {middle[0]:8.2f} s {middle[1]:9.0f} MiB   "
                        f"{ratio[0]:6.2f}x the time, {ratio[1]:6.2f}x the memory of patched",
                        flush=True,
                    )
        for side, found in results[host].items():
            if len(found) > 1:
                memory = {n: statistics.median(run["mib"] for run in runs) for n, runs in found.items()}
                print(f"{host:9} memory of {side} grows with length to the power {exponent(memory):.2f}", flush=True)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
