"""A reward model: a sequence classifier that reads the conversation, in the verifier's children or behind an endpoint.

    reward = scale (activation(output of the label) - offset)

A child loads the model once, and scores all waiting rollouts in a few forward passes. A rollout without a finite
output, or longer than the model's context, has no reward, which is not a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.algorithms.step_rewards import STEP_ENDS, STEP_REWARDS
from rftstream.contracts.arrays import Array
from rftstream.errors import ConfigError, RewardError
from rftstream.models.classifiers import ClassifierFolder, HeldClassifier, read_classifier
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.classifier import WHERE, ClassifierTexts, LocalClassifier, StepClassifier
from rftstream.rewards.event_loop import caught
from rftstream.rewards.judge_prompts import fill, texts_of
from rftstream.rewards.served import UNSEEN, ScoringEndpoint, ServedConfig
from rftstream.rewards.step_scores import Marked, StepScores
from rftstream.rewards.version import config_version

UNSEEN_HERE = {**UNSEEN, "path": None, "device": "cpu", "threads": 1, "batch_size": 1}
"""Settings that change scores only by rounding; the digest of the files stands for the path."""


class ModelReward:
    """The output of a sequence classifier as the reward. Metric `score`: the model's raw output; metric `cut`: 1 if the
    text was cut to fit into the model's context."""

    batched = True
    takes_base = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ServedConfig):
        """`path` of a folder, or `url` and `model` of a served one."""

        path: str | None = None
        """A Hugging Face model folder, relative to the run file: a ...ForSequenceClassification with its tokenizer.
        Each of `verifier.processes` children holds it."""
        endpoint: Literal["classify", "pooling", "score"] = "classify"
        """Endpoint of a served model below `url`, in vLLM's forms. `classify` gives outputs between 0 and 1 unless
        `extra = { use_activation = false }`; `score` reads only the last user message and the completion."""
        label: int | str | None = None
        """The label whose output is the reward: its number, or (in a folder) its name. Unset: the model has only
        one."""
        activation: Literal["none", "sigmoid", "softmax"] = "none"
        """Function that is applied to the outputs before the label's output is taken."""
        offset: float = 0.0
        """Number that is subtracted from it: for example the mean over the reference's answers, so that rewards are
        around 0."""
        scale: float = 1.0
        """Factor of the result."""
        text: str | None = None
        """Text that the model reads instead of the conversation; {prompt}, {completion} and {answer} are filled in. The
        tokenizer adds its special tokens."""
        chat_template: str | None = None
        """A Jinja file, relative to the run file, instead of the folder's chat template."""
        rendering: Literal["template", "turn"] | None = None
        """How a conversation ends: as the chat template writes it, or with the token that ends the last turn. Unset: as
        the folder says, if the model was trained here, otherwise by the template."""
        max_tokens: Annotated[int, Meta(ge=1)] | None = None
        """The longest text, in tokens, that a folder's model reads. Unset: its context."""
        too_long: Literal["unscorable", "cut_left", "cut_right"] = "unscorable"
        """Treatment of longer texts: no reward, or their beginning or end is cut off, which metric `cut` counts. A
        served model decides by itself which texts are too long; these have no reward."""
        steps: str | None = None
        """Separator of the steps of an answer, for example "\\n\\n". It makes the model a process reward model: a
        folder with the tokenizer of the run's model, whose outputs are read at the end of each step. Algorithms with
        `step_rewards` learn from the rewards of its steps."""
        steps_as: Literal["min", "last", "mean", "sum"] = "min"
        """How the rewards of the steps make the rollout's reward. `min`: Math-Shepherd."""
        device: str = "cpu"
        """Device of a folder's model: cpu, cuda, cuda:0 or the like."""
        dtype: Literal["float32", "bfloat16", "float16"] = "float32"
        """Data type that the model computes in."""
        threads: Annotated[int, Meta(ge=1)] = 1
        """CPU threads of each child."""
        batch_size: Annotated[int, Meta(ge=1)] = 16
        """Number of texts in one forward pass; texts of similar lengths are computed together. `verifier.max_batch`
        rollouts come at once."""

    def __init__(self, config: Config, *, base: str = ".") -> None:
        if (config.url is None) == (config.path is None):
            raise ConfigError(f"{WHERE}: expected url and model of a served reward model, or the path of a folder")
        self._config = config
        self._local: _Local | None = None
        seen = ""
        if config.path is not None:
            place = Path(base, config.path).expanduser().resolve()
            folder = read_classifier(place, f"{WHERE}.path", of_tokens=config.steps is not None)
            template = _chat_template(config, base)
            self._local, seen = _Local(config, folder, template), f"{folder.digest}{template or ''}"
            self._place = folder.place_of(config.label, WHERE)
        else:
            self._endpoint = ScoringEndpoint(config, config.endpoint)
            self._place = _served_place(config)
            self._threads = ThreadPoolExecutor(config.max_concurrent, thread_name_prefix="reward-model")
        self.version = config_version("1", (replace(config, **UNSEEN_HERE), seen))  # type: ignore[arg-type]

    @property
    def context(self) -> int | None:
        """The longest conversation that has a reward, in tokens; None if no limit is known here."""
        return None if self._local is None or self._config.too_long != "unscorable" else self._local.limit

    @property
    def num_concurrent(self) -> int:
        """Number of rollouts that are scored at the same time, each by itself, if the model is served; else 0."""
        return self._config.max_concurrent if self._local is None else 0

    @property
    def held(self) -> HeldClassifier | None:
        """The model that each scoring process holds; None if it is served. `check` estimates its memory."""
        return None if self._local is None else self._local.held

    def open(self) -> None:
        """Load the model, if it is a folder."""
        if self._local is not None:
            self._local.open()

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem alone is as long as the model's context."""
        if self._local is not None and self._config.steps is None:
            self._local.check(item)

    def __call__(self, item: RewardInput) -> Score:
        outcome = self.score_all([item])[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def score_all(self, items: Sequence[RewardInput]) -> list[Score | BaseException]:
        """Return the score of each item, or the exception that explains its absence."""
        if self._local is None and len(items) == 1:
            return [caught(self._ask, items[0])]
        if self._local is None:
            return list(self._threads.map(lambda item: caught(self._ask, item), items))
        if self._local.steps is not None:
            return [
                found if isinstance(found, BaseException) else caught(self._score_steps, found)
                for found in self._local.steps.of_items(items)
            ]
        return [
            found if isinstance(found, BaseException) else caught(self._score, *found)
            for found in self._local.outputs(items)
        ]

    def _ask(self, item: RewardInput) -> Score:
        text = None if self._config.text is None else fill(self._config.text, texts_of(item))
        return self._score(np.asarray(self._endpoint.outputs(item, text), np.float64), {})

    def _score(self, outputs_L: np.ndarray, metrics: dict[str, float]) -> Score:
        """Return the score for the model's outputs. RewardError if there is no such label, or no finite number."""
        return Score(reward=self._value(outputs_L), metrics={"score": float(outputs_L[self._place]), **metrics})

    def _score_steps(self, segments: Sequence[Marked]) -> Score:
        """Return the score of a rollout from the model's outputs at the ends of its steps."""
        values = [[self._value(outputs_L) for outputs_L in outputs_SL] for _, outputs_SL in segments]
        rewards, ends = [], []
        for (ends_T, _), values_S in zip(segments, values, strict=True):
            rewards_T = np.zeros(len(ends_T), np.float32)
            rewards_T[ends_T] = values_S
            rewards.append(rewards_T)
            ends.append(ends_T)
        steps_S = np.concatenate(values)
        return Score(
            reward=float(_WHOLES[self._config.steps_as](steps_S)),
            metrics={"score": float(steps_S.mean()), "steps": float(len(steps_S))},
            additions={
                STEP_REWARDS: Array.of(np.concatenate(rewards), "float32"),
                STEP_ENDS: Array.of(np.concatenate(ends), "uint8"),
            },
        )

    def _value(self, outputs_L: np.ndarray) -> float:
        """Return the reward for the model's outputs. RewardError if there is no such label, or no finite number."""
        config = self._config
        if config.label is None and len(outputs_L) != 1:
            raise RewardError(f"reward_model: got {len(outputs_L)} outputs, expected one; set `label`")
        if self._place >= len(outputs_L):
            raise RewardError(f"reward_model: got {len(outputs_L)} outputs, expected label {self._place} among them")
        if not np.isfinite(outputs_L).all():
            raise RewardError(f"reward_model: the model gave {outputs_L.tolist()[:8]}, expected finite numbers")
        value = float(_activated(outputs_L.astype(np.float64), config.activation)[self._place])
        reward = config.scale * (value - config.offset)
        if not math.isfinite(reward):
            raise RewardError(f"reward_model: the reward is {reward}, expected a finite number; see offset and scale")
        return reward


_WHOLES: dict[str, Callable[[np.ndarray], Any]] = {
    "min": np.min,
    "last": lambda steps_S: steps_S[-1],
    "mean": np.mean,
    "sum": np.sum,
}
"""Setting `steps_as` -> how the rewards of steps make one reward."""


class _Local:
    """A folder's model with its texts and limits."""

    def __init__(self, config: ModelReward.Config, folder: ClassifierFolder, template: str | None) -> None:
        self._config = config
        limits = [limit for limit in (config.max_tokens, folder.context) if limit is not None]
        if config.max_tokens is not None and folder.context is not None and config.max_tokens > folder.context:
            raise ConfigError(
                f"{WHERE}.max_tokens: got {config.max_tokens:,}, expected at most {folder.context:,}, the context of "
                f"{folder.folder}"
            )
        self.limit = min(limits, default=None)
        """Largest number of tokens that the model reads; None if unknown."""
        self.held = HeldClassifier(
            folder=folder.folder,
            device=config.device,
            dtype=config.dtype,
            batch_size=config.batch_size,
            limit=self.limit,
        )
        self.model = LocalClassifier(
            folder, device=config.device, dtype=config.dtype, threads=config.threads, batch_size=config.batch_size
        )
        self.steps: StepScores | None = None
        if config.steps is None:
            self._texts = ClassifierTexts(folder, text=config.text, chat_template=template, rendering=config.rendering)
        else:
            _check_steps(config)
            self._along = StepClassifier(self.model)
            self.steps = StepScores(folder, self._along, separator=config.steps, limit=self.limit)

    def open(self) -> None:
        (self.model if self.steps is None else self._along).open()

    def check(self, item: RewardInput) -> None:
        asked = replace(item, messages=(*item.messages, {"role": "assistant", "content": ""}))
        count = len(self._tokens(asked))
        if self.limit is not None and count >= self.limit and self._config.too_long == "unscorable":
            raise RewardError(
                f"reward_model: the prompt alone has {count:,} tokens, expected fewer than {self.limit:,}, which the "
                "model reads; set too_long, or use another model"
            )

    def outputs(self, items: Sequence[RewardInput]) -> list[tuple[np.ndarray, dict[str, float]] | BaseException]:
        """Return for each item the model's outputs, float32 [L], and metrics; or the error."""
        found: list[Any] = [caught(self._read, item) for item in items]
        places = [place for place, one in enumerate(found) if not isinstance(one, BaseException)]
        texts = [found[place][0] for place in places]
        for place, outputs_L in zip(places, self.model.logits(texts) if texts else (), strict=True):
            found[place] = outputs_L, found[place][1]
        return found

    def _read(self, item: RewardInput) -> tuple[list[int], dict[str, float]]:
        """Return the model's input tokens for a rollout, and whether they were cut."""
        whole = self._tokens(item)
        text = self._fitted(whole)
        return text, {} if self._config.too_long == "unscorable" else {"cut": float(whole != text)}

    def _tokens(self, item: RewardInput) -> list[int]:
        text = "" if self._config.text is None else fill(self._config.text, texts_of(item))
        tokens = self._texts.of_item(item, text)
        if not tokens:
            raise RewardError("reward_model: the conversation has no tokens, expected some to read")
        return tokens

    def _fitted(self, tokens: list[int]) -> list[int]:
        """Return the tokens, cut to the limit if the settings say so. RewardError if the settings give such a rollout
        no reward."""
        limit = self.limit
        if limit is None or len(tokens) <= limit:
            return tokens
        if self._config.too_long == "unscorable":
            raise RewardError(
                f"reward_model: the conversation has {len(tokens):,} tokens, expected at most {limit:,}, which the "
                "model reads; set too_long to cut it"
            )
        return tokens[-limit:] if self._config.too_long == "cut_left" else tokens[:limit]


def _check_steps(config: ModelReward.Config) -> None:
    """Raise ConfigError for settings that have no meaning for a process reward model."""
    if not config.steps:
        raise ConfigError(f'{WHERE}.steps: got an empty text, expected what stands between steps, such as "\\n\\n"')
    unused = {"text": None, "chat_template": None, "rendering": None, "too_long": "unscorable"}
    for name, default in unused.items():
        if getattr(config, name) != default:
            raise ConfigError(
                f"{WHERE}.{name}: means nothing with `steps`, which reads the rollout's own tokens; remove it"
            )


def _chat_template(config: ModelReward.Config, base: str) -> str | None:
    """Return the text of the run file's own template, or None. ConfigError if the file does not exist."""
    if config.chat_template is None:
        return None
    file = Path(base, config.chat_template).expanduser()
    if not file.is_file():
        raise ConfigError(f"{WHERE}.chat_template: {file}: no such file, expected a Jinja template")
    return file.read_text(encoding="utf-8")


def _served_place(config: ModelReward.Config) -> int:
    """Return the label's index in the answers of a server. ConfigError for settings that a server cannot follow."""
    if isinstance(config.label, str):
        raise ConfigError(f"{WHERE}.label: got {config.label!r}, expected a number: a server's outputs have no names")
    if config.text is not None and config.endpoint == "score":
        raise ConfigError(f"{WHERE}.text: the endpoint 'score' takes prompt and completion as they are; remove it")
    for name in ("chat_template", "rendering", "max_tokens", "steps"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{WHERE}.{name}: means nothing for a served model; remove it, or set `path`")
    if config.too_long != "unscorable":
        raise ConfigError(f"{WHERE}.too_long: means nothing for a served model; see its truncate_prompt_tokens")
    return config.label or 0


def _activated(outputs_L: np.ndarray, activation: str) -> np.ndarray:
    if activation == "sigmoid":
        return np.asarray(np.exp(-np.logaddexp(0.0, -outputs_L)))
    if activation == "softmax":
        weights_L = np.exp(outputs_L - outputs_L.max())
        return np.asarray(weights_L / weights_L.sum())
    return outputs_L
