"""Save a patched model, load it without rope_ext's help, and load it back as a patched model.

python examples/save_and_load.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import rope_ext
from rope_ext.models import load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2", dtype="float32")
ids = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt").input_ids

with tempfile.TemporaryDirectory() as folder:
    with rope_ext.patched(model, "ntk_by_parts", factor=4):
        expected = model(ids).logits
        made = rope_ext.export(model, Path(folder) / "extended", tokenizer)
    print(made.message)

    stock = AutoModelForCausalLM.from_pretrained(made.path).eval()  # what any other tool would do
    print("stock transformers, same logits:", torch.equal(stock(ids).logits, expected))

    again = rope_ext.load_patched(made.path).eval()
    print("load_patched, same logits:", torch.equal(again(ids).logits, expected))
    rope_ext.unpatch_model(again)
    print("and back to the original:", torch.equal(again(ids).logits, model(ids).logits))
