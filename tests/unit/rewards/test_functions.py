"""Functions with the signatures of verl and TRL, over lists, with metrics; and what one bad rollout does to others."""

from __future__ import annotations

import asyncio
import socket
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.config.sections import RunConfig
from rftstream.contracts.tasks import RolloutIds
from rftstream.data.tasksets.columns import Columns, TableConfig
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.arguments import find_convention
from rftstream.rewards.base import RewardInput, Score, ScoreRequest, TokenSegment
from rftstream.rewards.child import score_items
from rftstream.rewards.event_loop import run_together
from rftstream.rewards.functions import FunctionReward
from rftstream.rewards.queue import Pending
from rftstream.rewards.resolve import build_reward
from rftstream.rewards.scorer import InlineScorer
from rftstream.roles.verifier.step import reward_input
from tests.configs import small_run
from tests.loopback import Asked, HttpServer
from tests.suite.each import each
from tests.unit.synthetic import rollout


def item(completion: str, answer: str | None = "7", *, system: str | None = None, **info: Any) -> RewardInput:
    prompt = [{"role": "user", "content": "3+4="}]
    if system is not None:
        prompt.insert(0, {"role": "system", "content": system})
    return RewardInput(
        completion=completion, answer=answer, prompt="3+4=",
        messages=(*prompt, {"role": "assistant", "content": completion}), num_prompt_messages=len(prompt),
        info=info, data_source="sums", num_tokens=2, truncated=False, segments=(
            TokenSegment(token_data=np.asarray([9, 5, 6], "<i4").tobytes(), mask_data=b"\0\1\1",
                         logprob_data=np.zeros(3, "<f4").tobytes()),
        ),
    )  # fmt: skip


def reward_of(function: Callable[..., Any], options: Mapping[str, Any] | None = None, **more: Any) -> FunctionReward:
    return FunctionReward(function, options or {}, where="score", **more)


def verdicts(reward: Any, items: Sequence[RewardInput]) -> list[Any]:
    """Rewards, or the details of what has none."""
    return verdicts_of(composite(reward), items)


def verdicts_of(reward: Any, items: Sequence[RewardInput]) -> list[Any]:
    return [score.reward if score is not None else detail for score, _, detail, _ in score_items(reward, items)]


class Unspeakable(Exception):
    """An error that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError

    __str__ = __repr__


def composite(*functions: Any, weights: Sequence[float] = ()) -> Any:
    """A weighted sum of functions, as the run file names them."""
    module = types.ModuleType("functions_of_a_test")
    sys.modules[module.__name__] = module
    for number, function in enumerate(functions):
        setattr(module, f"f{number}", function)
    weights = weights or [1.0] * len(functions)
    spec = [{"name": f"{module.__name__}:f{number}", "weight": weight} for number, weight in enumerate(weights)]
    config = config_of(spec)
    return build_reward(config.tasksets["train"].reward, config)


def config_of(reward: Any, **more: Any) -> RunConfig:
    return small_run(tasksets={"train": {"source": "arithmetic", "reward": reward, **more}})


# ------------------------------------------------------------------------------------------------ which it is


@each(
    ("names", "convention"),
    [
        (["data_source", "solution_str", "ground_truth", "extra_info"], "verl"),
        (["solution_str"], "verl"),
        (["data_sources", "solution_strs", "ground_truths", "extra_infos"], "verl batch"),
        (["prompts", "completions", "completion_ids"], "TRL"),
        (["completions"], "TRL"),
        (["prompts"], "TRL"),
        (["environments"], "TRL"),
        (["completion", "answer"], "ours"),
        (["completion", "prompts"], "ours"),
        (["item"], "ours"),
    ],
)
def test_the_signature_says_whose_it_is(names: list[str], convention: str) -> None:
    assert find_convention(names) == convention


# ------------------------------------------------------------------------------------------------ verl


def test_verl_gets_its_four() -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        seen.update(locals())
        return {"score": 0.5, "acc": True, "pred": "8", "length": np.float32(3)}

    score = reward_of(compute_score, {"strict": True})(item("8", level=3))
    assert score == Score(reward=0.5, metrics={"acc": 1.0, "length": 3.0})
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"]) == ("sums", "8", "7")
    assert seen["extra_info"] == {"level": 3, "num_turns": 2}
    assert seen["kwargs"] == {"strict": True}


def test_verl_reads_its_own_data_sets() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str in ground_truth) + extra_info["index"]

    columns = {"reward_model": {"style": "rule", "ground_truth": ["7", "seven"]}, "extra_info": {"index": 4}}
    assert reward_of(compute_score)(item("seven", None, **columns)).reward == 5.0


def test_verl_may_be_async_and_takes_few_of_them() -> None:
    async def compute_score(solution_str, ground_truth):
        return solution_str == ground_truth

    reward = reward_of(compute_score)
    assert reward.batched
    assert [one.reward for one in reward.score_all([item("7"), item("8"), item("7")])] == [1.0, 0.0, 1.0]


def test_verl_without_a_score() -> None:
    with pytest.raises(RewardError, match=r"dict with \['acc', 'reward'\], expected 'score' in it"):
        reward_of(lambda solution_str: {"acc": 1, "reward": 1})(item("7"))


def test_verl_over_lists() -> None:
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1):
        assert extra_infos[0] == {"level": 1, "num_turns": 2}
        return [{"score": scale * float(a == b), "n": len(data_sources)}
                for a, b in zip(solution_strs, ground_truths, strict=True)]  # fmt: skip

    found = reward_of(compute_score, {"scale": 2}).score_all([item("7", level=1), item("8", level=2)])
    assert found == [Score(reward=2.0, metrics={"n": 2.0}), Score(reward=0.0, metrics={"n": 2.0})]


# ------------------------------------------------------------------------------------------------ TRL


def test_trl_gets_lists_of_texts_and_columns() -> None:
    seen: dict[str, Any] = {}

    def score(prompts, completions, completion_ids=None, **columns):
        seen.update(locals())
        return [float(len(text)) for text in completions]

    found = reward_of(score, {"scale": 2}).score_all([item("7", level=1), item("88")])
    assert [one.reward for one in found] == [1.0, 2.0]
    assert (seen["prompts"], seen["completions"]) == (["3+4=", "3+4="], ["7", "88"])
    assert seen["completion_ids"] == [[5, 6], [5, 6]]
    columns = seen["columns"]
    assert (columns["answer"], columns["level"], columns["scale"]) == (["7", "7"], [1, None], 2)


def test_trl_gets_messages_where_the_dataset_has_them() -> None:
    def score(prompts, completions):
        assert [message["role"] for message in prompts[0]] == ["user"]
        return [len(said[0]["content"]) for said in completions]

    assert reward_of(score, conversational=True)(item("777")).reward == 3.0
    config = config_of("exact")
    section = config_of("exact", columns={"messages": "prompt"}).tasksets["train"]
    module = types.ModuleType("conversation_of_a_test")
    sys.modules[module.__name__] = module
    module.score = score  # type: ignore[attr-defined]
    assert build_reward(f"{module.__name__}:score", config, section=section)(item("77")).reward == 2.0


def test_a_problem_of_several_messages_is_a_conversation() -> None:
    def score(completions):
        return [len(one) if isinstance(one, str) else 10 * len(one) for one in completions]

    found = reward_of(score).score_all([item("777"), item("7", system="Add."), item("77")])
    assert [one.reward for one in found] == [3.0, 10.0, 2.0]


def test_one_that_expects_messages_and_got_texts_is_told_how_to_get_them() -> None:
    def score(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    (failed,) = reward_of(score).score_all([item("777")])
    assert isinstance(failed, RewardError)
    assert "TypeError" in str(failed)
    assert 'if it expects messages, set columns = { messages = "prompt" }' in str(failed)
    assert isinstance(failed.__cause__, TypeError)
    (fine,) = reward_of(score, conversational=True).score_all([item("777")])
    assert isinstance(fine, Score)


def test_columns_go_by_the_names_of_the_data_set_too() -> None:
    def score(completions, solution):
        return [a == b for a, b in zip(completions, solution, strict=True)]

    assert reward_of(score, columns={"answer": "solution"})(item("7")).reward == 1.0
    assert reward_of(lambda completion, solution: completion == solution, columns={"answer": "solution"})(
        item("7")
    ) == Score(reward=1.0)
    asked = reward_of(lambda completion, word: completion == word[0], columns={"prompt": "word", "answer": "next"})
    assert asked(item("3")) == Score(reward=1.0)
    given = reward_of(lambda completions, **rest: [float(rest["word"] == ["3+4="])], columns={"prompt": "word"})
    assert given(item("3")).reward == 1.0


def test_trl_logs_become_metrics() -> None:
    def score(completions, log_metric=None, log_extra=None):
        for value in (0.0, 0.5):
            log_metric("share", np.float32(value))
        log_extra("length", [len(text) for text in completions])
        log_extra("text", completions)
        return [1.0] * len(completions)

    found = reward_of(score).score_all([item("7"), item("77")])
    assert [one.metrics for one in found] == [{"share": 0.25, "length": 1.0}, {"share": 0.25, "length": 2.0}]


def test_what_is_logged_is_checked_like_what_is_returned() -> None:
    def score(completions, log_metric):
        log_metric("share", float("nan"))
        return [1.0] * len(completions)

    assert "metric 'share': got nan" in verdicts(score, [item("7"), item("8")])[0]


def test_trl_may_be_async_and_return_arrays() -> None:
    async def one(completions):
        return torch.tensor([0.5] * len(completions))

    assert [x.reward for x in reward_of(one).score_all([item("7"), item("8")])] == [0.5, 0.5]
    assert reward_of(lambda completions: np.ones(len(completions)))(item("7")).reward == 1.0


def test_trl_gets_an_answer_that_is_a_number_as_one_and_no_call_that_could_not_be_read() -> None:
    def same(completions, gold, answer):
        calls = [call["function"]["arguments"]["a"] for one in completions[0] for call in one.get("tool_calls", ())]
        return [float(gold[0] == answer[0] == 20 and calls == [3])]

    calls = [{"id": "0", "type": "function", "function": {"name": "f", "arguments": one}} for one in ("{", {"a": 3})]
    columns = Columns({"answer": "gold"}, system=None, config=TableConfig(), data_source="x")
    problem = columns.problem({"prompt": "p", "gold": 20}, "row 0")
    said = item("f", answer=problem.answer, **problem.info)
    said = replace(said, messages=(*said.messages[:1], {"role": "assistant", "content": "", "tool_calls": calls}))
    assert reward_of(same, columns={"answer": "gold"}, conversational=True)(said).reward == 1.0


def test_what_only_trl_has_is_said_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="score: needs trainer_state, which only TRL's trainer has"):
        reward_of(lambda completions, trainer_state: [])
    reward_of(lambda completions, trainer_state=None: [])


# ------------------------------------------------------------------------------------------------ None


def even(completions):
    return [1.0 if int(text) % 2 == 0 else None for text in completions]


def length(completion):
    return len(completion)


def test_a_part_that_does_not_apply_is_left_out_of_the_sum() -> None:
    found = composite(even, length, weights=[2.0, 0.5]).score_all([item("8"), item("77")])
    assert [one.reward for one in found] == [2.5, 1.0]
    assert [one.parts for one in found] == [{"f0": 1.0, "f1": 1.0}, {"f1": 2.0}]


def test_where_nothing_applies_there_is_no_reward() -> None:
    scores = score_items(composite(even), [item("8"), item("7")])
    assert scores[0][0] == Score(reward=1.0, parts={"f0": 1.0})
    assert scores[1][:2] == (None, "error")
    assert "no reward applies to this rollout" in scores[1][2]


# ------------------------------------------------------------------------------------------------ what they return


@each(
    ("value", "reward"),
    [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.int64(2), 2.0), (np.array(0.25), 0.25),
     (torch.tensor(0.75), 0.75), (torch.tensor(True), 1.0)],
)  # fmt: skip
def test_numbers(value: Any, reward: float) -> None:
    assert reward_of(lambda completion: value)(item("7")) == Score(reward=reward)
    assert reward_of(lambda completions: [value])(item("7")) == Score(reward=reward)
    pair = reward_of(lambda completion: (value, {"m": value, "text": "x"}))(item("7"))
    assert pair == Score(reward=reward, metrics={"m": reward})


@each(
    ("value", "detail"),
    [("1.0", "got '1.0'"), (float("nan"), "got nan"), (float("inf"), "got inf"), ([1.0], "got list"),
     (10**400, "got inf"), (np.array([1.0]), "got ndarray"), (torch.tensor(float("nan")), "got nan"), ({}, "a dict"),
     ((1.0, 2.0), "got tuple")],
)  # fmt: skip
def test_what_is_no_number_is_never_zero(value: Any, detail: str) -> None:
    assert detail in verdicts(lambda completion: value, [item("7")])[0]
    found = verdicts(lambda completions: [1.0 if text == "7" else value for text in completions],
                     [item("7"), item("8"), item("7")])  # fmt: skip
    assert (found[0], found[2]) == (1.0, 1.0)
    assert detail in found[1]


@each("value", [None, 1.0, "11", {"score": 1}, [], [1.0] * 3])
def test_a_wrong_list_spoils_all(value: Any) -> None:
    found = verdicts(lambda completions: value, [item("7"), item("8")])
    assert all("expected" in one for one in found)


# ------------------------------------------------------------------------------------------------ one bad rollout


def test_one_that_raises_does_not_spoil_the_others() -> None:
    calls: list[int] = []

    def score(completions):
        calls.append(len(completions))
        return [float(text) for text in completions]

    found = verdicts(score, [item("1"), item("two"), item("3")])
    assert (found[0], found[2]) == (1.0, 3.0)
    assert "could not convert string to float" in found[1]
    assert calls == [3, 1, 1, 1]


def test_one_that_exits_does_not_spoil_the_others() -> None:
    def score(solution_strs):
        return [float(text) if text != "x" else sys.exit("y" * 10_000) for text in solution_strs]

    found = verdicts(score, [item("1"), item("x")])
    assert found[0] == 1.0
    assert found[1].startswith("the reward called sys.exit('yyy")
    assert len(found[1]) < 3000


def test_one_without_the_column_does_not_spoil_the_others() -> None:
    found = verdicts(lambda completions, level: level, [item("1", level=4), item("1")])
    assert found[0] == 4.0
    assert "needs level, but the problem has only" in found[1]


def test_async_ones_run_together_and_fail_alone() -> None:
    begun: list[str] = []

    async def score(completion):
        begun.append(completion)
        await asyncio.sleep(0)
        return float(completion) + len(begun)

    found = verdicts(score, [item("1"), item("two"), item("3")])
    assert (found[0], found[2]) == (4.0, 6.0)
    assert "could not convert" in found[1]


@pytest.mark.parametrize("shape", ["one", "list"])
def test_sessions_that_async_ones_keep_work_over_waves(shape: str) -> None:
    """The server closes each connection after its second answer, mostly between two waves."""

    def answer(asked: Asked) -> bytes:
        if [one.connection for one in server.asked].count(asked.connection) == 2:
            asked.connection.shutdown(socket.SHUT_RD)
        return asked.body

    with HttpServer(answer) as server:
        client = httpx.AsyncClient(trust_env=False, timeout=120)

        async def ask(text: str) -> float:
            return float((await client.post(server.url, content=text)).text)

        async def score(completion):
            return await ask(completion)

        async def score_list(completions):
            return await asyncio.gather(*map(ask, completions))

        reward = composite(score if shape == "one" else score_list)
        waves = [verdicts_of(reward, [item(str(number)) for number in range(4)]) for _ in range(3)]
        run_together([client.aclose()])
    assert waves == [[0.0, 1.0, 2.0, 3.0]] * 3


@each("shape", ["one", "async", "list", "async list"])
@each("raised", [asyncio.CancelledError, GeneratorExit, BaseException, SystemExit, Unspeakable])
def test_nothing_that_a_reward_raises_ends_the_process(raised: type[BaseException], shape: str) -> None:
    def judge(text: str) -> float:
        if text == "x":
            raise raised
        return float(text)

    async def cancelled(text: str) -> float:
        if text == "x" and raised is asyncio.CancelledError:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0)
        return judge(text)

    async def score(completion):
        return await cancelled(completion)

    async def score_list(completions):
        return [await cancelled(text) for text in completions]

    functions = {"one": lambda completion: judge(completion), "async": score,
                 "list": lambda completions: list(map(judge, completions)), "async list": score_list}  # fmt: skip
    found = verdicts(functions[shape], [item("1"), item("x"), item("3")])
    assert (found[0], isinstance(found[1], str), found[2]) == (1.0, True, 3.0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["1", "2", "x", "exit", "none", "nan"]), min_size=1, max_size=8))
def test_a_batch_says_what_each_alone_would(texts: list[str]) -> None:
    def score(completions):
        values: list[Any] = []
        for text in completions:
            if text == "exit":
                sys.exit(1)
            values.append({"none": None, "nan": float("nan")}.get(text) if text in ("none", "nan") else float(text))
        return values

    reward = composite(score)
    together = score_items(reward, [item(text) for text in texts])
    alone = [score_items(reward, [item(text)])[0] for text in texts]
    assert [one[:2] for one in together] == [one[:2] for one in alone]


# ------------------------------------------------------------------------------------------------ the scorer's side


def test_what_waits_comes_as_one_batch_up_to_the_limit() -> None:
    sizes: list[int] = []

    def score(completions):
        sizes.append(len(completions))
        return [1.0] * len(completions)

    composite(score)
    config = small_run(
        verifier={"max_batch": 4}, tasksets={"train": {"source": "arithmetic", "reward": "functions_of_a_test:f0"}},
    )  # fmt: skip
    scorer = InlineScorer(config)
    for number in range(10):
        scorer.submit(ScoreRequest(request_id=str(number), taskset="train", item=item("7")))
    assert [reply.request_id for reply in scorer.poll()] == [str(number) for number in range(10)]
    assert sizes == [4, 4, 2]


def test_the_verifier_hands_over_tokens_and_where_the_prompt_ends() -> None:
    ids = RolloutIds(rollout_id="sums/0/0/0/0", group_id="sums/0/0/0", taskset="sums", sibling=0, group_size=1,
                     sequence=0, min_version=0)  # fmt: skip
    found = reward_input(rollout(ids, num_tokens=2))
    assert (found.completion_ids, found.num_prompt_messages) == ([3, 4], 1)


def score_text(completion: str, gold: str = "") -> float:
    return 1.0


def score_rollout(rollout: RewardInput) -> float:
    return 1.0


def score_ids(completion: str, completion_ids: list[int]) -> float:
    return 1.0


def test_only_rewards_that_read_tokens_get_them() -> None:
    for function, reads in ((score_text, False), (score_rollout, True), (score_ids, True)):
        assert FunctionReward(function, {}, where="f").reads_tokens is reads, function.__name__
    pending = Pending(number=0, requests=(ScoreRequest(request_id="0", taskset="train", item=item("7")),))
    assert pending.score_item().inputs[0].segments
    assert pending.score_item(with_tokens=False).inputs[0].segments == ()
