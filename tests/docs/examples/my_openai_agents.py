"""An agent of the OpenAI Agents SDK, as it comes. It runs in an interpreter that has `openai-agents`."""

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

set_tracing_disabled(True)  # or traces go to api.openai.com
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def solve(problem, base_url, api_key, seed, options):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = MODELS[options["api"]](model="policy", openai_client=client)
        agent = Agent(name="adder", instructions="Use the tool add.", tools=[add], model=model)
        try:
            result = await Runner.run(agent, problem["messages"][-1]["content"], max_turns=4)
        except MaxTurnsExceeded:
            return 0.0  # else the rollout would be a failed one
    usage = result.context_wrapper.usage
    return {
        "reward": float(result.final_output.strip() == problem["answer"]),
        "metrics": {"requests": usage.requests, "output_tokens": usage.output_tokens},
    }
