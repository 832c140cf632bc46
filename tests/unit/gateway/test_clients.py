"""The real clients against the gateway: their own types read what the dialects write.

They are imported by the tests that use them: they take seconds, and every process of a run of pytest imports this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import DIALECTS
from rftstream.roles.explorer.model_calls import ModelCall, Refusal
from tests.unit.gateway.answering import ROLLOUT, Answering, a_call, answering, said

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = pytest.mark.slow  # the clients take seconds to import

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def says(call: ModelCall) -> AssistantMessage:
    """Call the tool once if there is one, else answer with what was said last."""
    last = call.messages[-1]
    if last.role == "tool":
        return said(f"it is {last.content}", reasoning="so the tool said")
    if call.tools:
        return said("let me look", tool_calls=(a_call("weather", city="Köln", hot=True),))
    if last.content == "long":
        return said("and so on", finish_reason="length")
    return said(f"you said {last.content}")


@pytest.fixture
def scene() -> Iterator[Answering]:
    with answering(says) as scene:
        yield scene


@pytest.fixture
def client(scene: Answering) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=scene.base_url, api_key=scene.key) as client:
        yield client


@pytest.fixture
def claude(scene: Answering) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=scene.base_url, api_key=scene.key) as client:
        yield client


# --------------------------------------------------------------------------------------------- chat completions

CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}]


def test_chat(scene: Answering, client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="m",
        messages=[{"role": "developer", "content": "be short"}, {"role": "user", "content": "hi"}],
        temperature=0.3,
        max_tokens=40,
        seed=3,
    )
    assert found.choices[0].message.content == "you said hi"
    assert found.choices[0].finish_reason == "stop"
    assert (found.id, found.model) == (f"chatcmpl-{ROLLOUT}/call/0", "m")
    assert found.usage is not None and found.usage.total_tokens == 10
    (call,) = scene.calls
    assert call.messages == (
        ChatMessage(role="system", content="be short"),
        ChatMessage(role="user", content="hi"),
    )
    assert call.asked == {"temperature": 0.3, "max_tokens": 40, "seed": 3}
    assert call.max_tokens == 40


def test_chat_with_tools(scene: Answering, client: openai.OpenAI) -> None:
    history: list = [{"role": "user", "content": "weather?"}]
    found = client.chat.completions.create(model="m", messages=history, tools=CHAT_TOOLS, tool_choice="required")
    choice = found.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (tool_call,) = choice.message.tool_calls
    assert (tool_call.function.name, json.loads(tool_call.function.arguments)) == (
        "weather",
        {"city": "Köln", "hot": True},
    )
    history += [choice.message.model_dump(), {"role": "tool", "tool_call_id": tool_call.id, "content": "wet"}]
    found = client.chat.completions.create(model="m", messages=history, tools=CHAT_TOOLS)
    assert found.choices[0].message.content == "it is wet"
    assert found.choices[0].message.model_extra == {"reasoning_content": "so the tool said"}
    first, second = scene.calls
    assert first.tools == second.tools and first.tools[0]["function"]["parameters"] == WEATHER
    assert second.messages[1].content == "let me look"
    assert second.messages[1].tool_calls[0]["function"]["arguments"] == {"city": "Köln", "hot": True}
    assert [message.role for message in second.messages] == ["user", "assistant", "tool"]


def test_chat_in_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "weather?"}],
            tools=CHAT_TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert text == "let me look"
    assert json.loads(arguments) == {"city": "Köln", "hot": True}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3


def test_the_helper_for_streams_puts_the_same_message_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="m", messages=[{"role": "user", "content": "weather?"}], tools=CHAT_TOOLS
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message
    whole = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "weather?"}], tools=CHAT_TOOLS
    )
    assert streamed.tool_calls is not None and whole.choices[0].message.tool_calls is not None
    assert streamed.content == whole.choices[0].message.content
    assert streamed.tool_calls[0].function.arguments == whole.choices[0].message.tool_calls[0].function.arguments


def test_a_limit_is_told(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "long"}])
    assert chat.choices[0].finish_reason == "length"
    response = client.responses.create(model="m", input="long")
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    message = claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "long"}])
    assert message.stop_reason == "max_tokens"


# --------------------------------------------------------------------------------------------- responses

TOOLS = [{"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER, "strict": True}]


def test_responses(scene: Answering, client: openai.OpenAI) -> None:
    found = client.responses.create(model="m", instructions="be short", input="hi", max_output_tokens=30)
    assert found.output_text == "you said hi" and found.status == "completed"
    assert found.usage is not None and found.usage.output_tokens == 3
    (call,) = scene.calls
    assert [(one.role, one.content) for one in call.messages] == [("system", "be short"), ("user", "hi")]


def test_responses_with_tools(scene: Answering, client: openai.OpenAI) -> None:
    history: list = [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}]
    found = client.responses.create(model="m", input=history, tools=TOOLS)
    text, tool_call = found.output
    assert tool_call.type == "function_call" and json.loads(tool_call.arguments) == {"city": "Köln", "hot": True}
    history += [text, tool_call]
    history.append({"type": "function_call_output", "call_id": tool_call.call_id, "output": "wet"})
    found = client.responses.create(model="m", input=history, tools=TOOLS)
    assert found.output_text == "it is wet"
    assert found.output[0].type == "reasoning" and found.output[0].content is not None
    assert found.output[0].content[0].text == "so the tool said"
    history += found.output
    history.append({"role": "user", "content": "thanks"})
    client.responses.create(model="m", input=history)
    messages = scene.calls[-1].messages
    assert [one.role for one in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[1].content == "let me look" and len(messages[1].tool_calls) == 1


def test_responses_in_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="m", input="weather?", tools=TOOLS, stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "let me look"
    assert events[-1].type == "response.completed" and len(events[-1].response.output) == 2
    with client.responses.stream(model="m", input="weather?", tools=TOOLS) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == "let me look"


# --------------------------------------------------------------------------------------------- Anthropic

CLAUDE_TOOLS = [{"name": "weather", "description": "of a city", "input_schema": WEATHER}]


def test_messages(scene: Answering, claude: anthropic.Anthropic) -> None:
    found = claude.messages.create(
        model="m",
        max_tokens=99,
        system=[{"type": "text", "text": "be short"}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        stop_sequences=["END"],
    )
    assert found.content[0].type == "text" and found.content[0].text == "you said hi"
    assert (found.stop_reason, found.usage.input_tokens) == ("end_turn", 7)
    (call,) = scene.calls
    assert [(one.role, one.content) for one in call.messages] == [("system", "be short"), ("user", "hi")]
    assert call.asked == {"max_tokens": 99, "stop_sequences": ["END"]}


def test_messages_with_tools(scene: Answering, claude: anthropic.Anthropic) -> None:
    history: list = [{"role": "user", "content": "weather?"}]
    found = claude.messages.create(model="m", max_tokens=99, messages=history, tools=CLAUDE_TOOLS)
    tool_use = found.content[1]
    assert found.stop_reason == "tool_use"
    assert tool_use.type == "tool_use" and tool_use.input == {"city": "Köln", "hot": True}
    result = {"type": "tool_result", "tool_use_id": tool_use.id, "content": [{"type": "text", "text": "wet"}]}
    history += [{"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    found = claude.messages.create(model="m", max_tokens=99, messages=history, tools=CLAUDE_TOOLS)
    assert [block.type for block in found.content] == ["thinking", "text"]
    history += [{"role": "assistant", "content": found.content}, {"role": "user", "content": "thanks"}]
    claude.messages.create(model="m", max_tokens=99, messages=history)
    assert [one.role for one in scene.calls[-1].messages] == ["user", "assistant", "tool", "assistant", "user"]


def test_messages_in_a_stream(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(
        model="m", max_tokens=99, messages=[{"role": "user", "content": "weather?"}], tools=CLAUDE_TOOLS
    )
    with claude.messages.stream(
        model="m", max_tokens=99, messages=[{"role": "user", "content": "weather?"}], tools=CLAUDE_TOOLS
    ) as stream:
        assert "".join(stream.text_stream) == "let me look"
        found = stream.get_final_message()
    assert [block.model_dump() for block in found.content] == [block.model_dump() for block in whole.content]
    assert found.usage == whole.usage and found.stop_reason == "tool_use"


# --------------------------------------------------------------------------------------------- the same in all


def test_one_conversation_is_the_same_in_every_dialect(
    scene: Answering, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """So a served message is recognized in the dialect that it was served in, and calls are told apart by what they
    say."""
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "weather?"}], tools=CHAT_TOOLS)
    client.responses.create(model="m", input="weather?", tools=TOOLS)
    claude.messages.create(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "weather?"}], tools=CLAUDE_TOOLS
    )
    assert all(call.messages == scene.calls[0].messages for call in scene.calls)
    assert all(call.tools == scene.calls[0].tools for call in scene.calls)
    assert len({call.digest for call in scene.calls}) == 3


def test_the_list_of_models() -> None:
    import anthropic
    import openai

    with (
        answering(says, model="qwen") as scene,
        openai.OpenAI(base_url=scene.base_url, api_key=scene.key) as client,
        anthropic.Anthropic(base_url=scene.base_url, api_key=scene.key) as claude,
    ):
        assert [model.id for model in client.models.list()] == ["qwen"]
        assert client.models.retrieve("qwen").owned_by == "rftstream"
        assert client.models.retrieve("policy").id == "policy"
        assert [model.id for model in claude.models.list()] == ["qwen"]
        with pytest.raises(openai.NotFoundError, match="got the model 'gpt', expected 'qwen' or 'policy'"):
            client.models.retrieve("gpt")


def test_every_setting_of_the_clients_has_a_line_in_the_tables() -> None:
    from anthropic.types import beta, message_create_params
    from openai.types.chat import completion_create_params
    from openai.types.responses import response_create_params

    bases = {
        "chat/completions": [completion_create_params.CompletionCreateParamsBase],
        "responses": [response_create_params.ResponseCreateParamsBase],
        "messages": [
            message_create_params.MessageCreateParamsBase,
            beta.message_create_params.MessageCreateParamsBase,
        ],
    }
    for path, params in bases.items():
        known = {name.partition(".")[0] for name in DIALECTS[path].settings}
        assert {name for base in params for name in base.__annotations__} <= known, path


def test_tokens_are_counted_before_a_call(scene: Answering, claude: anthropic.Anthropic) -> None:
    import anthropic

    messages: list = [{"role": "user", "content": "weather?"}]
    assert claude.messages.count_tokens(model="m", messages=messages, tools=CLAUDE_TOOLS).input_tokens == 8
    assert not scene.calls
    with pytest.raises(anthropic.BadRequestError, match="messages: got none"):
        claude.messages.count_tokens(model="m", messages=[])


def test_refusals_are_the_clients_own_errors(
    scene: Answering, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    import anthropic
    import openai

    statuses = iter((409, 400, 409, 429))
    scene.answer = lambda request: Refusal(status=next(statuses), sentence="because")
    with pytest.raises(openai.ConflictError, match="because"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="because"):
        client.responses.create(model="m", input="hi", stream=True)
    with pytest.raises(anthropic.ConflictError, match="because"):
        claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(anthropic.RateLimitError, match="because"):
        claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])


def test_clients_try_again_what_passes(scene: Answering, client: openai.OpenAI) -> None:
    refusals = iter((Refusal(status=503, sentence="moving", retry_after_s=0.01),))
    scene.answer = lambda request: next(refusals, None)
    found = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert found.choices[0].message.content == "you said hi"
    (call,) = scene.calls
    assert call.is_retry


def test_a_wrong_key_is_told(scene: Answering) -> None:
    import openai

    for wrong in ("", "sk-none", scene.key[:-1], scene.key.replace(".", ".0"), scene.keys.session_token()):
        with (
            openai.OpenAI(base_url=scene.base_url, api_key=wrong or "x", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="the key is of no rollout"),
        ):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert not scene.calls
