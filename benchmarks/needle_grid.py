"""A needle grid: rope_ext's reader against a plain transformers loop that builds each prompt and calls generate.

    python benchmarks/needle_grid.py [--lengths 1024 2048 4096 8192] [--depths 11] [--rounds 1]

The same model, the same prompts, greedy, as many new tokens; both sides in this process, in turn. Fails if an
answer differs. The bound is what the prefix tree of the prompts allows, by tokens and by operations (two per weight and
token, four per channel and pair of query and key); decoding is not in it.
"""

import argparse
import statistics
import time

import torch

from rope_ext.evals.reading import Limits
from rope_ext.evals.runner import run
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.text import read_text
from rope_ext.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--depths", type=int, default=11, help="how many, from 0 to 100 percent")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=Limits.chunk)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    depths = [100 * step / (given.depths - 1) for step in range(given.depths)]
    task = Needle(read_text(), given.lengths, depths, control=False)
    prompts = [task.question(tokenizer, row).ids for row in task.rows()]

    ours, plain = [], []
    for _ in range(given.rounds):
        start = time.perf_counter()
        rows = run(task, model, tokenizer, limits=Limits(chunk=given.chunk))
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        with torch.inference_mode():
            made = [
                model.generate(torch.tensor([ids]), max_new_tokens=task.max_new_tokens, do_sample=False)[0, len(ids) :]
                for ids in prompts
            ]
        plain.append(time.perf_counter() - start)
        theirs = tokenizer.batch_decode(made, skip_special_tokens=True)
        assert [row["generated"] for row in rows] == theirs, "the answers differ"
        print(
            f"{len(rows)} prompts: ours {ours[-1]:.1f} s, plain {plain[-1]:.1f} s, {plain[-1] / ours[-1]:.2f}x",
            flush=True,
        )
    print(f"ratio of medians {statistics.median(plain) / statistics.median(ours):.2f}; {task.usage}")
    print(f"right answers: {sum(row['score'] for row in rows):.0f} of {len(rows)} on either side")


if __name__ == "__main__":
    main()
