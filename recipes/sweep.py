"""Several methods on the same texts and needles; one table, one page.

    python recipes/sweep.py --model M --methods none,linear,ntk,yarn --factors 2,4 --lengths 8192,16384

``rope-ext sweep`` does the same with more tasks; this file shows how to call it from Python.
"""

import argparse
from pathlib import Path

from rope_ext.evals import setups, sweep
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.text import read_text
from rope_ext.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='folder, Hub id, adapter folder, or "smollm2"')
    parser.add_argument("--methods", default="none,linear,ntk,yarn", help="none is the model as it is")
    parser.add_argument("--factors", default="2", help="comma-separated")
    parser.add_argument("--lengths", default="4096,12288", help="tokens, comma-separated")
    parser.add_argument("--samples", type=int, default=1, help="prompts per cell")
    parser.add_argument("--out", type=Path, default=Path("sweep"))
    given = parser.parse_args()

    wanted = setups(given.methods.split(","), [float(factor) for factor in given.factors.split(",")])
    lengths = [int(length) for length in given.lengths.split(",")]
    model, tokenizer = load(given.model)
    tasks = [Perplexity(read_text(), lengths), Needle(read_text(), lengths, samples=given.samples)]
    found = sweep(model, tokenizer, wanted, tasks, given.out)
    print(found.write(given.out, "Which encoding holds up", f"{given.model}, {given.lengths} tokens"))


if __name__ == "__main__":
    main()
