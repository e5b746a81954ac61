"""Clients that train: transformers' Trainer, TRL's SFTTrainer and DPOTrainer; packed and padded batches."""

from __future__ import annotations

import copy
import math
import tempfile
from functools import partial
from typing import Any

import torch
from conftest import ids
from torch import Tensor
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from .cases import METHODS, Case, Compared, cases, patched, tokenizer

STEPS, RATE = 3, 0.05
TEXTS = [ids(length, seed=seed)[0] for seed, length in enumerate((40, 90, 13, 57))]
"""All of them in every step, so that no order matters; longer and shorter than the trained length."""

ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": RATE,
    "per_device_train_batch_size": len(TEXTS),
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def flattened(family: str, method: str, **said: Any) -> Compared:
    """Trainer with documents in one row, as its collator with ``said`` describes them."""
    model = patched(family, method)
    rows = [{"input_ids": text.tolist()} for text in TEXTS]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, **ARGUMENTS)
        trainer = Trainer(model, arguments, DataCollatorWithFlattening(**said), rows)
        return _losses(trainer, family, method)


def padded(family: str, method: str) -> Compared:
    """Trainer with one document per row; T5 reads each and writes its first tokens."""
    model = patched(family, method)
    labels = [text[:9] if family == "t5" else text for text in TEXTS]
    rows = [{"input_ids": text, "labels": label} for text, label in zip(TEXTS, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, **ARGUMENTS)
        trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer(), padding=True), rows)
        return _losses(trainer, family, method)


def supervised(family: str, method: str, **said: Any) -> Compared:
    """TRL's SFTTrainer over token ids."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = patched(family, method)
    rows = Dataset.from_dict({"input_ids": [text.tolist() for text in TEXTS]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(output_dir=folder, max_length=128, **ARGUMENTS, **said)
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer())
        return _losses(trainer, family, method)


def preferred(family: str, method: str, reference: bool) -> Compared:
    """TRL's DPOTrainer: policy and reference agree at the first step, so that the loss is ln 2."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model = patched(family, method)
    start, *answers = (text.tolist() for text in (TEXTS[1], TEXTS[0], TEXTS[2]))
    rows = Dataset.from_dict({name: [each] for name, each in zip(NAMES, (start, *answers), strict=True)})
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        arguments = DPOConfig(output_dir=folder, **{**ARGUMENTS, "max_steps": 1})
        frozen = copy.deepcopy(model) if reference else None
        trainer = DPOTrainer(model, frozen, arguments, train_dataset=rows, processing_class=tokenizer())
        trainer.train()
    first = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Compared(torch.tensor(first), torch.tensor([math.log(2)]), torch.tensor([math.log(2) + 1]))


NAMES = ("prompt_ids", "chosen_ids", "rejected_ids")


def _losses(trainer: Trainer, family: str, method: str) -> Compared:
    """The losses that a trainer logs, against plain steps on each document alone; mistaken: on all as one text."""
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    joined = [torch.cat(TEXTS)]
    return Compared(
        torch.tensor(found), _steps(patched(family, method), TEXTS), _steps(patched(family, method), joined)
    )


def _steps(model: PreTrainedModel, texts: list[Tensor]) -> Tensor:
    """Losses of ``STEPS`` plain steps of gradient descent over all targets of the texts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        pairs = [(text, text[:9] if model.config.is_encoder_decoder else text) for text in texts]
        targets = [len(label) - (not model.config.is_encoder_decoder) for _, label in pairs]
        sums = [
            model(input_ids=text[None], labels=label[None], use_cache=False).loss * count
            for (text, label), count in zip(pairs, targets, strict=True)
        ]
        loss = sum(sums, torch.zeros(())) / sum(targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


FLATTENED = {
    "positions": {},
    "positions, cumulative lengths": {"return_flash_attn_kwargs": True},
    "positions, document numbers": {"return_seq_idx": True},
    "cumulative lengths alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
}
"""How DataCollatorWithFlattening says where documents are."""

SUPERVISED = {"packing": {"packing": True}, "padding_free": {"padding_free": True}, "padded": {}}

CASES: list[Case] = cases("Trainer, padded", padded, ("llama", "bloom", "t5"))
for name, said in FLATTENED.items():
    CASES += cases(f"Trainer, flattened: {name}", partial(flattened, **said))
CASES.append(Case("Trainer, flattened: positions", flattened, "t5", METHODS["t5"][0], "refused: .*one document"))
for name, said in SUPERVISED.items():
    CASES += cases(f"TRL SFTTrainer, {name}", partial(supervised, **said), package="trl")
CASES += [
    Case("TRL DPOTrainer, its own reference", partial(preferred, reference=False), "llama", "yarn", "", "trl"),
    Case("TRL DPOTrainer, a patched reference", partial(preferred, reference=True), "llama", "yarn", package="trl"),
]
