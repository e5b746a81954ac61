"""Fine-tune a model for a longer context: patch it, train LoRA adapters, merge. One file, laptop to cluster.

    python recipes/finetune.py --model M --method yarn --factor 4 --data texts/     one device
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune.py --config my.yaml      GPUs
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 recipes/finetune.py ...     CPUs, several processes

Every setting below is an option of the command and a key of the YAML file that ``--config`` names; the command wins.
A row of data depends on the seed and on its number alone, so neither the number of processes nor a restart changes what
a step sees: ``--resume`` goes on with exactly the losses of a run that was not stopped.
"""

import argparse
import dataclasses
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, set_seed
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from tqdm import tqdm

import rope_ext
from rope_ext.api import unwrap
from rope_ext.command import Parser, method_option, one_line
from rope_ext.evals.runner import run
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.models import load
from rope_ext.training import data as rows_of
from rope_ext.training.loss import IGNORED, language_model_loss
from rope_ext.training.memory import estimate, prepare_allocator
from rope_ext.training.s2 import shifted_sparse_attention


@dataclasses.dataclass
class Settings:
    """All settings of a run; an unknown one is an error."""

    model: str = "smollm2"  # folder, Hub id, or "smollm2" (needs no hub)
    method: str = "yarn"  # a method of rope_ext, or "unpatched"
    factor: float = 0.0  # the method's factor; 0 leaves it out
    option: dict[str, Any] = dataclasses.field(default_factory=dict)  # its other options: --option beta_fast=16
    data: str = "docstrings"  # (of CPython's library), "builtin", file, folder, hf:NAME; see rope_ext.training.data
    train_length: int = 2048  # tokens per row
    target_length: int = 0  # positions that PoSE reaches and evaluation reads; 0: the patched model's usable length
    pose: bool = False  # positional skip-wise training: short rows, positions up to target_length
    packed: bool = True  # documents of a row do not see each other (not with pose or s2, whose rows are one text)
    s2: bool = False  # shifted sparse attention: groups of a quarter of the row, in training only
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    quantize: bool = False  # QLoRA: 4-bit weights; needs a GPU and bitsandbytes
    train_embeddings: bool = False  # LongLoRA found both necessary for large extensions
    train_norms: bool = False
    global_batch: int = 8  # rows per optimizer step, over all processes
    micro_batch: int = 1  # rows per process and forward
    max_steps: int = 100
    lr: float = 2e-4
    schedule: str = "cosine"  # or "constant"
    warmup: int = 10  # steps
    max_norm: float = 1.0  # gradients are clipped to this norm
    seed: int = 0
    dtype: str = "float32"  # or "bfloat16"
    gradient_checkpointing: bool = True  # layers are computed again in the backward pass, their attention is kept
    eval_every: int = 0  # steps between evaluations at target_length; 0: never
    save_every: int = 50  # steps between checkpoints; 0: at the end only
    tracker: str = "tensorboard"  # wandb ...: any that accelerate knows; or "none"
    resume: bool = False  # go on from the checkpoint in out
    out: str = "finetuned"
    merge: bool = False  # also write the merged model, for stock tools
    estimate: bool = False  # print the memory it will take, and stop
    devices: int = 0  # for --estimate: sharded over this many; 0: as launched


def parse(arguments: list[str]) -> Settings:
    """Settings from the command line, over those of ``--config``, over the defaults."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a YAML file of settings")
    for field in dataclasses.fields(Settings):
        kind: dict[str, Any] = {"type": field.type}
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif field.name == "option":
            kind = {"type": method_option, "action": "append", "metavar": "NAME=VALUE"}
        parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, **kind)
    given = vars(parser.parse_args(arguments))
    path = given.pop("config", None)
    written = _written(path) if path else {}
    known = {field.name: field.type for field in dataclasses.fields(Settings)}
    for name, value in written.items():
        if name not in known:
            raise SystemExit(f"{path}: unknown setting {name!r}; known: {', '.join(known)}.")
        right: Any = (int, float) if known[name] is float else dict if name == "option" else known[name]
        if not isinstance(value, right) or (isinstance(value, bool) and known[name] is not bool):
            raise SystemExit(f"{path}: setting {name!r} must be of type {known[name]}, got {value!r}.")
    if isinstance(given.get("option"), list):
        given["option"] = dict(given["option"])
    settings = Settings(**{**written, **given})
    problems = {
        "schedule": settings.schedule not in ("cosine", "constant"),
        "dtype": settings.dtype not in ("float32", "bfloat16"),
        "data": not settings.data,
        "train_length": settings.train_length < 8,
        "target_length": settings.target_length < 0,
        "lora_rank": settings.lora_rank < 1,
        "lora_dropout": not 0 <= settings.lora_dropout < 1,
        "global_batch": settings.global_batch < 1,
        "micro_batch": settings.micro_batch < 1 or settings.global_batch % settings.micro_batch != 0,
        "max_steps": settings.max_steps < 1,
        "lr": not 0 < settings.lr < math.inf,
        "warmup": settings.warmup < 0,
        "max_norm": not settings.max_norm > 0,
        "seed": not 0 <= settings.seed < 2**32,
        "eval_every": settings.eval_every < 0,
        "save_every": settings.save_every < 0,
        "devices": settings.devices < 0,
        "tracker": settings.tracker not in ("none", *map(str, LoggerType)),
        "s2": settings.s2 and settings.train_length % 8 != 0,
    }
    for name, wrong in problems.items():
        if wrong:
            raise SystemExit(f"setting {name!r}: {getattr(settings, name)!r} is not possible; see --help.")
    return settings


def _written(path: Path) -> dict[str, Any]:
    """The settings in a YAML file."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SystemExit(f"config={str(path)!r} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict | None):
        raise SystemExit(f"config={str(path)!r} must hold lines 'setting: value', got {type(found).__name__}.")
    return found or {}


def patched_model(settings: Settings) -> tuple[Any, Any]:
    """(model with another position encoding, tokenizer)."""
    model, tokenizer = load(settings.model, dtype=settings.dtype, device="cpu", quantize=settings.quantize)
    if settings.method != "unpatched":
        options = {**settings.option, **({"factor": settings.factor} if settings.factor else {})}
        rope_ext.patch_model(model, settings.method, tokenizer=tokenizer, **options)
    return model, tokenizer


def with_lora(model: Any, settings: Settings) -> Any:
    """LoRA on the projections of every attention module; embeddings, norms and learned positions trained whole."""
    from peft import LoraConfig, get_peft_model

    attentions = [module for module in model.modules() if "Attention" in type(module).__name__]
    targets = {name for module in attentions for name, child in module.named_children() if isinstance(child, nn.Linear)}
    whole = {"position_encoding"} & {name.split(".")[-1] for name, _ in model.named_modules()}
    if settings.train_embeddings:
        whole |= {name.split(".")[-1] for name, child in model.named_modules() if child is model.get_input_embeddings()}
    if settings.train_norms:
        whole |= {
            name.split(".")[-1] for name, child in model.named_modules() if "norm" in type(child).__name__.lower()
        }
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=sorted(targets),
        modules_to_save=sorted(whole) or None,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
        ensure_weight_tying=settings.train_embeddings and bool(model.config.tie_word_embeddings),
    )
    return get_peft_model(model, config)


def kept_attention(*_: Any) -> Any:
    """Of a layer that is computed again, keep the attention: it costs most to compute and little to keep."""
    kernels = [
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", None) for name in ("flash", "efficient")
    ]
    kernels += [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu]
    kept = {kernel.default for kernel in kernels if kernel is not None}

    def policy(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Loss(nn.Module):
    """The model, called for its loss: what DDP and FSDP wrap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        total, _ = language_model_loss(unwrap(self.model), batch)
        return total


class Data:
    """Row number -> row, for every process the same."""

    def __init__(self, settings: Settings, tokenizer: Any, encoder_decoder: bool, target_length: int) -> None:
        tokenize = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
        most = settings.max_steps * settings.global_batch
        end = tokenizer.eos_token_id
        self.rows = rows_of.pack(rows_of.documents(settings.data), tokenize, end, settings.train_length, most)
        self.seed, self.settings, self.target_length = settings.seed, settings, target_length
        self.end = end
        self.sentinels = sentinels(tokenizer) if encoder_decoder else []

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        epoch, place = divmod(number, len(self.rows))
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch))
        index = int(order[place])
        if self.sentinels:
            return rows_of.span_corruption(self.rows, index, self.sentinels, self.end, self.seed + epoch)
        if self.settings.pose:
            return rows_of.pose_row(self.rows, index, self.target_length, self.seed + epoch)
        if self.settings.packed and not self.settings.s2:
            return rows_of.packed_row(self.rows, index)
        return rows_of.whole_row(self.rows, index)

    def scored(self, numbers: range) -> int:
        """Tokens whose loss counts in these rows."""
        skipped = 0 if self.sentinels else 1  # the first token of a row is not predicted
        return sum(int((self[number]["labels"][skipped:] != IGNORED).sum()) for number in numbers)


def sentinels(tokenizer: Any) -> list[int]:
    """Token ids of <extra_id_0>, <extra_id_1>, ..."""
    names = [f"<extra_id_{number}>" for number in range(100)]
    found = [tokenizer.convert_tokens_to_ids(name) for name in names if name in tokenizer.get_vocab()]
    if not found:
        raise SystemExit("this tokenizer has no <extra_id_0>: span corruption needs T5's sentinels.")
    return found


def tracker_of(settings: Settings) -> str | None:
    """Its name, if it is wanted and installed; ``log.jsonl`` is written in any case."""
    if settings.tracker in map(str, get_available_trackers()):
        return settings.tracker
    if settings.tracker != "none":
        print(f"tracker {settings.tracker} is not installed: only log.jsonl is written.")
    return None


def learning_rate(settings: Settings, step: int) -> float:
    """Of step 0, 1, ...: a linear warm-up, then constant or a half cosine down to a tenth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = (step - settings.warmup) / max(1, settings.max_steps - settings.warmup)
    return settings.lr * (0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


FREE = "resume out max_steps eval_every save_every tracker merge estimate devices micro_batch".split()
"""Settings that may differ in the run that resumes; with another ``max_steps``, a cosine ends elsewhere."""


class Checkpoint:
    """What a run needs to go on, in ``out/checkpoint``: always a whole one, the one before until the new one is."""

    def __init__(self, settings: Settings, accelerator: Accelerator, module: nn.Module, optimizer: Any) -> None:
        self.path, self.accelerator = Path(settings.out) / "checkpoint.pt", accelerator
        self.module, self.optimizer = module, optimizer
        self.settings = {name: value for name, value in vars(settings).items() if name not in FREE}
        self.sharded = accelerator.distributed_type.value in ("FSDP", "DEEPSPEED")

    def _trained(self) -> dict[str, Tensor]:
        inner = self.accelerator.unwrap_model(self.module)
        return {name: weight for name, weight in inner.named_parameters() if weight.requires_grad}

    def save(self, step: int) -> None:
        self.accelerator.wait_for_everyone()
        if self.sharded:
            folder = self.path.with_name(f"checkpoint-{step}")
            self.accelerator.save_state(str(folder))
            state: dict[str, Any] = {"folder": folder.name}
        else:
            state = {"trained": self._trained(), "optimizer": self.optimizer.state_dict()}
        if self.accelerator.is_main_process:
            scratch = self.path.with_suffix(".tmp")
            torch.save({"step": step, "settings": self.settings, **state}, scratch)
            os.replace(scratch, self.path)
        self.accelerator.wait_for_everyone()

    def load(self) -> int:
        """The number of steps done."""
        if not self.path.exists():
            return 0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            before = state["settings"]
        except (RuntimeError, EOFError, KeyError, TypeError, UnpicklingError) as error:
            raise SystemExit(
                f"{self.path} is no checkpoint of this recipe, or damaged ({type(error).__name__}): remove it, or "
                "choose another out."
            ) from error
        changed = [name for name, value in self.settings.items() if before.get(name) != value]
        if changed:
            listed = ", ".join(f"{name}={before.get(name)!r} (now {self.settings[name]!r})" for name in changed)
            raise SystemExit(f"{self.path} was trained with {listed}: resume with the same, or choose another out.")
        if self.sharded:
            self.accelerator.load_state(str(self.path.with_name(state["folder"])))
        else:
            with torch.no_grad():
                for name, weight in self._trained().items():
                    weight.copy_(state["trained"][name])
            self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def step_of(line: str) -> float:
    """The step that a line of the log is about; infinite if the line is not whole."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class Log:
    """``out/log.jsonl``, one line per step; the progress bar; the tracker."""

    def __init__(self, settings: Settings, accelerator: Accelerator, done: int) -> None:
        self.path, self.accelerator = Path(settings.out) / "log.jsonl", accelerator
        if accelerator.is_main_process:
            lines = self.path.read_text().splitlines() if done and self.path.exists() else []
            kept = [line for line in lines if step_of(line) <= done]  # steps after the checkpoint come again
            self.path.write_text("".join(f"{line}\n" for line in kept))
        hidden = not accelerator.is_main_process
        self.bar = tqdm(total=settings.max_steps, initial=done, unit="step", disable=hidden)

    def __call__(self, entry: dict[str, Any], advance: int = 0) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            shown = {name: f"{value:.4g}" for name, value in entry.items() if isinstance(value, float)}
            self.bar.set_postfix(shown)
            self.bar.update(advance)
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float)) and name != "step"}
        self.accelerator.log(numbers, step=entry["step"])


@contextmanager
def attention_of(settings: Settings, model: nn.Module) -> Iterator[None]:
    """The attention that training uses."""
    with ExitStack() as stack:
        if settings.s2:
            stack.enter_context(shifted_sparse_attention(unwrap(model), settings.train_length // 4))
        yield


def evaluate(settings: Settings, model: nn.Module, tokenizer: Any, length: int) -> dict[str, float]:
    """Perplexity of the built-in text and the needle, at the target length; nothing where that is not possible."""
    text = "\n".join(rows_of.documents(rows_of.BUILT_IN))
    tasks = Perplexity(text, [length]), Needle(text, [length], depths=[10, 50, 90], control=False)
    try:
        (perplexity,), needles = (run(task, model, tokenizer, progress=False) for task in tasks)
    except ValueError as error:  # too little text or memory: no reason to lose a run
        print(f"no evaluation at {length} tokens: {error}")
        return {}
    found = sum(row["score"] for row in needles) / len(needles)
    mean = sum(row["answer_log_probability"] for row in needles) / len(needles)
    return {"perplexity": perplexity["perplexity"], "needle": found, "needle_log_probability": mean}


def train(settings: Settings) -> Path:
    """One run, from settings to a saved adapter; returns the folder it is in."""
    prepare_allocator()
    out = Path(settings.out)
    mixed = "bf16" if settings.dtype == "bfloat16" else "no"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.global_batch % (settings.micro_batch * world):
        raise SystemExit(
            f"global_batch={settings.global_batch} is not a multiple of micro_batch={settings.micro_batch} times "
            f"{world} processes."
        )
    micro_steps = settings.global_batch // (settings.micro_batch * world)
    tracked = tracker_of(settings)
    accelerator = Accelerator(
        gradient_accumulation_steps=micro_steps, mixed_precision=mixed, log_with=tracked, project_dir=settings.out
    )
    set_seed(settings.seed)
    model, tokenizer = patched_model(settings)
    target = settings.target_length or rope_ext.describe(model).usable_length
    encoder_decoder = bool(model.config.is_encoder_decoder)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": kept_attention})
    model = with_lora(model, settings)
    needed = estimate(
        unwrap(model),
        settings.train_length,
        settings.micro_batch,
        settings.gradient_checkpointing,
        settings.devices or (world if accelerator.distributed_type.value in ("FSDP", "DEEPSPEED") else 1),
    )
    accelerator.print(f"memory: {needed}")
    if settings.estimate:
        return out
    if (out / "checkpoint.pt").exists() and not settings.resume:
        raise SystemExit(f"out={settings.out!r} holds a checkpoint; pass --resume to go on, or choose another folder.")

    rows = Data(settings, tokenizer, encoder_decoder, target)
    rows[0]  # an error of rows or of attention should come before anything is written
    with attention_of(settings, model):
        pass
    out.mkdir(parents=True, exist_ok=True)
    module: nn.Module = Loss(model)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    module, optimizer = accelerator.prepare(module, optimizer)
    accelerator.init_trackers("rope_ext", config={k: v for k, v in vars(settings).items() if not isinstance(v, dict)})
    checkpoint = Checkpoint(settings, accelerator, module, optimizer)
    done = checkpoint.load() if settings.resume else 0
    log = Log(settings, accelerator, done)

    module.train()
    for step in range(done, settings.max_steps):
        started = time.perf_counter()
        numbers = range(step * settings.global_batch, (step + 1) * settings.global_batch)
        scored = rows.scored(numbers)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        total = torch.zeros((), device=accelerator.device)
        with attention_of(settings, model):
            for micro in range(micro_steps):
                first = numbers[0] + (micro * world + accelerator.process_index) * settings.micro_batch
                made = [rows[number] for number in range(first, first + settings.micro_batch)]
                batch = {name: torch.stack([row[name] for row in made]).to(accelerator.device) for name in made[0]}
                torch.manual_seed(settings.seed * 1_000_003 + first)  # dropout: of a row, whoever computes it
                with accelerator.accumulate(module):
                    loss = module(batch)
                    total += loss.detach()
                    # accelerate averages over micro steps and processes; a mean over the tokens of the step is wanted
                    accelerator.backward(loss * micro_steps * world / scored)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(trained, settings.max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
        seconds = time.perf_counter() - started
        entry = {
            "step": step + 1,
            "loss": float(accelerator.reduce(total)) / scored,
            "lr": learning_rate(settings, step),
            "gradient_norm": float(norm or 0.0),
            "tokens_per_second": settings.global_batch * settings.train_length / seconds,
            "peak_memory_gb": peak_memory(accelerator.device) / 1e9,
        }
        log(entry, advance=1)
        last = step + 1 == settings.max_steps
        if last or (settings.save_every and (step + 1) % settings.save_every == 0):
            checkpoint.save(step + 1)
        if settings.eval_every and (last or (step + 1) % settings.eval_every == 0) and not encoder_decoder:
            found = evaluate(settings, model, tokenizer, target)
            if found:
                log({"step": step + 1, **found})
    log.bar.close()
    accelerator.end_training()
    save(settings, accelerator, module, model, tokenizer, out)
    return out


def save(
    settings: Settings, accelerator: Accelerator, module: nn.Module, model: Any, tokenizer: Any, out: Path
) -> None:
    """The adapter with the encoding it belongs to, and the merged model if asked for."""
    state = accelerator.get_state_dict(module) if accelerator.distributed_type.value in ("FSDP", "DEEPSPEED") else None
    if not accelerator.is_main_process:
        return
    inner = {name.removeprefix("model."): value for name, value in state.items()} if state else None
    write = model.save_pretrained if settings.method == "unpatched" else partial(rope_ext.save_adapter, model)
    write(str(out / "adapter"), **({"state_dict": inner} if inner else {}))
    tokenizer.save_pretrained(str(out / "adapter"))
    if settings.merge:
        made = rope_ext.export(model.merge_and_unload(), out / "merged", tokenizer, overwrite=True)
        print(made.message)


def main() -> None:
    """Errors are one line; ``ROPE_EXT_TRACEBACK=1`` shows where they come from."""
    settings = parse(sys.argv[1:])
    try:
        train(settings)
    except Exception as error:
        raise SystemExit(f"finetune: error: {one_line(error)}") from None


if __name__ == "__main__":
    main()
