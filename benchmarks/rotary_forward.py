"""Patched forward against stock transformers configured with the same native scaling: time and peak memory.

    python benchmarks/rotary_forward.py [--model smollm2] [--length 2048] [--rounds 9]

Both models are in one process and run in turn (stock, patched, stock, ...), so a machine whose speed drifts slows both.
Time: median of the ratios of neighbouring runs. Memory: peak of one forward in a process of its own, median of three
(read from /proc, so on Linux).
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch
from resident import start_of_peak
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rope_ext import patch_model
from rope_ext.models import SMOLLM2, smollm2

FACTOR = 2.0


def make(side: str, name: str) -> PreTrainedModel:
    """The checkpoint with yarn: by transformers' own config, or patched. Loaded alike, so that memory compares."""
    path = smollm2() if name == SMOLLM2 else name
    config = AutoConfig.from_pretrained(path)
    if side == "stock":
        length = config.max_position_embeddings
        yarn = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": length}
        config.rope_parameters = {**config.rope_parameters, **yarn}
        config.max_position_embeddings = round(length * FACTOR)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
    return model if side == "stock" else patch_model(model, "yarn", factor=FACTOR)


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    logits = model(ids, use_cache=False, logits_to_keep=1).logits
    return time.perf_counter() - start, logits


def peak_of_one_forward(side: str, name: str, length: int) -> float:
    """MiB that one forward adds on top of the loaded model."""
    command = [sys.executable, __file__, "--model", name, "--length", str(length), "--memory-of", side]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-of", choices=["stock", "patched"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    ids = torch.arange(options.length)[None] % 1000 + 10

    if options.memory_of:
        model = make(options.memory_of, options.model)
        forward(model, ids[:, :16])
        peak = start_of_peak()  # the peak so far was that of loading
        forward(model, ids)
        print(peak())
        return

    models = {side: make(side, options.model) for side in ("stock", "patched")}
    for model in models.values():
        forward(model, ids)
    times: dict[str, list[float]] = {side: [] for side in models}
    for _ in range(options.rounds):
        outputs = {}
        for side, model in models.items():
            seconds, outputs[side] = forward(model, ids)
            times[side].append(seconds)
    ratios = [patched / stock for stock, patched in zip(times["stock"], times["patched"], strict=True)]
    peaks: dict[str, list[float]] = {side: [] for side in models}
    for _ in range(3):
        for side in models:
            peaks[side].append(peak_of_one_forward(side, options.model, options.length))
    memory = {side: statistics.median(values) for side, values in peaks.items()}
    print(f"{options.model}, {options.length} tokens, yarn x{FACTOR:g}, {options.rounds} rounds, fp32")
    print(f"same logits: {torch.equal(outputs['stock'], outputs['patched'])}")
    for side in models:
        print(f"{side:8} {statistics.median(times[side]):7.3f} s  {memory[side]:8.1f} MiB on top of the model")
    print(f"ratio    {statistics.median(ratios):7.3f}    {memory['patched'] / memory['stock']:8.3f}")


if __name__ == "__main__":
    main()
