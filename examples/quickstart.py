"""Patch a loaded model, look at what changed, generate, and take the patch back.

python examples/quickstart.py [MODEL]        MODEL: folder, Hub id, or smollm2 (default; needs no Hub)
"""

import sys

import rope_ext
from rope_ext.models import load

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
print(rope_ext.describe(model))

rope_ext.patch_model(model, "yarn", factor=4, tokenizer=tokenizer)
print(rope_ext.describe(model))

prompt = tokenizer(
    "The special magic number for Paris is 12345. The special magic number for Paris is", return_tensors="pt"
)
made = model.generate(input_ids=prompt.input_ids, max_new_tokens=8, do_sample=False)
print(tokenizer.decode(made[0, prompt.input_ids.shape[1] :]))

rope_ext.unpatch_model(model)
