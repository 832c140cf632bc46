"""An agent of smolagents, as it comes. It runs in an interpreter that has `smolagents[openai]`."""

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def solve(problem, base_url, api_key, seed):
    """smolagents blocks, so this is a plain function; each of its runs has a thread."""
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(
        tools=[add], model=model, max_steps=4, return_full_result=True, verbosity_level=LogLevel.OFF
    )
    result = agent.run(problem["messages"][-1]["content"])
    return {
        "reward": float(str(result.output).strip() == problem["answer"]),
        "metrics": {"steps": len(result.steps), "output_tokens": agent.monitor.total_output_token_count},
    }
