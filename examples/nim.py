"""Nim, played by one policy in both seats: two players take 1 to 3 stones in turn, and who takes the last one wins.

Agents for `hosted_agent`: the run file nim.toml names `play`, and for its evaluation `against_perfect`."""

import asyncio
import json
import random
import urllib.request

MOST = 3
"""Most stones that a player may take at once."""
SEATS = ("first", "second")
"""Who moves first and who answers: the roles."""


def perfect(pile, rng):
    """Return a move that leaves a multiple of four, or any move where there is none."""
    return pile % (MOST + 1) or rng.randint(1, min(MOST, pile))


def stones(said, pile):
    """Return how many stones an answer takes; 0 if that is no move."""
    return int(said) if said.isdecimal() and len(said) == 1 and 1 <= int(said) <= min(MOST, pile) else 0


async def play(problem, base_url, api_key, seed):
    """Play one game. The policy sees the pile alone, so each move is a conversation of its own."""
    pile, seat, moves = int(problem["messages"][-1]["content"]), 0, 0
    while True:
        taken = stones(await ask(base_url, api_key, pile, SEATS[seat]), pile)
        pile, moves = pile - taken, moves + 1
        if not taken or not pile:
            winner = SEATS[seat if taken else 1 - seat]
            rewards = {name: 1.0 if name == winner else -1.0 for name in SEATS}
            played = {name: rewards[name] for name in SEATS[: min(moves, 2)]}
            return {"roles": played, "metrics": {"moves": moves, "no_move": float(not taken)}}
        seat = 1 - seat


async def against_perfect(problem, base_url, api_key, seed):
    """Play the seat that can win against a player who makes no mistake; the reward is 1 for a win."""
    pile, rng = int(problem["messages"][-1]["content"]), random.Random(seed)
    if pile % (MOST + 1) == 0:
        pile -= perfect(pile, rng)
    while True:
        taken = stones(await ask(base_url, api_key, pile), pile)
        pile -= taken
        if not taken or not pile:
            return float(taken > 0)
        pile -= perfect(pile, rng)
        if not pile:
            return 0.0


async def ask(base_url, api_key, pile, role=""):
    """Return what the policy says when it sees this pile. The role is in the name of the model."""
    model = f"policy:{role}" if role else "policy"
    body = {"model": model, "messages": [{"role": "user", "content": f"{pile}="}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)

    def send():
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    answer = await asyncio.to_thread(send)
    return answer["choices"][0]["message"]["content"].strip()
