"""SmolLM2 at twice its trained length: unpatched, patched with yarn, and stock transformers configured with yarn.

    python benchmarks/smollm2_yarn.py [--length 16384] [--text builtin]        about six minutes on two cores

The stock side is another process that never imports rope_ext; it loads the checkpoint the patched model was saved as.
Prints perplexity per position bin, the largest relative difference of a bin, and whether all logits are the same bits.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from rope_ext import export, patched
from rope_ext.evals.scoring import token_nll
from rope_ext.evals.text import read_text
from rope_ext.models import load

STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.load(sys.argv[2])
with torch.inference_mode():
    hidden = model.model(ids, use_cache=False).last_hidden_state[0, :-1]
    chunks = zip(hidden.split(512), ids[0, 1:].split(512))
    nll = [torch.nn.functional.cross_entropy(model.lm_head(h), t, reduction="none") for h, t in chunks]
    torch.save((torch.cat(nll), model.lm_head(hidden[-64:])), sys.argv[3])
assert not any(name.split(".")[0] == "rope_ext" for name in sys.modules)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--text", default="builtin")
    parser.add_argument("--bins", type=int, default=8)
    options = parser.parse_args()

    model, tokenizer = load("smollm2", dtype="float32", device="cpu")
    text = tokenizer.encode(read_text(options.text), add_special_tokens=False, verbose=False)
    ids = torch.tensor([[tokenizer.bos_token_id, *text[: options.length - 1]]])
    nll = {"unpatched": token_nll(model, ids)}
    with patched(model, "yarn", factor=2), tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        nll["yarn"] = token_nll(model, ids)
        logits = model.lm_head(model.model(ids, use_cache=False).last_hidden_state[0, -65:-1])
        files = [str(Path(folder) / name) for name in ("model", "ids.pt", "out.pt")]
        export(model, files[0])
        torch.save(ids, files[1])
        subprocess.run([sys.executable, "-c", STOCK, *files], check=True, cwd=folder)
        nll["stock yarn"], stock_logits = torch.load(files[2])

    bins = {name: [part.mean().exp() for part in values.tensor_split(options.bins)] for name, values in nll.items()}
    for name, values in bins.items():
        print(f"{name:10}", *(f"{value:9.3f}" for value in values))
    differences = [float(abs(a / b - 1)) for a, b in zip(bins["yarn"], bins["stock yarn"], strict=True)]
    print(f"yarn against stock yarn: largest relative difference of a bin {max(differences):.1e}")
    print(f"logits of the last 64 positions, same bits: {torch.equal(logits, stock_logits)}")
    first = options.bins * model.config.max_position_embeddings // options.length
    inside = [float(b / a - 1) for a, b in zip(bins["unpatched"][:first], bins["yarn"][:first], strict=True)]
    print("yarn over unpatched within the trained length:", *(f"{value:+.1%}" for value in inside))


if __name__ == "__main__":
    main()
