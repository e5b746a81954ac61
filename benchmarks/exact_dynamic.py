"""Dynamic NTK decoded with a cache against one forward over the same tokens, across the trained length.

    python benchmarks/exact_dynamic.py [--before 64] [--after 64] [--factor 2]

The cache is filled with all tokens up to ``--before`` tokens below the trained length in one call, the rest is decoded
one by one. Printed is the largest difference of any logit from those of one forward over everything: of the unpatched
model (what rounding alone makes), of this package, and of stock transformers configured with its own ``dynamic``.
"""

import argparse
from typing import Any

import torch
from transformers import LlamaForCausalLM

from rope_ext import patch_model
from rope_ext.evals.text import read_text
from rope_ext.models import load
from rope_ext.registry import compat


@torch.inference_mode()
def deviation(model: Any, ids: torch.Tensor, start: int) -> tuple[float, float]:
    """(largest difference of a logit, largest logit) of the tokens from ``start`` on."""
    name = compat().cache_argument(model)
    output = model(ids[:, :start], use_cache=True, logits_to_keep=1)
    steps = []
    for at in range(start, ids.shape[1]):
        output = model(ids[:, at : at + 1], use_cache=True, **{name: getattr(output, name)})
        steps.append(output.logits)
    del output
    whole = model(ids, use_cache=False, logits_to_keep=ids.shape[1] - start).logits
    return float((torch.cat(steps, 1) - whole).abs().max()), float(whole.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--before", type=int, default=64)
    parser.add_argument("--after", type=int, default=64)
    parser.add_argument("--factor", type=float, default=2)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    trained = model.config.max_position_embeddings
    text = tokenizer(read_text()[: 8 * trained], add_special_tokens=False, verbose=False).input_ids
    ids, start = torch.tensor([text[: trained + given.after]]), trained - given.before
    config = type(model.config).from_dict(model.config.to_dict())
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": given.factor}
    stock = LlamaForCausalLM(config).eval()
    stock.load_state_dict(model.state_dict())
    for name, side in (("unpatched", model), ("rope_ext", model), ("stock", stock)):
        if name == "rope_ext":
            patch_model(model, "dynamic", factor=given.factor)
        apart, largest = deviation(side, ids, start)
        print(f"{name:<9} tokens {start:,} to {ids.shape[1]:,}: {apart:.2g} (largest logit {largest:.1f})", flush=True)


if __name__ == "__main__":
    main()
