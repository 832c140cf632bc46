"""Environments of the package gymnasium, played in text. `target = "gymnasium"`; one step for each turn.

Options, also those of a single problem in its `info.options`:

    id              name of the environment, as `FrozenLake-v1`; with a module before a colon, that is imported first.
                    Or `module:Class` of one that is not registered
    settings        what `gymnasium.make` or the class gets besides
    wrappers        `module:Class` of wrappers, the innermost first
    instructions    text before the first observation
    actions         names of the discrete actions, in their order; without them actions are numbers
    show            "observation"; "render" for the text picture of environments that have one; or a list of entries of
                    the step's `info`
    most_invalid    replies without a legal action after which the rollout ends, 3 by default
    invalid_reward  reward of a reply without a legal action, 0 by default
    seed            seed of the episode; that of the rollout by default

The action is the last name or number in the reply; if an action is several numbers, the last ones; if it is a text, the
reply or its last word, and an environment that raises ValueError for it has refused it. The state between
two turns is the list of actions, so an environment can resume elsewhere if its seed determines the rest.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy

KNOWN = ("id", "settings", "wrappers", "instructions", "actions", "show", "most_invalid", "invalid_reward", "seed")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
MOST_NAMED = 64
"""Largest number of actions that the policy is told one by one."""
COLOURED = re.compile(r"\x1b\[[\d;]*m(.+?)\x1b\[0m")


class GymnasiumEnvironment:
    """One gymnasium environment, as a host calls it."""

    def __init__(self, config: dict[str, Any], *, problem: dict[str, Any], seed: int) -> None:
        options = {**config, **problem["info"].get("options", {})}
        if unknown := sorted(set(options) - set(KNOWN)):
            raise ValueError(f"options: unknown key {unknown[0]!r}; known: {', '.join(KNOWN)}")
        if "id" not in options:
            raise ValueError("options: missing id, as in id = 'FrozenLake-v1'")
        self._show = options.get("show", "observation")
        settings = {**({"render_mode": "ansi"} if self._show == "render" else {}), **options.get("settings", {})}
        self._environment = _made(options["id"], settings)
        for wrapper in options.get("wrappers", ()):
            self._environment = _named(wrapper)(self._environment)
        self._messages = problem["messages"]
        self._seed = options.get("seed", seed) % 2**31
        self._instructions = options.get("instructions", "")
        self._names = list(options.get("actions", ()))
        self._most_invalid = options.get("most_invalid", 3)
        self._invalid_reward = options.get("invalid_reward", 0.0)
        self._actions: list[Any] = []
        self._num_invalid = 0
        self._space = self._environment.action_space
        self._check_space()

    def start(self) -> list[dict[str, Any]]:
        """Return the problem's messages, with the first observation at the end of the last user message."""
        observation, info = self._environment.reset(seed=self._seed)
        text = "\n\n".join(filter(None, (self._instructions, self._shown(observation, info), self._legal())))
        if self._messages and self._messages[-1]["role"] == "user":
            last = self._messages[-1]
            return [*self._messages[:-1], {**last, "content": f"{last['content']}\n\n{text}".strip()}]
        return [*self._messages, {"role": "user", "content": text}]

    def reply(self, said: dict[str, Any]) -> dict[str, Any]:
        """Take the step that the policy chose."""
        action = self._action_of(said["content"])
        if action is None:
            return self._refused(f"This has no legal action. {self._legal()}")
        try:
            observation, reward, terminated, truncated, info = self._environment.step(self._taken(action))
        except ValueError as error:
            if not isinstance(self._space, gymnasium.spaces.Text):
                raise
            return self._refused(f"This is no legal action: {error}")
        self._actions.append(action)
        return {
            "done": bool(terminated or truncated),
            "messages": [self._shown(observation, info)],
            "reward": float(reward),
            "metrics": {**self._metrics(), "out_of_steps": float(truncated)},
        }

    def save(self) -> dict[str, Any]:
        """Return the actions that led to this state; the seed is already known."""
        return {"actions": self._actions, "invalid": self._num_invalid}

    def load(self, state: dict[str, Any]) -> None:
        """Take the saved actions again."""
        self._environment.reset(seed=self._seed)
        for action in state["actions"]:
            self._environment.step(self._taken(action))
        self._actions, self._num_invalid = list(state["actions"]), state["invalid"]

    def close(self) -> None:
        """Release the environment."""
        self._environment.close()

    def _refused(self, text: str) -> dict[str, Any]:
        self._num_invalid += 1
        return {
            "done": self._num_invalid >= self._most_invalid,
            "messages": [text],
            "reward": self._invalid_reward,
            "metrics": self._metrics(),
        }

    def _metrics(self) -> dict[str, float]:
        return {"steps": float(len(self._actions)), "invalid_actions": float(self._num_invalid)}

    def _check_space(self) -> None:
        space = self._space
        if isinstance(space, gymnasium.spaces.Discrete):
            if self._names and len(self._names) != space.n:
                raise ValueError(f"options.actions: got {len(self._names)} names, expected {space.n}")
        elif not _is_numbers(space) and not isinstance(
            space,
            (gymnasium.spaces.Box, gymnasium.spaces.MultiDiscrete, gymnasium.spaces.MultiBinary, gymnasium.spaces.Text),
        ):
            raise ValueError(f"the actions {space} have no form in text; wrap the environment in a class of your own")

    def _legal(self) -> str:
        space = self._space
        if isinstance(space, gymnasium.spaces.Discrete):
            first, end = int(space.start), int(space.start + space.n)
            if not self._names and space.n > MOST_NAMED:
                return f"An action is a number from {first} to {end - 1}."
            numbers = range(first, end)
            return f"Legal actions: {', '.join(self._names or map(str, numbers))}."
        if isinstance(space, gymnasium.spaces.Text):
            return ""
        if _is_numbers(space):
            ends = [[int(one.start), int(one.start + one.n) - 1] for one in space]
            return f"An action is {len(space)} numbers: {', '.join(f'{low} to {high}' for low, high in ends)}."
        return f"An action is {math.prod(space.shape)} numbers, from {_text(space)}."

    def _action_of(self, text: str) -> Any:
        """Return the action in a text as a plain value; None if there is no legal one."""
        space = self._space
        if isinstance(space, gymnasium.spaces.Text):
            return next((one for one in (text.strip(), *text.split()[-1:]) if space.contains(one)), None)
        if isinstance(space, gymnasium.spaces.Discrete) and self._names:
            return self._named_action(text)
        numbers = [float(number) for number in NUMBER.findall(text)]
        if isinstance(space, gymnasium.spaces.Discrete):
            action: Any = int(numbers[-1]) if numbers and numbers[-1].is_integer() else None
        else:
            count = len(space) if _is_numbers(space) else math.prod(space.shape)
            action = numbers[-count:] if len(numbers) >= count else None
        return action if action is not None and space.contains(self._taken(action)) else None

    def _named_action(self, text: str) -> int | None:
        places = [
            (match.end(), match.end() - match.start(), number)
            for number, name in enumerate(self._names)
            for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE)
        ]
        return max(places)[2] + int(self._space.start) if places else None

    def _taken(self, action: Any) -> Any:
        """Return the action in the form that the environment expects."""
        space = self._space
        if isinstance(space, gymnasium.spaces.Discrete):
            return numpy.int64(action)
        if isinstance(space, gymnasium.spaces.Text):
            return action
        if _is_numbers(space):
            return tuple(numpy.int64(number) if float(number).is_integer() else number for number in action)
        return numpy.asarray(action).reshape(space.shape).astype(space.dtype)

    def _shown(self, observation: Any, info: dict[str, Any]) -> str:
        if self._show == "observation":
            return _text(observation)
        if self._show != "render":
            if missing := [name for name in self._show if name not in info]:
                raise ValueError(f"options.show: got {missing[0]!r}, expected entries of info: {', '.join(info)}")
            return _text({name: info[name] for name in self._show})
        picture = self._environment.render()
        return COLOURED.sub(r"[\1]", str(picture)).strip("\n")


def _is_numbers(space: Any) -> bool:
    """Return whether a space is a tuple of numbers."""
    return isinstance(space, gymnasium.spaces.Tuple) and all(
        isinstance(one, gymnasium.spaces.Discrete) for one in space
    )


def _named(name: str) -> Any:
    """Return what `module:Thing` names."""
    module, _, thing = name.rpartition(":")
    return getattr(importlib.import_module(module), thing)


def _made(name: str, settings: dict[str, Any]) -> Any:
    """Return the environment of a registered name, or of a class. A registered name has a version after a hyphen."""
    module, _, thing = name.rpartition(":")
    if module and thing.isidentifier() and hasattr(importlib.import_module(module), thing):
        return _named(name)(**settings)
    return gymnasium.make(name, **settings)


def _text(value: Any) -> str:
    """Return an observation as text."""
    if isinstance(value, gymnasium.spaces.Space):
        low, high = getattr(value, "low", 0), getattr(value, "high", getattr(value, "nvec", 2))
        return f"{_text(low)} to {_text(high)}"
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_text(one)}" for name, one in value.items())
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_text(one) for one in value) + "]"
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return _text(value.tolist())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def tasks(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield tasks without end: episodes with seeds from 0 on."""
    return ({"messages": [""], "info": {"options": {"seed": seed}}} for seed in itertools.count())
