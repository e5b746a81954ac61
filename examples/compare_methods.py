"""One load, several methods, the same text: perplexity at twice the trained length.

python examples/compare_methods.py [MODEL]
"""

import sys

import rope_ext
from rope_ext.evals.runner import run
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.text import read_text
from rope_ext.models import load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
length = 2 * rope_ext.describe(model).trained_length
task = Perplexity(read_text(), [length], bins=4)

results = {"unpatched": run(task, model, tokenizer)}
for method in ("linear", "ntk", "ntk_by_parts", "yarn", "llama3"):
    with rope_ext.patched(model, method, factor=2):
        results[method] = run(task, model, tokenizer)

print(f"perplexity in each quarter of {length} tokens")
for name, (row,) in results.items():
    print(f"{name:14}", *(f"{value:10.2f}" for value in row["bin_perplexity"]))
