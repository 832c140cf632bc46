"""Train a run by FSDP2, on each process a part of the model: `torchrun --nproc-per-node 2 examples/fsdp2.py RUN`, while
`rftstream run FILE` waits for it. The run file says `trainer.backend = "joined"`.

All ranks join the run together. Each gets the same batches, trains on its rows of them, and hands in its shards."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import rftstream

WHOLE = state_dict.StateDictOptions(full_state_dict=True)


def loss_of(model: torch.nn.Module, batch: rftstream.TrainingBatch) -> torch.Tensor:
    """Return GRPO's loss of this rank's rows, as a share of the loss of all rows."""
    tokens, attention_mask, masks, advantages, temperatures = (
        whole[dist.get_rank() :: dist.get_world_size()]
        for whole in (batch.tokens, batch.attention_mask, batch.masks, batch.advantages, batch.temperatures)
    )
    logits = model(tokens, attention_mask=attention_mask).logits / temperatures[:, None, None]
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[:, :, 0]
    ratio = (logprobs - logprobs.detach()).exp()
    return -(ratio * advantages[:, 1:] * masks[:, 1:]).sum() / batch.masks[:, 1:].sum()


torch.set_num_threads(1)  # on a CPU, processes would wait for each other's threads
dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
with rftstream.join(sys.argv[1], role="trainer", group=dist.group.WORLD) as me:
    model = AutoModelForCausalLM.from_pretrained(me.model_folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    state_dict.set_model_state_dict(model, me.state(), options=WHOLE)
    if (kept := me.kept) is not None:
        state_dict.set_optimizer_state_dict(model, optimizer, kept["optimizer"], options=WHOLE)
    for batch in me.batches():
        loss = loss_of(model, batch)
        (loss * dist.get_world_size()).backward()  # FSDP2 takes the mean over ranks
        dist.all_reduce(total := loss.detach().clone())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.param_groups[0]["lr"] = batch.lr
        optimizer.step()
        optimizer.zero_grad()
        me.step(batch, weights=model.state_dict(), metrics={"loss": total, "grad_norm": norm})
        if me.checkpoint_due:
            moments = state_dict.get_optimizer_state_dict(model, optimizer)
            me.checkpoint({"model": model.state_dict(), "optimizer": moments})
dist.destroy_process_group()
