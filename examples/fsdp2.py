"""Train a run by FSDP2, on each process a part of the model: `torchrun --nproc-per-node 2 examples/fsdp2.py RUN`, while
`rftstream run FILE` waits for it. The run file says `trainer.backend = "joined"`.

Rank 0 joins the run. It hands batches to the others, and what all of them trained to the log."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import rftstream

WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
TENSORS = ("tokens", "attention_mask", "masks", "advantages", "temperatures")


def of_rank_0(value: Any) -> Any:
    """Return on each rank the value that rank 0 has."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return GRPO's loss of this rank's rows, summed over tokens."""
    mine = {name: tensor[dist.get_rank() :: dist.get_world_size()] for name, tensor in batch.items()}
    logits = model(mine["tokens"], attention_mask=mine["attention_mask"]).logits / mine["temperatures"][:, None, None]
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, mine["tokens"][:, 1:, None])[:, :, 0]
    ratio = (logprobs - logprobs.detach()).exp()
    return -(ratio * mine["advantages"][:, 1:] * mine["masks"][:, 1:]).sum()


torch.set_num_threads(1)  # on a CPU, processes would wait for each other's threads
dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
with rftstream.join(sys.argv[1], role="trainer") if dist.get_rank() == 0 else contextlib.nullcontext() as me:
    folder, weights, kept = of_rank_0(me and (me.model_folder, me.state(), me.kept))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    state_dict.set_model_state_dict(model, weights, options=WHOLE)
    if kept is not None:
        state_dict.set_optimizer_state_dict(model, optimizer, kept["optimizer"], options=WHOLE)
    batches = me and me.batches()
    while True:
        batch = me and next(batches, None)
        tensors = of_rank_0(batch and {name: getattr(batch, name) for name in TENSORS})
        if tensors is None:
            break
        loss = loss_of(model, tensors) / tensors["masks"][:, 1:].sum()
        (loss * dist.get_world_size()).backward()  # FSDP2 takes the mean over ranks
        dist.all_reduce(total := loss.detach().clone())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.param_groups[0]["lr"] = of_rank_0(batch and batch.lr)
        optimizer.step()
        optimizer.zero_grad()
        weights = state_dict.get_model_state_dict(model, options=WHOLE)  # whole on rank 0, empty elsewhere
        if me:
            me.step(batch, weights=weights, metrics={"loss": total, "grad_norm": norm})
        if of_rank_0(me and me.checkpoint_due):
            moments = state_dict.get_optimizer_state_dict(model, optimizer, options=WHOLE)
            if me:
                me.checkpoint({"model": weights, "optimizer": moments})
dist.destroy_process_group()
