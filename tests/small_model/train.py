"""Trains the small model of the tests: a Llama of 0.66 M parameters that finds needles within 256 tokens.

    python tests/small_model/train.py [--out FOLDER]        about 20 minutes on two CPU cores

Data is made on the fly: sentences of noise with one to six facts ("The special magic number for Oslo is 83016.") hidden
among them, then questions about all of them. Wording and cities are those of the needle task. The numbers asked for
weigh more in the loss than the rest, which cannot be known. In the first quarter half of the rows are echoes of random
tokens; without them it is a matter of luck whether the model discovers looking back at all.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rope_ext.evals.runner import run
from rope_ext.evals.tasks.needle import CITIES, Needle, Wording
from rope_ext.evals.text import NOISE

TRAINED_LENGTH = 256
STEPS = 2400
BATCH_TOKENS = 32 * TRAINED_LENGTH
LEARNING_RATE = 2e-3
ROPE_THETA = 10000.0
SEED = 0

WORDS = Wording()
ADJECTIVES = "small large old new quiet loud warm cold bright dark round flat quick slow soft hard".split()
NOUNS = "river house garden road tree stone window table boat bird horse letter lamp field bridge cloud".split()
VERBS = "sees finds follows leaves meets holds passes crosses watches keeps".split()


def filler(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(NOISE)
    words = [rng.choice(kind) for kind in (ADJECTIVES, NOUNS, VERBS, ADJECTIVES, NOUNS)]
    return "The {} {} {} the {} {}.".format(*words)


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE with one token per digit, trained on the wording."""

    def corpus() -> Iterator[str]:
        for _ in range(4000):
            key, hay = rng.choice(CITIES), " ".join(filler(rng) for _ in range(8))
            tail = f"{WORDS.question} {WORDS.answer_prefix} 12345."
            yield f"{WORDS.task}\n{hay} {WORDS.needle}\n{tail}".format(key=key, value=rng.randint(10000, 99999))

    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(corpus(), trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=TRAINED_LENGTH
    )


class Data:
    """Rows of (ids, loss weights)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.rng = rng
        self.encode = lru_cache(100_000)(lambda text: tokenizer.encode(text, add_special_tokens=False))

    def row(self, length: int) -> tuple[list[int], list[float]]:
        rng, encode = self.rng, self.encode
        count = rng.choice([1, 1, 2, 3, 4, 6])
        facts = [{"key": key, "value": str(rng.randint(10000, 99999))} for key in rng.sample(CITIES, count)]
        asked = list(range(count))
        rng.shuffle(asked)
        tail, tail_weights = [], []
        for at in asked:
            question = encode("\n" + f"{WORDS.question} {WORDS.answer_prefix}".format(**facts[at]))
            answer = encode(" " + facts[at]["value"]) + encode(".")
            tail += question + answer
            tail_weights += [0.1] * len(question) + [2.0] * len(answer)
        head = [0, *encode(WORDS.task + "\n")]
        needles = [encode(" " + WORDS.needle.format(**fact)) for fact in facts]
        room = length - len(head) - len(tail) - sum(map(len, needles))
        if room < 0:
            return self.row(length)
        hay: list[list[int]] = []
        while len(sentence := encode(" " + filler(rng))) <= room:
            hay.append(sentence)
            room -= len(sentence)
        places = sorted(rng.randint(0, len(hay)) for _ in range(count))
        for place, needle in reversed(list(zip(places, rng.sample(needles, count), strict=True))):
            hay.insert(place, needle)
        ids = head + [token for sentence in hay for token in sentence]
        return ids + tail, [0.1] * len(ids) + tail_weights

    def echo(self, length: int) -> tuple[list[int], list[float]]:
        """Random tokens, again and again: teaches to look back for what followed last time, which the task needs."""
        period = self.rng.randint(16, length // 3)
        phrase = [self.rng.randrange(3, 512) for _ in range(period)]
        ids = [0, *(phrase * (length // period + 1))][:length]
        return ids, [0.0] * (period + 1) + [1.0] * (length - period - 1)

    def batch(self, length: int, echoes: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of about ``length`` tokens, a share of them echoes."""
        kinds = [self.echo if self.rng.random() < echoes else self.row for _ in range(BATCH_TOKENS // length)]
        rows = [kind(length) for kind in kinds]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [2] * (width - len(ids)) for ids, _ in rows])
        return ids, torch.tensor([weights + [0.0] * (width - len(weights)) for _, weights in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out

    rng = random.Random(SEED)
    tokenizer = make_tokenizer(rng)
    print(f"{len(tokenizer)} tokens; a sentence of the haystack: {filler(rng)}")
    torch.manual_seed(SEED)
    data = Data(tokenizer, rng)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TRAINED_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98))
    started = time.monotonic()
    for step in range(STEPS):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 100) * decay
        shorter = [TRAINED_LENGTH // 2, TRAINED_LENGTH * 3 // 4, TRAINED_LENGTH]
        ids, weights = data.batch(
            rng.choice(shorter) if step < STEPS // 2 else TRAINED_LENGTH, echoes=0.5 if step < STEPS // 4 else 0.0
        )
        logits = model(ids).logits[:, :-1]
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (nll * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:5} loss {loss.item():.4f} {time.monotonic() - started:6.0f} s", flush=True)

    lengths = [TRAINED_LENGTH // 2, TRAINED_LENGTH, 2 * TRAINED_LENGTH, 4 * TRAINED_LENGTH]
    rows = run(Needle(" ".join(NOISE), lengths, samples=4, control=False), model, tokenizer)
    for length in lengths:
        scores = [row["score"] for row in rows if row["length"] == length]
        print(f"needle at {length:5} tokens: {sum(scores) / len(scores):.2f}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
