"""Games of the package textarena. `target = "textarena"`; one move for each turn.

Options, also those of a single problem in its `info.options`:

    id            name of the game, as `GuessTheNumber-v0`
    settings      what `textarena.make` gets besides
    num_players   1 by default
    seat          the policy's place among them, 0 by default
    opponent      `module:function` that plays all others: (observation, player, seed) -> move
    instructions  text before the first observation
    seed          seed of the game; that of the rollout by default

The reward comes with the last reply: the game's reward for the policy's player. textarena uses Python's global random
generator. So each game keeps its own state of the generator, and only one game of a host moves at a time. The state
between two turns is the list of all moves.

`target = "textarena_self_play"` is an agent: the policy plays all seats, each with a conversation of its own, in the
roles `player_0`, `player_1`, ... (`model = "policy:player_0"`). The reward of a role is the game's for this player. Its
options are `id`, `settings`, `num_players` (2 by default), `instructions` and `seed`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import textarena

KNOWN = ("id", "settings", "num_players", "seat", "opponent", "instructions", "seed")
ONE_MOVES = threading.Lock()
NOT_NOW = (429, 503)
"""Statuses of the gateway after which the same call is made again."""


class TextArenaEnvironment:
    """One game of textarena, as a host calls it."""

    known: tuple[str, ...] = KNOWN
    num_players = 1

    def __init__(self, config: dict[str, Any], *, problem: dict[str, Any], seed: int) -> None:
        options = {**config, **problem["info"].get("options", {})}
        if unknown := sorted(set(options) - set(self.known)):
            raise ValueError(f"options: unknown key {unknown[0]!r}; known: {', '.join(self.known)}")
        if "id" not in options:
            raise ValueError("options: missing id, as in id = 'GuessTheNumber-v0'")
        self._seed = seed = options.get("seed", seed)
        self._random = random.Random(seed).getstate()
        self._messages = problem["messages"]
        self._instructions = options.get("instructions", "")
        self._num_players, self._seat = options.get("num_players", self.num_players), options.get("seat", 0)
        self._opponent: Callable[[str, int, int], str] | None = None
        if "opponent" in options:
            module, _, name = options["opponent"].partition(":")
            self._opponent = getattr(importlib.import_module(module), name)
        elif self._num_players > 1 and "opponent" in self.known:
            raise ValueError("options: missing opponent, as in opponent = 'my_players:careful'")
        self._moves: list[str] = []
        self._turns = 0
        self._seen: dict[int, str] = {}
        with self._own_random():
            self._game = textarena.make(options["id"], **options.get("settings", {}))

    def start(self) -> list[dict[str, Any]]:
        """Return the problem's messages, with the player's first observation at the end."""
        with self._own_random():
            self._reset()
            self._play_others()
            text = "\n\n".join(filter(None, (self._instructions, self._observe())))
        if self._messages and self._messages[-1]["role"] == "user":
            last = self._messages[-1]
            return [*self._messages[:-1], {**last, "content": f"{last['content']}\n\n{text}".strip()}]
        return [*self._messages, {"role": "user", "content": text}]

    def reply(self, said: dict[str, Any]) -> dict[str, Any]:
        """Make the policy's move, and the others' moves until it is the policy's turn again."""
        with self._own_random():
            self._turns += 1
            done = self._move(said["content"]) or self._play_others()
            if not done:
                return {"done": False, "messages": [self._observe()], "metrics": {"moves": float(self._turns)}}
            rewards, info = self._game.close()
        about = (info or {}).get(self._seat, {})
        return {
            "done": True,
            "reward": None if rewards is None else rewards.get(self._seat),
            "metrics": {"moves": float(self._turns), "invalid_moves": float(bool(about.get("invalid_move")))},
        }

    def save(self) -> dict[str, Any]:
        """Return the moves that led to this state; the seed is already known."""
        return {"moves": self._moves, "turns": self._turns}

    def load(self, state: dict[str, Any]) -> None:
        """Make the saved moves again."""
        with self._own_random():
            self._reset()
            for move in state["moves"]:
                if self._game.get_observation()[0] == self._seat:
                    self._observe()
                self._move(move)
            self._observe()
        self._turns = state["turns"]

    def _reset(self) -> None:
        self._game.reset(num_players=self._num_players, seed=self._seed % 2**31)

    def _play_others(self) -> bool:
        """Make the others' moves. Return whether the game is over."""
        while not self._game.state.done and self._game.state.current_player_id != self._seat:
            player, observation = self._game.get_observation()
            assert self._opponent
            if self._move(self._opponent(str(observation), player, self._seed)):
                return True
        return bool(self._game.state.done)

    def _move(self, move: str) -> bool:
        self._moves.append(move)
        done, _ = self._game.step(action=move)
        return bool(done)

    def _observe(self) -> str:
        """Return the new part of the observation. Some games repeat everything before it; that part is removed."""
        player, observation = self._game.get_observation()
        text = observation if isinstance(observation, str) else "\n".join(str(one[1]) for one in observation)
        seen = self._seen.get(player, "")
        self._seen[player] = text
        return (text[len(seen) :] if text.startswith(seen) else text).strip()

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with ONE_MOVES:
            outside = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside)


class SelfPlay(TextArenaEnvironment):
    """One game in which the policy has all seats."""

    known = ("id", "settings", "num_players", "instructions", "seed")
    num_players = 2

    def play(self, ask: Callable[[str, list[dict[str, Any]]], str]) -> dict[str, Any]:
        """Play to the end, and return the reward of each player. `ask(role, messages)` returns a move."""
        talks: dict[int, list[dict[str, Any]]] = {}
        with self._own_random():
            self._reset()
        done = False
        while not done:
            with self._own_random():
                player, text = self._game.state.current_player_id, self._observe()
            first = [*filter(None, (*(one["content"] for one in self._messages), self._instructions))]
            said = text if player in talks else "\n\n".join((*first, text)).strip()
            talk = talks.setdefault(player, [])
            talk.append({"role": "user", "content": said})
            talk.append({"role": "assistant", "content": ask(role_of(player), talk)})
            self._turns += 1
            with self._own_random():
                done = self._move(talk[-1]["content"])
        with self._own_random():
            rewards, info = self._game.close()
        invalid = sum(bool(about.get("invalid_move")) for about in (info or {}).values())
        return {
            "roles": {role_of(player): reward for player, reward in sorted((rewards or {}).items())},
            "metrics": {"moves": float(self._turns), "invalid_moves": float(invalid)},
        }


def role_of(player: int) -> str:
    """Return the name of a player's role."""
    return f"player_{player}"


def self_play(
    problem: dict[str, Any], base_url: str, api_key: str, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Play one game with the policy in all seats, and return the reward of each."""

    def ask(role: str, messages: list[dict[str, Any]]) -> str:
        body = json.dumps({"model": f"policy:{role}", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        while True:
            try:
                request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
                with urllib.request.urlopen(request) as answer:
                    return str(json.load(answer)["choices"][0]["message"]["content"] or "")
            except urllib.error.HTTPError as error:
                if error.code not in NOT_NOW:
                    raise RuntimeError(f"the gateway answered {error.code}: {error.read()[:500]!r}") from None
                time.sleep(float(error.headers.get("retry-after") or 1))

    return SelfPlay(options, problem=problem, seed=seed).play(ask)


def tasks(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield tasks without end: episodes with seeds from 0 on."""
    return ({"messages": [""], "info": {"options": {"seed": seed}}} for seed in itertools.count())
