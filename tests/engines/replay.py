"""What the logprobs of a completion must be that several versions of the weights sampled, by definition: a plain
model in float32, one row at a time, its weights exchanged where the stamps say so."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, logging

from rftstream.contracts.versions import VersionName
from rftstream.models.rendering import open_renderer


class Replay:
    def __init__(self, spec):
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=torch.float32).eval()
        self._parameters = dict(self._model.named_parameters())
        self._stop_ids = sorted(open_renderer(spec).stop_token_ids)
        self._versions = {}

    def add(self, name, tensors):
        """A version's weights under the names of the checkpoint. They may be changed later."""
        dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
        state = {
            key: torch.frombuffer(bytearray(one.data), dtype=dtypes[one.dtype]).reshape(one.shape).float()
            for key, one in tensors.items()
        }
        if not self._parameters.keys() <= state.keys():  # transformers fuses the experts when it loads them
            kind, config = type(self._model), self._model.config
            state = dict(kind.from_pretrained(None, config=config, state_dict=state).named_parameters())
        self._versions[name] = state

    @torch.no_grad()
    def _become(self, name):
        for key, parameter in self._parameters.items():
            parameter.copy_(self._versions[name][key])

    @torch.no_grad()
    def logprobs(self, request, completion, *, cache="keep", only=None):
        """float32 [T]. keep: keys and values stay as the weights computed them that sampled the next token. recompute:
        all of them by the weights that sample. `only`: as if this version had sampled all."""
        prompt, count = len(request.token_ids), len(completion.token_ids)
        ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        result = np.zeros(count, np.float32)
        states, fed = DynamicCache(), 0
        for span in completion.versions:
            self._become(only or VersionName(trainer_epoch=span.trainer_epoch, version=span.version))
            if cache == "recompute":
                states, fed = DynamicCache(), 0
            end = prompt + span.start + span.count - 1  # the last token that this version sampled is not fed yet
            positions = torch.arange(fed, end)[None]
            logits_TV = self._model(ids[:, fed:end], position_ids=positions, past_key_values=states).logits[0]
            for place in range(span.start, span.start + span.count):
                logits_V = logits_TV[prompt + place - 1 - fed] / (request.sampling.temperature or 1.0)
                if place < request.sampling.min_tokens:
                    logits_V[self._stop_ids] = -torch.inf
                result[place] = logits_V.log_softmax(-1)[completion.token_ids[place]]
            fed = end
        return result
