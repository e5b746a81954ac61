"""Run by test_finetune.py in two processes: a patched model, sharded by torch's fully_shard, trains as it does whole.

torchrun --nproc_per_node 2 tests/sharded.py FOLDER METHOD
"""

import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rope_ext import patch_model
from rope_ext.recipes.finetune import Loss

SMALL_MODEL = Path(__file__).parent / "small_model"
STEPS = 3


def make(method):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
    patch_model(model, method, **({"factor": 4} if method == "yarn" else {}))
    learned = ["position_encoding"] if method == "kerple" else None
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=learned)
    return Loss(get_peft_model(model, lora)).train()


def sharded(model, mesh):
    for layer in model.model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(model, steps, rank=None):
    """Two rows a step: both here, or one per process."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
    found = []
    for step in range(steps):
        rows = torch.randint(5, 200, (2, 300), generator=torch.Generator().manual_seed(step))
        mine = rows if rank is None else rows[rank : rank + 1]
        mean = model({"input_ids": mine, "labels": mine}) / (mine.numel() - len(mine))
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = mean.detach()
        if rank is not None:
            distributed.all_reduce(mean)
            mean /= 2
        found.append(float(mean))
    return found


def main(folder, method):
    distributed.init_process_group("gloo")
    rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (2,))
    model = sharded(make(method), mesh)
    split = losses(model, STEPS, rank)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    again = sharded(make(method), mesh)
    set_model_state_dict(again, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    result = {
        "sharded": split,
        "reloaded": losses(again, 1, rank),
        "went on": losses(model, 1, rank),
        "shards": sum("DTensor" in type(weight).__name__ for weight in model.parameters()),
    }
    if rank == 0:
        result["whole"] = losses(make(method), STEPS)
        (Path(folder) / "result.json").write_text(json.dumps(result))
    distributed.barrier()  # nobody leaves while the other still computes
    distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is shutting down


if __name__ == "__main__":
    main(*sys.argv[1:])
