"""A teacher: another model's log-probabilities of exactly the tokens of a rollout. They are stored in its verdict as
`teacher_logprobs`, for algorithms that learn from them (`opd`).

The teacher is served (vLLM's `/v1/completions`, which takes token ids and gives `prompt_logprobs`; SGLang's different
form is not supported), or a folder that the verifier's children compute. Its tokenizer must be that of the run's model:
ids are compared, never texts. Its logprobs are those of temperature 1.

As a reward it is the mean over sampled tokens of logp_teacher - logp_behavior, an estimate of -KL(policy || teacher).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rftstream.contracts.arrays import Array
from rftstream.errors import ConfigError, RewardError
from rftstream.models.folders.files import digest_folder
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.classifier import load_model
from rftstream.rewards.served import UNSEEN, AskedModel, Concurrent, ServedConfig
from rftstream.rewards.version import config_version

ADDITION = "teacher_logprobs"
"""Name of the addition, float32 [T]: a logprob for each token of all segments in order, 0 for tokens that were not
sampled."""

CHUNK = 256
"""Number of tokens whose logits are in float32 at once."""


class TeacherReward(Concurrent):
    """The teacher's logprobs of a rollout as an addition, and their mean gap to the policy's as the reward."""

    takes_base = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ServedConfig):
        """`url` and `model` of a served teacher, or `path`."""

        path: str | None = None
        """Folder of a small teacher: a Hugging Face model, relative to the run file. Each of `verifier.processes`
        children holds it."""
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """Data type that a teacher in a folder computes in."""

    def __init__(self, config: Config, *, base: str = ".") -> None:
        if (config.url is None) == (config.path is None):
            raise ConfigError("rewards.teacher: expected url and model of a served teacher, or the path of a folder")
        self._teacher: Teacher
        if config.path is None:
            self._teacher, files = ServedTeacher(config), ""
        else:
            folder = Path(base, config.path).expanduser()
            self._teacher, files = LocalTeacher(folder, config.dtype), digest_folder(folder)
        self.version = config_version("2", (replace(config, **UNSEEN), files))  # type: ignore[arg-type]
        super().__init__(1 if config.path else config.max_concurrent)

    def open(self) -> None:
        """Open the teacher: load its model, if it is a folder."""
        self._teacher.open()

    def __call__(self, item: RewardInput) -> Score:
        stamped, gaps = [np.zeros(0)], [np.zeros(0)]
        for segment in item.segments:
            ids_T, sampled_T = segment.token_ids, segment.loss_mask != 0
            sampled_T[:1] = False  # nothing comes before the first token
            found_T = self._teacher.logprobs(ids_T) if sampled_T.any() else np.zeros(len(ids_T), np.float32)
            _check(found_T, sampled_T)
            stamped.append(np.where(sampled_T, found_T, 0.0))
            gaps.append(found_T[sampled_T].astype(np.float64) - segment.behavior_logprobs[sampled_T])
        gap_N = np.concatenate(gaps)
        if not len(gap_N):
            raise RewardError("teacher: the rollout has no sampled token, expected at least one to compare")
        return Score(reward=float(gap_N.mean()), additions={ADDITION: Array.of(np.concatenate(stamped), "float32")})


def _check(logprobs_T: np.ndarray, sampled_T: np.ndarray) -> None:
    """Raise RewardError unless there is a finite logprob for each sampled token."""
    if logprobs_T.shape != sampled_T.shape:
        raise RewardError(f"teacher: got logprobs {logprobs_T.shape}, expected one for each of {len(sampled_T)} tokens")
    odd = np.flatnonzero(sampled_T & ~np.isfinite(logprobs_T))
    if len(odd):
        raise RewardError(f"teacher: the logprob of token {odd[0]} is {logprobs_T[odd[0]]}, expected a finite number")


class Teacher(Protocol):
    """A model that gives logprobs of tokens. A TeacherReward opens it once and then calls it for each segment."""

    def open(self) -> None:
        """Load what the teacher needs. The reward calls it once, before the first rollout."""

    def logprobs(self, token_ids_T: np.ndarray) -> np.ndarray:
        """Return the logprob of each token given the tokens before it, float32 [T], 0 for the first. RewardError if
        there is none."""


class ServedTeacher:
    """A teacher behind vLLM's `/v1/completions`."""

    def __init__(self, config: TeacherReward.Config) -> None:
        self._model = AskedModel("teacher", config, "completions")

    def open(self) -> None:
        """Do nothing: the server has its model."""

    def logprobs(self, token_ids_T: np.ndarray) -> np.ndarray:
        """Ask the server for the logprobs, float32 [T]. RewardError if it does not give them."""
        body = {"prompt": token_ids_T.tolist(), "max_tokens": 1, "prompt_logprobs": 1}
        answer = self._model.ask(body, hint="; is its context longer than the rollout, its tokenizer the same?")
        return _prompt_logprobs(answer, token_ids_T)


def _prompt_logprobs(answer: Mapping[str, Any], token_ids_T: np.ndarray) -> np.ndarray:
    """Return the logprobs in vLLM's answer. It has a map by token id for each token of the prompt, except for the
    first."""
    try:
        places = answer["choices"][0]["prompt_logprobs"]
        if len(places) != len(token_ids_T):
            raise RewardError(f"teacher: the server gave {len(places)} prompt_logprobs for {len(token_ids_T)} tokens")
        values = [
            0.0,
            *(float(place[str(token)]["logprob"]) for token, place in zip(token_ids_T[1:], places[1:], strict=True)),
        ]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RewardError(
            f"teacher: the server gave no prompt_logprobs of these tokens ({type(error).__name__}: {error}); "
            "vLLM's does"
        ) from None
    return np.asarray(values, np.float32)


class LocalTeacher:
    """A teacher in a model folder. This process computes it, on its CPU."""

    def __init__(self, folder: Path, dtype: str) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"rewards.teacher.path: found no config.json in {folder}, expected a model folder")
        self._folder, self._dtype = folder, dtype
        self._model: Any = None

    def open(self) -> None:
        """Load the model. ConfigError if the folder cannot be read as one."""
        self._model, _ = load_model(
            self._folder.resolve(), "AutoModelForCausalLM", "cpu", self._dtype, 1, "rewards.teacher.path", "a model"
        )

    def logprobs(self, token_ids_T: np.ndarray) -> np.ndarray:
        """Compute the logprobs, float32 [T]. RewardError if the model does not know a token."""
        import torch

        if self._model is None:
            self.open()
        vocabulary = self._model.config.get_text_config().vocab_size
        if int(token_ids_T.max()) >= vocabulary:
            raise RewardError(
                f"teacher: knows {vocabulary} tokens, got token {int(token_ids_T.max())}; another tokenizer?"
            )
        ids_T = torch.from_numpy(token_ids_T.astype(np.int64))
        with torch.no_grad():
            logits_TV, next_T = self._model(ids_T[None]).logits[0, :-1], ids_T[1:]
            starts = range(0, len(next_T), CHUNK)
            found = [_logprobs(logits_TV[at : at + CHUNK], next_T[at : at + CHUNK]) for at in starts]
        return np.concatenate([np.zeros(1, np.float32), *found])


def _logprobs(logits_CV: Any, ids_C: Any) -> np.ndarray:
    """Return the logprobs of tokens, float32 [C]. Only a few rows at a time are in float32."""
    logits_CV = logits_CV.float()
    found: np.ndarray = (logits_CV.gather(1, ids_C[:, None])[:, 0] - logits_CV.logsumexp(-1)).numpy()
    return found
