"""examples/tools.toml: what the model is shown is what an explorer makes of the same conversation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.config.sections import MakeModel, ModelSection, RunConfig
from rftstream.contracts.tasks import Problem
from rftstream.data.demonstrations.rows import DemonstrationColumns
from rftstream.data.demonstrations.tokens import tokenise
from rftstream.environments.tools import ToolEnvironment
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import HfRenderer
from rftstream.models.splice import Conversation

ROOT = Path(__file__).parents[3]
CALL, END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return loader.load([ROOT / "examples" / "tools.toml"], env={})


@pytest.fixture(scope="module")
def renderer(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> HfRenderer:
    return HfRenderer(prepare_model(config.model, tmp_path_factory.mktemp("made") / "model", 0))


def test_words_are_tokens_and_characters_are_others(renderer: HfRenderer) -> None:
    ids = renderer.encode(f"{CALL}5+7{END}12")
    assert len(ids) == 7
    assert renderer.decode(ids) == f"{CALL}5+7{END}12"


@pytest.mark.parametrize("words", [("a",), ("<eos>",), ("ab", "ab")])
def test_words_that_cannot_be(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.make\.words: got"):
        prepare_model(ModelSection(make=MakeModel(words=words)), tmp_path / "model", 0)


def test_a_rollout_has_the_tokens_of_the_demonstration(config: RunConfig, renderer: HfRenderer) -> None:
    row = json.loads((ROOT / "examples" / "tool_demonstrations.jsonl").read_text().splitlines()[0])
    demonstration = DemonstrationColumns({}, system=None, source="t").demonstration(row, "row 1")
    (shown,) = tokenise(demonstration, renderer)[None]
    question, *_, answer = (message.content for message in demonstration.messages)

    _, options = config.build_part("environment", "tools")
    user = demonstration.messages[:1]
    environment = ToolEnvironment(options, problem=Problem(messages=user, answer=answer), seed=0)
    tools = tuple(asyncio.run(environment.tools()))
    tokens = [*renderer.render(user, tools)]
    said = [*renderer.encode(f"{CALL}{question.rstrip('=')}{END}"), *renderer.stop_token_ids]
    message = renderer.parse(tokens, said, tools=tools, finish_reason="stop", turn=0)
    assert message.tool_calls[0].arguments == {"expression": question.rstrip("=")}
    reply = asyncio.run(environment.reply(message))
    assert [message.content for message in reply.messages] == [answer]

    before = Conversation(messages=user, tools=tools)
    now = Conversation(messages=(*user, renderer.as_chat_message(message, said), *reply.messages), tools=tools)
    more = renderer.continue_prompt([*tokens, *said], len(said), before, now)
    assert more.break_reason is None
    tokens += [*said, *more.token_ids]
    last = [*renderer.encode(answer), *renderer.stop_token_ids]
    assert shown.token_ids.numpy().tolist() == [*tokens, *last]
    spoken = renderer.parse(tokens, last, tools=tools, finish_reason="stop", turn=1)
    assert (spoken.content, spoken.tool_calls) == (answer, ())
    assert asyncio.run(environment.reply(spoken)).done
