"""Clients that read and write text: stock loading, pipelines, continuous batching, lm-eval, sentence-transformers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from conftest import options
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, T5EncoderModel, pipeline

from rope_ext import export, patch_model

from .cases import LONG, SHORT, Compared, cases, patched, tokenizer, unpatched, words

NEW = 6
"""Tokens that are generated."""

STOCK_PYTHON = [sys.executable]
"""The interpreter of the process that must not find rope_ext; by default this one, which is kept from importing it."""

_LOAD = """
import sys, torch
sys.modules["rope_ext"] = None
import transformers
folder, kind, given, out = sys.argv[1:]
model = getattr(transformers, kind).from_pretrained(folder).eval()
with torch.no_grad():
    torch.save(model(**torch.load(given)).logits, out)
"""


@torch.no_grad()
def stock(family: str, method: str) -> Compared:
    """An exported checkpoint, loaded by its path without rope_ext."""
    model = patched(family, method)
    given = {"input_ids": words(LONG)[0]}
    given |= {"decoder_input_ids": words(SHORT)[0]} if family == "t5" else {}
    with tempfile.TemporaryDirectory() as folder:
        model_path, given_path, out = (str(Path(folder) / name) for name in ("model", "given.pt", "logits.pt"))
        export(model, model_path)
        torch.save(given, given_path)
        command = [*STOCK_PYTHON, "-c", _LOAD, model_path, type(model).__name__, given_path, out]
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if run.returncode:
            raise ValueError(run.stderr.strip().splitlines()[-1])
        return Compared(torch.load(out), model(**given).logits, _other(family, method)(**given).logits)


def text_generation(family: str, method: str) -> Compared:
    """Two prompts in a batch padded on the left, against each alone."""
    model = patched(family, method)
    client = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    rows = client([LONG, SHORT], batch_size=2, return_tensors=True, generation_config=_greedy())
    found = torch.tensor([row[0]["generated_token_ids"][-NEW:] for row in rows])
    return Compared(found, _generated(model), _generated(_other(family, method)))


def feature_extraction(family: str, method: str) -> Compared:
    """Hidden states of two texts in a padded batch, against each alone."""
    model, reader = _encoder(family, method), tokenizer()
    client = pipeline("feature-extraction", model=model, tokenizer=reader, device="cpu")
    given = client([LONG, SHORT], batch_size=2, return_tensors=True)
    return _features([row.view(-1, row.shape[-1]) for row in given], model)


def continuous_batching(family: str, method: str) -> Compared:
    """Two requests at a time through generate_batch, against generate with each alone."""
    model = patched(family, method)
    held = ContinuousBatchingConfig(num_blocks=8, page_size=64, max_batch_tokens=256)
    prompts = [text[0].tolist() for text in words(LONG, SHORT)]
    given = model.generate_batch(prompts, _greedy(), held, warmup=False)
    errors = {each.error for each in given.values()} - {None}
    if errors:
        raise ValueError(errors.pop())
    found = torch.tensor([each.generated_tokens for each in given.values()])
    return Compared(found, _generated(model), _generated(_other(family, method)))


@torch.no_grad()
def lm_eval(family: str, method: str) -> Compared:
    """Log-likelihoods of continuations in padded batches through HFLM."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, reader = patched(family, method), tokenizer()
    asked = [(LONG, " The key opens"), (SHORT, " The door"), (LONG[:60], " key 3")]
    harness = HFLM(pretrained=model, tokenizer=reader, batch_size=3, max_length=512, device="cpu")
    requests = [Instance("loglikelihood", {}, given, number) for number, given in enumerate(asked)]
    found = [value for value, _ in harness.loglikelihood(requests, disable_tqdm=True)]

    def likelihoods(model: PreTrainedModel) -> Tensor:
        sums = []
        for context, text in asked:
            ids = words(context + text)[0]
            start = words(context)[0].shape[1]
            chances = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            sums.append(chances.gather(-1, ids[0, start:, None]).sum())
        return torch.stack(sums)

    return Compared(torch.tensor(found), likelihoods(model), likelihoods(_other(family, method)))


def sentence_embeddings(family: str, method: str) -> Compared:
    """A mean-pooled encoder of sentence-transformers, patched in place; two texts at once, against each alone."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    with tempfile.TemporaryDirectory() as folder:
        (T5EncoderModel(unpatched(family).config) if family == "t5" else unpatched(family).base_model).save_pretrained(
            folder
        )
        tokenizer().save_pretrained(folder)
        reader = Transformer(folder)
    model = SentenceTransformer(modules=[reader, Pooling(reader.get_embedding_dimension(), "mean")], device="cpu")
    patch_model(reader.model, method, **options(method, reader.model))
    found = model.encode([LONG, SHORT], batch_size=2, convert_to_tensor=True)
    return _features([row[None] for row in found], reader.model, pooled=True)


def _encoder(family: str, method: str) -> PreTrainedModel:
    model = T5EncoderModel(unpatched(family).config).eval() if family == "t5" else unpatched(family).base_model
    return patch_model(model, method, **options(method, model))


@torch.no_grad()
def _features(found: list[Tensor], model: PreTrainedModel, pooled: bool = False) -> Compared:
    """Real tokens' hidden states, or their means, against each text alone; mistaken: as if padding were text."""
    texts = words(LONG, SHORT)
    longest = texts[0].shape[1]
    wanted = [model(text).last_hidden_state[0] for text in texts]
    padded = [nn.functional.pad(text, (longest - text.shape[1], 0), value=2) for text in texts]
    seen = [model(row).last_hidden_state[0, -text.shape[1] :] for row, text in zip(padded, texts, strict=True)]
    if pooled:
        wanted, seen = [[each.mean(0, keepdim=True) for each in side] for side in (wanted, seen)]
    else:
        found = [row[-text.shape[1] :] for row, text in zip(found, texts, strict=True)]
    return Compared(torch.cat(found), torch.cat(wanted), torch.cat(seen))


def _greedy() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=2)


def _generated(model: PreTrainedModel) -> Tensor:
    """New tokens of each text alone, shape (texts, NEW)."""
    texts = words(LONG, SHORT)
    return torch.cat([model.generate(text, generation_config=_greedy())[:, text.shape[1] :] for text in texts])


def _other(family: str, method: str) -> PreTrainedModel:
    """A model whose encoding was lost, or is another where the method is the family's own."""
    own = (family, method) in (("bloom", "alibi"), ("t5", "t5_bias"))
    return patched(family, "yarn") if own else unpatched(family)


CASES = [
    *cases("stock transformers", stock, ("llama", "bloom", "t5")),
    *cases("pipeline text-generation", text_generation),
    *cases("pipeline feature-extraction", feature_extraction, ("llama", "bloom", "t5")),
    *cases("generate_batch", continuous_batching),
    *cases("lm-eval HFLM", lm_eval, package="lm_eval"),
    *cases("sentence-transformers", sentence_embeddings, ("llama", "t5"), package="sentence_transformers"),
]
