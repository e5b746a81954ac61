"""A new architecture is one adapter class.

An architecture with a rotary module of the usual kind needs none: the generic adapter takes it, after checking that the
module can be rebuilt and that its output follows its frequencies. Write an adapter to say more about an architecture -
here, that one method does not suit it.

    python examples/add_an_architecture.py
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rope_ext
from rope_ext.patches.rotary import RotaryAdapter


class TinyConfig(LlamaConfig):
    model_type = "tiny"


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig


AutoConfig.register("tiny", TinyConfig)
AutoModelForCausalLM.register(TinyConfig, TinyForCausalLM)


@rope_ext.register_adapter
class TinyAdapter(RotaryAdapter):
    model_types = ("tiny",)

    def refusal(self, method):
        if method.name == "lrope":
            return "tiny was never trained with frequencies linear in the channel index"
        return super().refusal(method)


size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
model = AutoModelForCausalLM.from_config(TinyConfig(**size, max_position_embeddings=128)).eval()
print(rope_ext.describe(rope_ext.patch_model(model, "yarn", factor=4)))
print("hosted:", ", ".join(rope_ext.methods(model)))
try:
    rope_ext.patch_model(model, "lrope")
except ValueError as error:
    print("refused:", error)
print("still patched:", rope_ext.describe(model).method, tuple(model(torch.arange(300)[None] % 100).logits.shape))
