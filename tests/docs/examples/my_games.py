"""A game for the host's interpreter: it imports nothing of rftstream, and may import what only that interpreter has."""

import random


class HotOrCold:
    """Tells after each guess whether it is nearer than the one before."""

    def __init__(self, config, *, problem, seed):
        self.problem = problem
        self.highest = config.get("highest", 100)
        self.tries = config.get("tries", 10)
        self.goal = random.Random(seed).randint(1, self.highest)
        self.guesses = []

    def start(self):
        return [*self.problem["messages"], {"role": "user", "content": f"Find my number, 1 to {self.highest}."}]

    def reply(self, said):
        try:
            guess = int(said["content"])
        except ValueError:
            return {"done": False, "messages": ["A number, please."], "reward": -0.1}
        self.guesses.append(guess)
        distances = [abs(one - self.goal) for one in self.guesses[-2:]]
        if distances[-1] == 0 or len(self.guesses) == self.tries:
            return {
                "done": True,
                "reward": float(distances[-1] == 0),
                "parts": {"found": float(distances[-1] == 0)},
                "metrics": {"guesses": len(self.guesses)},
            }
        return {"done": False, "messages": ["warmer" if distances[-1] < distances[0] else "colder"]}

    def save(self):
        return {"goal": self.goal, "guesses": self.guesses}

    def load(self, state):
        self.goal, self.guesses = state["goal"], state["guesses"]

    def close(self):
        print(f"{len(self.guesses)} guesses")  # to the host's log
