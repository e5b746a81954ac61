"""Needle in a haystack, as loaded and patched: a table, a heatmap, rows that can be resumed.

    python recipes/needle.py --model M --method yarn --factor 4 --lengths 8192,16384,32768 --samples 3

``rope-ext needle`` does the same for one setup; this file shows how to call the evaluation from Python.
"""

import argparse
from pathlib import Path

from rope_ext import patched
from rope_ext.evals import Results, needle
from rope_ext.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='folder, Hub id, adapter folder, or "smollm2"')
    parser.add_argument("--method", default="yarn")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--lengths", default="4096,8192,12288", help="tokens, comma-separated")
    parser.add_argument("--depths", default="0,25,50,75,100", help="percent, comma-separated")
    parser.add_argument("--samples", type=int, default=1, help="prompts per cell")
    parser.add_argument("--text", default="builtin", help="builtin, noise, a file, a folder, or hf:NAME")
    parser.add_argument("--out", type=Path, default=Path("needle"))
    given = parser.parse_args()

    model, tokenizer = load(given.model)
    grid = {
        "lengths": [int(length) for length in given.lengths.split(",")],
        "depths": [float(depth) for depth in given.depths.split(",")],
        "samples": given.samples,
        "text": given.text,
        "out": given.out,
    }
    before = needle(model, tokenizer, **grid)
    with patched(model, given.method, factor=given.factor):
        after = needle(model, tokenizer, **grid)
    both = Results("needle", before.rows + after.rows, before.trained_length)
    both.save(given.out)
    for cell in both.cells():
        print(f"{cell['label']:16} {cell['length']:>7,} {cell['depth']!s:>10} {cell['score']:.2f}")
    print(f"wrote {given.out}/needle.csv and needle.png")


if __name__ == "__main__":
    main()
