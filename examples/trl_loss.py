"""Train a run by TRL's GRPO loss: `python examples/trl_loss.py RUN`, while `rftstream run FILE` waits for it.

The run file says `trainer.backend = "joined"`. TRL's default loss is the mean over all tokens of a batch, which is the
run file's `algorithms.grpo.normalise = "token"` with `correction = "none"`."""

from __future__ import annotations

import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import rftstream

ROWS_AT_ONCE = 8

with rftstream.open(sys.argv[1]) as run:
    temperature = run.config.sampling.temperature

with rftstream.join(sys.argv[1], role="trainer") as me:
    model = AutoModelForCausalLM.from_pretrained(me.model_folder, dtype=torch.float32)
    trl = GRPOTrainer(  # only its loss is used
        model=model,
        args=GRPOConfig(output_dir=tempfile.gettempdir(), bf16=False, report_to="none", temperature=temperature),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": ""}]),
        processing_class=AutoTokenizer.from_pretrained(me.model_folder),
    )
    trl.current_gradient_accumulation_steps = trl.args.steps_per_generation  # so that it divides by all tokens
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    model.load_state_dict(me.state())
    if me.kept is not None:
        optimizer.load_state_dict(me.kept["optimizer"])
    for batch in me.batches():
        inputs = {  # the first token stands for the prompt: the masks say which of the others are trained on
            "prompt_ids": batch.tokens[:, :1],
            "prompt_mask": batch.attention_mask[:, :1],
            "completion_ids": batch.tokens[:, 1:],
            "completion_mask": batch.attention_mask[:, 1:],
            "tool_mask": batch.masks[:, 1:],
            "advantages": batch.advantages[:, 1:],
        }
        loss, num_items = 0.0, {"num_items_in_batch": batch.masks[:, 1:].sum()}
        for first in range(0, len(batch.tokens), ROWS_AT_ONCE):
            part = {name: tensor[first : first + ROWS_AT_ONCE] for name, tensor in inputs.items()}
            share = trl.compute_loss(trl.model, {**part, **num_items})
            share.backward()
            loss += share.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = batch.lr
        optimizer.step()
        optimizer.zero_grad()
        me.step(batch, weights=model.state_dict(), metrics={"loss": loss, "grad_norm": norm})
        me.checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
