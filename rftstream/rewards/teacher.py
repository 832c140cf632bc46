"""A teacher: the log-probabilities that another model gives to exactly the tokens of a rollout, stamped into its
verdict as `teacher_logprobs`, for algorithms that learn from them (`opd`).

It is served (vLLM's `/v1/completions`, which takes token ids and gives `prompt_logprobs`; SGLang's form is another one
and not spoken here), or a folder, computed in the verifier's children. Its tokenizer must be that of the run's model:
ids are compared, never texts. Its logprobs are those of temperature 1.

As a reward it is the mean over sampled tokens of logp_teacher - logp_behavior, an estimate of -KL(policy || teacher).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from msgspec import Meta

from rftstream.errors import ConfigError, RewardError, RewardTimeout
from rftstream.messages import Array
from rftstream.modelserver import ModelServer, Refused, Unreachable
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.version import config_version

ADDITION = "teacher_logprobs"
"""float32 [T]: of every token of all segments, one after the other; 0 where not sampled."""


class TeacherReward:
    batched = True
    takes_base = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        url: str | None = None
        """Of a served teacher, where the API begins: `http://127.0.0.1:8000/v1`. Or `path`."""
        model: str | None = None
        """What the server calls it."""
        api_key: str | None = None
        """`"env:NAME"`: sent as the bearer token; it is looked up in the environment and written nowhere."""
        path: str | None = None
        """Of a small teacher: a Hugging Face model folder, relative to the run file. Each of `verifier.processes`
        children holds it."""
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """What one in a folder computes in."""
        max_concurrent: Annotated[int, Meta(ge=1)] = 32
        """Requests on the way to a server at once, of each child."""
        timeout_s: Annotated[float, Meta(gt=0)] = 60.0
        """Of one answer of a server; `verifier.timeout_s` should be longer."""
        tries: Annotated[int, Meta(ge=1)] = 3
        """Of a request that meets no server, or a busy one."""
        extra: dict[str, Any] = field(default_factory=dict)
        """Further fields of each request, as the server knows them."""

    def __init__(self, config: Config, *, base: str = ".") -> None:
        if (config.url is None) == (config.path is None):
            raise ConfigError("rewards.teacher: expected url (and model) of a served teacher, or path of a folder")
        self._teacher: Teacher
        if config.url is not None:
            self._teacher, known = ServedTeacher(config), ""
        else:
            folder = Path(base, config.path or "").expanduser()
            self._teacher, known = LocalTeacher(folder, config.dtype), _fingerprint(folder)
        shown = replace(config, api_key=None, max_concurrent=1, timeout_s=1.0, tries=1)
        self.version = config_version(f"1{known}", shown)
        self._threads = ThreadPoolExecutor(config.max_concurrent if config.url else 1, thread_name_prefix="teacher")

    def open(self) -> None:
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

    def score_all(self, items: Sequence[RewardInput]) -> list[Score | BaseException]:
        def one(item: RewardInput) -> Score | BaseException:
            try:
                return self(item)
            except Exception as error:
                return error

        return list(self._threads.map(one, items))


def _check(logprobs_T: np.ndarray, sampled_T: np.ndarray) -> None:
    """RewardError unless there is a finite one for each sampled token."""
    if logprobs_T.shape != sampled_T.shape:
        raise RewardError(f"teacher: got logprobs {logprobs_T.shape}, expected one for each of {len(sampled_T)} tokens")
    odd = np.flatnonzero(sampled_T & ~np.isfinite(logprobs_T))
    if len(odd):
        raise RewardError(f"teacher: the logprob of token {odd[0]} is {logprobs_T[odd[0]]}, expected a finite number")


class Teacher(Protocol):
    def open(self) -> None: ...

    def logprobs(self, token_ids_T: np.ndarray) -> np.ndarray:
        """Of each token, given those before it: float32 [T], 0 for the first. RewardError."""


class ServedTeacher:
    def __init__(self, config: TeacherReward.Config) -> None:
        if not config.model:
            raise ConfigError("rewards.teacher.model: missing, expected what the server calls the teacher")
        self._server = ModelServer(
            config.url or "", "completions", api_key=config.api_key, timeout_s=config.timeout_s, tries=config.tries,
            section="rewards.teacher",
        )  # fmt: skip
        self._fixed = {"model": config.model, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1, **config.extra}

    def open(self) -> None:
        pass

    def logprobs(self, token_ids_T: np.ndarray) -> np.ndarray:
        try:
            answer = self._server.ask({**self._fixed, "prompt": token_ids_T.tolist()})
        except Refused as error:
            raise RewardError(
                f"teacher: {error}; is its context longer than the rollout, its tokenizer the same?"
            ) from None
        except Unreachable as error:
            raise (RewardTimeout if error.timed_out else RewardError)(f"teacher: {error}") from None
        return _prompt_logprobs(answer, token_ids_T)


def _prompt_logprobs(answer: Mapping[str, Any], token_ids_T: np.ndarray) -> np.ndarray:
    """vLLM's form: for each token of the prompt a map from ids to what is said of them, none for the first."""
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
    def __init__(self, folder: Path, dtype: str) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"rewards.teacher.path: found no config.json in {folder}, expected a model folder")
        self._folder, self._dtype = folder, dtype
        self._model: Any = None

    def open(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(self._folder, dtype=getattr(torch, self._dtype), local_files_only=True)
        self._model.eval()

    def logprobs(self, token_ids_T: np.ndarray) -> np.ndarray:
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
            logprobs_TV = self._model(ids_T[None]).logits[0, :-1].float().log_softmax(-1)
        found = logprobs_TV.gather(1, ids_T[1:, None])[:, 0].numpy()
        return np.concatenate([np.zeros(1, np.float32), found])


def _fingerprint(folder: Path) -> str:
    """Changes with the files, so that another teacher in its place is another scorer."""
    sizes = [
        f"{path.name}:{path.stat().st_size}:{math.floor(path.stat().st_mtime)}" for path in sorted(folder.glob("*"))
    ]
    return "+" + config_version("", sizes).removeprefix("+")
