"""One training step of SmolLM2 with LoRA: the recipe's step against Trainer + peft and TRL's SFTTrainer.

    python benchmarks/finetune_step.py [--lengths 4096 8192] [--sides ours trainer trl] [--rounds 1]

The same tokens, the same LoRA (rank 16 on q, k, v, o), fp32, batch 1, AdamW, gradient checkpointing everywhere
("trainer-plain" is without). Each measurement is a process of its own: one short step to warm up, then two of
the length, of which the second is timed; the sides take turns. Memory is the peak of the process (Linux, read from
/proc) on top of the loaded model. ``trl`` needs ``pip install trl``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from resident import start_of_peak

from rope_ext.models import load
from rope_ext.training.memory import prepare_allocator

SIDES = ("ours", "trainer", "trainer-plain", "trl")


def tokens(length: int, tokenizer: Any) -> list[int]:
    from rope_ext.training.data import documents

    text = "\n".join(documents("builtin"))
    found: list[int] = tokenizer.encode(text[: 8 * length], add_special_tokens=False, verbose=False)[:length]
    return found


def lora() -> Any:
    from peft import LoraConfig

    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")


def ours(model: Any, tokenizer: Any, lengths: list[int]) -> list[float]:
    from peft import get_peft_model

    from rope_ext.recipes.finetune import kept_attention
    from rope_ext.training.loss import language_model_loss

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": kept_attention})
    model = get_peft_model(model, lora()).train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    seconds = []
    for length in lengths:
        ids = torch.tensor([tokens(length, tokenizer)])
        start = time.perf_counter()
        total, count = language_model_loss(model.base_model.model, {"input_ids": ids, "labels": ids})
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


def with_trainer(model: Any, tokenizer: Any, lengths: list[int], side: str) -> list[float]:
    from transformers import TrainerCallback

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    rows = [{"input_ids": tokens(length, tokenizer)} for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "per_device_train_batch_size": 1,
            "max_steps": len(lengths),
            "learning_rate": 1e-4,
            "gradient_checkpointing": side != "trainer-plain",
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "use_cpu": True,
            "report_to": "none",
            "logging_strategy": "no",
            "save_strategy": "no",
            "bf16": False,
            "disable_tqdm": True,
        }
        if side == "trl":
            from datasets import Dataset
            from trl import SFTConfig, SFTTrainer

            settings = SFTConfig(**common, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
            data = Dataset.from_list(rows)
            trainer: Any = SFTTrainer(
                model, settings, train_dataset=data, processing_class=tokenizer, peft_config=lora(), callbacks=[Clock()]
            )
        else:
            from peft import get_peft_model
            from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

            model.enable_input_require_grads()
            collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
            trainer = Trainer(
                get_peft_model(model, lora()),
                TrainingArguments(**common),
                train_dataset=rows,
                data_collator=collator,
                callbacks=[Clock()],
            )
        trainer.get_train_dataloader = partial(in_order, trainer.get_train_dataloader)
        trainer.train()
    return seconds


def in_order(make: Any) -> Any:
    loader = make()
    return torch.utils.data.DataLoader(loader.dataset, batch_size=1, shuffle=False, collate_fn=loader.collate_fn)


def measure(side: str, length: int) -> dict[str, float]:
    if side == "ours":
        prepare_allocator()
    model, tokenizer = load("smollm2", dtype="float32", device="cpu")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    peak = start_of_peak()
    plan = [64, length, length]
    seconds = ours(model, tokenizer, plan) if side == "ours" else with_trainer(model, tokenizer, plan, side)
    return {"seconds": seconds[-1], "gib": peak() / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--sides", nargs="+", default=["ours", "trainer", "trl"], choices=SIDES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print("\n" + json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    for length in options.lengths:
        found: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
        for _ in range(options.rounds):
            for side in options.sides:
                command = [sys.executable, __file__, "--measure", side, str(length)]
                printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[side].append(json.loads(printed.strip().splitlines()[-1]))
        for side, runs in found.items():
            seconds = statistics.median(run["seconds"] for run in runs)
            ratios = [
                statistics.median(a[name] / b[name] for a, b in zip(runs, found[options.sides[0]], strict=True))
                for name in ("seconds", "gib")
            ]
            memory = statistics.median(run["gib"] for run in runs)
            print(
                f"{length:6} {side:14} {seconds:7.1f} s {length / seconds:7.1f} tokens/s {memory:6.2f} GiB   "
                f"{ratios[0]:5.2f}x the time, {ratios[1]:5.2f}x the memory of {options.sides[0]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
