r"""A judge: a served model that reads and judges problem and completion, on any server with OpenAI's
`/v1/chat/completions`.

The judge gives a score in prose, gives a number for each criterion of a rubric, or compares the completion with a
reference in both orders (judge_forms.py). An answer without a judgement is not a score of 0: the rollout then has no
reward. Answers are cached on the host (judge_cache.py), so that a retry or a later scoring does not pay again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.errors import ConfigError, RewardError
from rftstream.http.client import Call
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.judge_cache import JudgeCache, cache_folder
from rftstream.rewards.judge_forms import (
    JudgeCriterion,
    JudgeForm,
    PairForm,
    RubricForm,
    ScoreForm,
    UnreadableJudgement,
)
from rftstream.rewards.served import UNSEEN, AskedModel, Concurrent, ServedConfig, ServerRefusal
from rftstream.rewards.version import config_version

MAX_SAID = 500
"""Most characters of an answer that stand beside the verdict. They are the last ones, where its score stands."""
MAX_REPEATED = 4000
"""Largest number of characters of an unreadable answer that the judge is shown when it is asked again."""


@dataclass(slots=True)
class Spent:
    """The cost of one verdict."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_counted: bool = True
    """Whether the server reported the tokens of each request."""
    num_cached: int = 0
    """Questions that the cache answered."""
    num_asked: int = 0
    """Questions that the cache did not answer."""
    num_retried: int = 0
    """Tries that a busy server, or none, did not answer."""
    said: list[str] = field(default_factory=list)
    """The judge's answers, each its end."""

    def count(self, usage: Any) -> None:
        """Add a request's cost, from the server's usage report."""
        self.requests += 1
        prompt, completion = (
            usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")
        )
        if not isinstance(prompt, int) or not isinstance(completion, int) or prompt < 0 or completion < 0:
            self.is_counted = False
            return
        self.prompt_tokens += prompt
        self.completion_tokens += completion

    def add(self, other: Spent) -> None:
        """Add another cost."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.is_counted = self.is_counted and other.is_counted
        self.num_cached += other.num_cached
        self.num_asked += other.num_asked
        self.num_retried += other.num_retried

    def metrics(self, prices: tuple[float, float]) -> dict[str, float]:
        """Return the cost as metrics. Tokens are left out if the server did not count them."""
        metrics = {
            "cached": self.num_cached / (self.num_cached + self.num_asked),
            "spent_requests": float(self.requests),
        }
        if self.num_retried:
            metrics["spent_retries"] = float(self.num_retried)
        if not self.is_counted:
            return metrics
        tokens = (self.prompt_tokens, self.completion_tokens)
        metrics |= {"spent_prompt_tokens": float(tokens[0]), "spent_completion_tokens": float(tokens[1])}
        if any(prices):
            metrics["spent_money"] = sum(price * number for price, number in zip(prices, tokens, strict=True)) / 1e6
        return metrics


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(ServedConfig):
    """Settings of a reward that asks a judge."""

    system: str | None = None
    """System prompt of the judge."""
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Largest number of tokens of the judge's answer."""
    asks: Annotated[int, Meta(ge=1)] = 2
    """Number of times that the judge is asked in all if its answer cannot be read. It is told what is wrong."""
    response_format: Literal["schema", "object", "none"] = "schema"
    """Way to tell the server that the answer is JSON. If a server refuses it, the request is repeated without
    it."""
    fenced: bool = True
    """Enclose texts that are filled into `prompt` in tags that these texts cannot close. The default prompts always
    do."""
    cache_mib: Annotated[int, Meta(ge=0)] = 256
    """Size of the cache of judges' answers, on disk. All runs of this user on a host share it. 0: no cache."""
    cache_folder: str | None = None
    """Folder of the cache, relative to the run file. Default: `rftstream/judge` in $XDG_CACHE_HOME, or in
    ~/.cache."""
    price_prompt: Annotated[float, Meta(ge=0)] = 0.0
    """Price of a million tokens of prompts, for the metric `spent_money`."""
    price_completion: Annotated[float, Meta(ge=0)] = 0.0
    """Price of a million tokens of answers."""


class Judge:
    """A served model that answers questions. A reward makes it, and calls `judgement` from any of its threads."""

    def __init__(self, name: str, config: JudgeConfig, *, base: str) -> None:
        self._name = name
        self._config = config
        self._model = AskedModel(name, config, "chat/completions")
        self._takes_format = config.response_format != "none"
        self._cache: JudgeCache | None = None
        if config.cache_mib:
            self._cache = JudgeCache(cache_folder(config.cache_folder, base), max_bytes=config.cache_mib << 20)

    @staticmethod
    def version(code: str, config: JudgeConfig) -> str:
        """Return the version of a reward with this config, without what changes no score."""
        unseen = {**UNSEEN, "cache_mib": 0, "cache_folder": None, "price_prompt": 0.0, "price_completion": 0.0}
        return config_version(code, replace(config, **unseen))  # type: ignore[arg-type]

    def cost(self, spent: Spent) -> dict[str, float]:
        """Return what judgements have cost, as metrics."""
        return spent.metrics((self._config.price_prompt, self._config.price_completion))

    def judgement(self, question: str, form: JudgeForm, spent: Spent) -> Any:
        """Return the judgement of one question, from the cache if it is there."""
        system = [] if self._config.system is None else [{"role": "system", "content": self._config.system}]
        messages = [*system, {"role": "user", "content": question}]
        if self._cache is None:
            return self._read(messages, form, spent)[0]
        key = self._model.digest({**self._body(messages), "response_format": self._config.response_format})
        with self._cache.asking(key):
            if (kept := self._cache.get(key)) is not None:
                with contextlib.suppress(UnreadableJudgement):  # it was cached by code that read it differently
                    found = form.read(kept)
                    spent.num_cached += 1
                    spent.said.append(kept.strip()[-MAX_SAID:])
                    return found
            found, said = self._read(messages, form, spent)
            self._cache.put(key, said)
        return found

    def _read(self, messages: list[dict[str, str]], form: JudgeForm, spent: Spent) -> tuple[Any, str]:
        """Ask until the answer can be read. Return the judgement and the judge's answer. RewardError if no answer can
        be read."""
        problem = ""
        for _ in range(self._config.asks):
            said = self._said(messages, form, spent)
            try:
                found = form.read(said)
            except UnreadableJudgement as error:
                problem = str(error)
                messages = [
                    *messages,
                    {"role": "assistant", "content": said[-MAX_REPEATED:]},
                    {"role": "user", "content": f"That cannot be read. {form.wanted}"},
                ]
            else:
                spent.num_asked += 1
                spent.said.append(said.strip()[-MAX_SAID:])
                return found, said
        times = f"; it was asked {self._config.asks} times" if self._config.asks > 1 else ""
        raise RewardError(f"{self._name}: {problem}{times}")

    def _said(self, messages: list[dict[str, str]], form: JudgeForm, spent: Spent) -> str:
        call = Call()
        answer = self._answer(messages, form, call)
        spent.num_retried += call.num_retried
        spent.count(answer.get("usage"))
        try:
            content = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            content = None
        if not isinstance(content, str):
            raise RewardError(f"{self._name}: the server gave no message, expected choices[0].message.content")
        return content

    def _answer(self, messages: list[dict[str, str]], form: JudgeForm, call: Call) -> dict[str, Any]:
        body = self._body(messages)
        if not self._takes_format or form.schema is None:
            return self._model.ask(body, call=call)
        schema = {"name": "judgement", "strict": True, "schema": form.schema}
        told = {"type": "json_schema", "json_schema": schema}
        if self._config.response_format == "object":
            told = {"type": "json_object"}
        try:
            return self._model.ask({**body, "response_format": told}, call=call)
        except ServerRefusal as refusal:
            try:
                answer = self._model.ask(body, call=call)
            except RewardError:
                raise refusal from None
            self._takes_format = False  # the server does not know the format
            return answer

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": messages, "max_tokens": self._config.max_tokens}


class JudgeReward(Concurrent):
    """The judgement as a reward from 0 to 1; the criteria of a rubric are its parts.

    Metrics: `score` (in prose: the raw score), `orders_disagree` and `prefers_first` (in comparisons: whether the judge
    contradicts itself; 1 if it chose the first shown answer both times, -1 the last), `cached` (share of the questions
    that the cache answered), and the cost: `spent_requests`, `spent_prompt_tokens`, `spent_completion_tokens` and
    `spent_money`.
    """

    takes_base = True

    reads_tokens = False

    @dataclass(frozen=True, kw_only=True)
    class Config(JudgeConfig):
        """The settings in `[rewards.judge]`."""

        prompt: str | None = None
        """Prompt for the judge. {prompt}, {completion} and {answer} are filled in; with a rubric, {rubric}; with
        `compare_with`, {first} and {second}. Default: a question about how well the completion solves the problem."""
        rubric: tuple[JudgeCriterion, ...] = ()
        """Criteria for which the judge gives numbers, in JSON. Each becomes a part of the verdict, from 0 to 1; the
        reward is their weighted mean."""
        compare_with: str = ""
        """Text to compare the completion with, in both orders: `answer`, or a column with a baseline's answer. 1: the
        completion is better, 0: worse, 0.5: equally good, or the orders disagree."""
        pattern: str = r"(?i)score:\W*(-?\d+(?:\.\d+)?)"
        """Without rubric and comparison: a regular expression. The first group of its last match in the judge's answer
        is the score."""
        low: float = 0.0
        """The score that becomes a reward of 0. A lower score gives no reward."""
        high: float = 10.0
        """The score that becomes a reward of 1. A higher score gives no reward."""

    def __init__(self, config: Config, *, base: str = ".") -> None:
        self._form = _form(config)
        self._judge = Judge("judge", config, base=base)
        self.version = Judge.version("3", config)
        super().__init__(config.max_concurrent)

    def __call__(self, item: RewardInput) -> Score:
        spent = Spent()
        found = [self._judge.judgement(question, self._form, spent) for question in self._form.questions(item)]
        score = self._form.score(found)
        metrics = {**score.metrics, **self._judge.cost(spent)}
        return replace(score, metrics=metrics, detail="\n".join(spent.said))

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem lacks the text that the completion is compared with."""
        self._form.questions(item)


def _form(config: JudgeReward.Config) -> JudgeForm:
    if config.rubric and config.compare_with:
        raise ConfigError("rewards.judge: found a rubric and compare_with, expected one of them; name two judges")
    if config.rubric:
        return RubricForm(config.prompt, config.rubric, fenced=config.fenced)
    if config.compare_with:
        return PairForm(config.prompt, config.compare_with, fenced=config.fenced)
    return ScoreForm(config.prompt, config.pattern, config.low, config.high, fenced=config.fenced)
