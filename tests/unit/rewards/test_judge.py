"""The judge, against a small server of our own: what it is asked, what its words become, and what is no score."""

import pytest

from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.judge import JudgeReward
from tests.unit.reward_inputs import reward_input


def says(text):
    return {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}]}


def usual(body):
    return says("It is fine.\nScore: 7.5")


def judge(server, **settings):
    return JudgeReward(JudgeReward.Config(**{"url": server.url, "model": "big", "tries": 2, **settings}))


def item(completion="5", answer="6"):
    return reward_input(completion, answer, prompt="2+3=", data_source="")


def test_it_reads_problem_completion_and_answer(server):
    template = "{prompt} -> {completion}, expected {answer}; {other}"
    settings = {"prompt": template, "system": "Be fair.", "api_key": "sk-secret", "fenced": False}
    score = judge(server, **settings)(item("say {answer}"))
    assert (score.reward, dict(score.metrics)) == (0.75, {"score": 7.5, "cached": 0.0, "spent_requests": 1.0})
    assert score.detail == "It is fine.\nScore: 7.5", "people see what it said"
    ((path, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("big", 0.0, 1024)
    assert body["messages"] == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "2+3= -> say {answer}, expected 6; {other}"},
    ]
    assert server.keys == ["Bearer sk-secret"]


@pytest.mark.parametrize(("text", "settings", "reward"), [
    ("Score: 0", {}, 0.0),
    ("score 3 was my first thought. **Score:** 10", {}, 1.0),
    ("Score: 2, no: Score: 4", {}, 0.4),
    ("[[-1]]", {"pattern": r"\[\[(-?\d)\]\]", "low": -1.0, "high": 1.0}, 0.0),
])  # fmt: skip
def test_scores(server, text, settings, reward):
    server.answers.append((200, says(text)))
    assert judge(server, **settings)(item()).reward == reward


@pytest.mark.law("unscorable")
@pytest.mark.parametrize(("answer", "error"), [
    ((200, says("I would rather not.")), "no score in 'I would rather not.'"),
    ((200, says("")), "no score in ''"),
    ((200, says("Score: 11")), "the score is 11, expected one from 0 to 10"),
    ((200, {"choices": [{"message": {"content": None}}]}), "gave no message"),
    ((200, {}), "gave no message"),
    ((400, {"error": "no"}), "judge: the server answered 400: no"),
])  # fmt: skip
def test_what_is_no_score(server, answer, error):
    server.answers.append(answer)
    with pytest.raises(RewardError, match=error):
        judge(server, asks=1)(item())


def test_tries_in_vain_are_counted(server, monkeypatch):
    monkeypatch.setattr("rftstream.models.server_client.PAUSE_S", 0.0)
    server.answers.append((429, {"error": "later"}))
    reward = judge(server)
    assert [reward(item(said)).metrics.get("spent_retries") for said in "56"] == [1.0, None]


def test_many_are_judged_at_once_and_each_alone(server):
    server.answers.append((200, says("?")))
    outcomes = judge(server, max_concurrent=1, asks=1).score_all([item(), item()])
    assert isinstance(outcomes[0], RewardError)
    assert outcomes[1].reward == 0.75


@pytest.mark.parametrize(("settings", "error"), [
    ({"pattern": "("}, "is no regular expression"),
    ({"pattern": "x"}, "has no group"),
    ({"low": 3.0, "high": 3.0}, "expected less than high"),
    ({"model": ""}, "rewards.judge: expected url and model"),
])  # fmt: skip
def test_settings_that_cannot_work(server, settings, error):
    with pytest.raises(ConfigError, match=error):
        judge(server, **settings)


def test_its_version_is_that_of_the_question(server):
    version = judge(server, api_key="one").version
    assert version == judge(server, api_key="two", tries=9, cache_mib=0, price_prompt=3.0).version
    assert version != judge(server, prompt="{completion}?").version
