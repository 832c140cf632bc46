"""A small game in text, as an example of an environment of one's own and of the taskset that makes its problems.

Rooms lie on a grid; a key is in one of them, a locked door in another. docs/environments.md shows a game.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.environments.base import Reply
from rftstream.errors import ConfigError

MAX_ROOMS = 36
DIRECTIONS = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
NAMES = ("hall", "kitchen", "cellar", "attic", "library", "garden", "study", "chapel", "tower")
RULES = (
    "You are in a house. Find the key, take it, and open the door. Answer with one command and nothing else: "
    "go north, go east, go south, go west, take, open."
)
Place = tuple[int, int]


class TextGame:
    """An environment that describes a room and takes a command in each turn: go DIRECTION, take, open.

    It plays the game of `problem.info["seed"]` with `problem.info["rooms"]` rooms, so all siblings of a group play the
    same one. It gives `key_reward` for the key, and the rest of 1 for the door, which ends the rollout."""

    is_immediate = True
    """Its methods never block, so they are called in the sampling thread."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[environments."text_game:TextGame"]`."""

        max_moves: Annotated[int, Meta(ge=1)] = 20
        """Turns of the policy."""
        key_reward: Annotated[float, Meta(ge=0, le=1)] = 0.2
        """For taking the key. The door gives the rest of 1."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        self._config, self._problem = config, problem
        self._house = House(problem.info.get("seed"), problem.info.get("rooms"))
        self._place, self._has_key = self._house.start, False
        self._num_moves, self._num_refused = 0, 0

    def start(self) -> tuple[ChatMessage, ...]:
        *before, last = self._problem.messages
        return (*before, ChatMessage(role=last.role, content=f"{last.content}\n\n{self._view()}", media=last.media))

    def reply(self, said: AssistantMessage) -> Reply:
        self._num_moves += 1
        told, parts, won = self._move(said.content)
        done = won or self._num_moves >= self._config.max_moves or said.finish_reason != "stop"
        return Reply(
            done=done,
            messages=() if done else (ChatMessage(role="user", content=told),),
            reward=sum(parts.values()),
            parts=parts,
            metrics={
                "num_moves": float(self._num_moves),
                "num_refused": float(self._num_refused),
                "least_moves": float(self._house.least_moves),
                "has_key": float(self._has_key),
                "won": float(won),
            },
        )

    def save(self) -> bytes | None:
        return json.dumps([self._place, self._has_key, self._num_moves, self._num_refused]).encode()

    def load(self, state: bytes) -> None:
        (x, y), self._has_key, self._num_moves, self._num_refused = json.loads(state)
        self._place = (x, y)

    def close(self) -> None:
        pass

    def _move(self, text: str) -> tuple[str, dict[str, float], bool]:
        """Return what the player reads, the parts of the reward, and whether the door is open."""
        parts = {"key": 0.0, "door": 0.0}
        words = text.lower().split()
        verb, direction = (words[0], words[-1]) if words else ("", "")
        exits = self._house.exits(self._place)
        if verb == "go" and direction in exits:
            self._place = exits[direction]
        elif verb == "take" and self._place == self._house.key and not self._has_key:
            self._has_key, parts["key"] = True, self._config.key_reward
        elif verb == "open" and self._place == self._house.door and self._has_key:
            parts["door"] = 1 - self._config.key_reward
            return "", parts, True
        else:
            self._num_refused += 1
            why = "The door is locked." if verb == "open" and self._place == self._house.door else "You cannot do that."
            return f"{why} {self._view()}", parts, False
        return self._view(), parts, False

    def _view(self) -> str:
        lines = [
            f"You are in the {self._house.rooms[self._place]}. Exits: {', '.join(self._house.exits(self._place))}."
        ]
        if self._place == self._house.key and not self._has_key:
            lines.append("A key lies here.")
        if self._place == self._house.door:
            lines.append("A locked door is here.")
        if self._has_key:
            lines.append("You have the key.")
        return " ".join(lines)


class House:
    """The rooms of one game: connected, some with more than one way, the key and the door in two rooms that are not the
    first."""

    def __init__(self, seed: object, rooms: object) -> None:
        """ConfigError if these are not from the taskset `Houses`."""
        if not isinstance(seed, int) or not isinstance(rooms, int) or not 3 <= rooms <= MAX_ROOMS:
            raise ConfigError(
                f"environments.text_game: the problem's info has seed = {seed!r} and rooms = {rooms!r}, expected whole "
                f'numbers, and 3 to {MAX_ROOMS} rooms; take source = "text_game:Houses"'
            )
        random = Random(seed)
        self.start: Place = (0, 0)
        self.rooms: dict[Place, str] = {self.start: ""}
        """Place -> name."""
        self._ways: dict[Place, set[Place]] = {self.start: set()}
        while len(self.rooms) < rooms:
            place = random.choice(list(self.rooms))
            near = _beside(place, random.choice(list(DIRECTIONS)))
            if near not in self.rooms or random.random() < 0.2:
                self.rooms[near] = ""
                self._ways.setdefault(near, set()).add(place)
                self._ways[place].add(near)
        names = [f"{name} {number}" if number > 1 else name for number in range(1, 5) for name in NAMES][:rooms]
        random.shuffle(names)
        self.rooms = dict(zip(self.rooms, names, strict=True))
        self.key, self.door = random.sample([place for place in self.rooms if place != self.start], 2)
        self.least_moves = self._steps(self.start, self.key) + 1 + self._steps(self.key, self.door) + 1
        """Turns of the shortest game."""

    def exits(self, place: Place) -> dict[str, Place]:
        """Return direction -> room beside this one."""
        near = {name: _beside(place, name) for name in DIRECTIONS}
        return {name: other for name, other in near.items() if other in self._ways[place]}

    def _steps(self, here: Place, there: Place) -> int:
        steps, todo = {here: 0}, deque([here])
        while there not in steps:
            place = todo.popleft()
            for near in sorted(self._ways[place] - steps.keys()):
                steps[near] = steps[place] + 1
                todo.append(near)
        return steps[there]


def _beside(place: Place, direction: str) -> Place:
    x, y = DIRECTIONS[direction]
    return place[0] + x, place[1] + y


class Houses(GeneratedTaskset):
    """Houses by their number: the same house for the same number, number of rooms and seed."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        rooms: Annotated[int, Meta(ge=3, le=36)] = 4
        """Rooms of each house."""
        size: Annotated[int, Meta(ge=1)] = 1000
        """Houses in one pass."""
        seed: Annotated[int, Meta(ge=0)] = 0
        """Another seed makes other houses."""
        rules: str | None = None
        """What stands before the first room; default: the rules of the game."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if location or columns:
            raise ConfigError('text_game: takes neither a location nor columns; write source = "text_game:Houses"')
        self._config = config
        super().__init__(
            "text_game", size=config.size, system=system, decided_by=["text_game", 1, asdict(config), system]
        )

    def make_problem(self, index: int) -> Problem:
        """Return the house of an index."""
        return Problem(
            messages=self.messages(RULES if self._config.rules is None else self._config.rules),
            info={"seed": derive_seed(self._config.seed, "text_game", index), "rooms": self._config.rooms},
            data_source="text_game",
        )
