"""An agent for the host's interpreter. It makes as many model calls as it likes, and returns a reward."""

import asyncio
import json
import urllib.request


async def draft_and_check(problem, base_url, api_key, seed):
    question = problem["messages"][-1]["content"]
    draft = await ask(base_url, api_key, [{"role": "user", "content": question}])
    check = f"{question}\n\nSomebody says: {draft}\n\nIs that right? Answer with the right number alone."
    answer = await ask(base_url, api_key, [{"role": "user", "content": check}])
    return {
        "reward": float(answer.strip() == problem["answer"]),
        "parts": {"draft": float(problem["answer"] in draft)},
    }


async def ask(base_url, api_key, messages):
    """Any client will do: openai, a framework for agents, or this."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )

    def send():
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    answer = await asyncio.to_thread(send)
    return answer["choices"][0]["message"]["content"]
