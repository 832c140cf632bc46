"""Conversion rules for TRL's rewards: those of TRL, of the script, which are copied beside the run file, of other
modules, and reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rftstream.integrations.foreign_configs.conversion import Conversion, ConvertedModule, many
from rftstream.integrations.foreign_configs.trl.scripts.modules import UNREAD, Script

PLACEHOLDER = "write_this_reward"
"""Name of a function that is not there, so that `check` refuses the run file."""
TRLS_REWARDS = ("think_format_reward",)
"""Rewards that TRL's command line has under names without a module, beside those that have a counterpart."""
REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math"}


class RewardRules:
    """The rules for the rewards of one script or YAML. `put` is called for each section that has rewards."""

    def __init__(self, conversion: Conversion, script: Script, path: Path, module: str, asked: set[str]) -> None:
        """`module`: the beginning of the names of modules beside the run file. `asked` gets `reward_funcs` if the user
        is asked to write them."""
        self._c, self._script, self._path, self._module, self._asked = conversion, script, path, module, asked
        self._models: dict[str, Any] = {}

    def put(self, section: str, there: str) -> None:
        """Write the rewards of a section, or a placeholder that `check` refuses."""
        c = self._c
        named, weights = many(c.get("reward_funcs") or []), c.get("reward_weights")
        if weights is not None and len(weights) != len(named):
            c.ask(f"reward_weights {weights}: {len(named)} rewards were read, so write each one's weight by hand")
            weights = [*weights, *[1.0] * len(named)][: len(named)]
        rewards: list[dict[str, Any]] = []
        own: list[str] = []
        imported: list[str] = []
        unread: list[str] = []
        for number, one in enumerate(named):
            if isinstance(one, dict) and UNREAD in one:
                unread.append(one[UNREAD])
                name: str | None = f"{self._module}_rewards:{PLACEHOLDER}"
            else:
                name = self._reward(one, own, imported, None if weights is None else weights[number])
            if name is not None:
                weight = {} if weights is None else {"weight": float(weights[number])}
                rewards.append({"name": name, **weight})
        if own:
            self.copy(own, f"{self._module}_rewards")
        if imported:
            c.ask(f"{', '.join(dict.fromkeys(imported))} must be importable where the run file lies")
        if not rewards:
            unread.append(self._script.unreadable.get("reward_funcs", "none is named"))
            rewards = [{"name": f"{self._module}_rewards:{PLACEHOLDER}"}]
        for place in unread:
            self._asked.add("reward_funcs")
            c.ask(
                f"the reward could not be read ({place}): put a reward's name or module:function in the place of "
                f'"{self._module}_rewards:{PLACEHOLDER}"'
            )
        value = rewards[0]["name"] if len(rewards) == 1 and len(rewards[0]) == 1 else rewards
        (c.put_placeholder if unread else c.put)(f"{section}.reward", value, there)

    def copy(self, names: list[str], module: str) -> None:
        """Copy functions of the script to a module beside the run file."""
        c, code = self._c, self._script.code
        if code is None or any(one.name == f"{module}.py" for one in c.modules):
            return
        text, missing = code.copy(names)
        about = f"{', '.join(names)} with what is used, copied from {self._path.name}"
        about += "".join(f"; {theirs} is called {ours} there" for theirs, ours in code.renamed.items())
        c.modules.append(ConvertedModule(f"{module}.py", text, about))
        if missing:
            c.ask(f"{module}.py uses {', '.join(missing)}, which only the script's run makes: write that there")

    def named_here(self, one: Any) -> str | None:
        """Return the name of our reward in the place of one of TRL's, if there is one."""
        return REWARDS.get(str(one).rpartition(":")[2]) if self.is_theirs_of_chats(one) else None

    def is_theirs_of_chats(self, one: Any) -> bool:
        """Return whether a reward is one of TRL's that read what the assistant said in messages."""
        module, _, name = str(one).rpartition(":")
        is_theirs = module.partition(".")[0] == "trl" or (not module and name not in self._script.functions)
        return is_theirs and (name in REWARDS or name in TRLS_REWARDS)

    def _reward(self, one: Any, own: list[str], imported: list[str], weight: float | None) -> str | None:
        """Return the name here of one reward, or None if it becomes a setting. `own` gets the script's functions,
        `imported` those of other modules."""
        c = self._c
        if isinstance(one, dict) and "model" in one:
            first = self._models.setdefault("reward_model", one["model"])
            if one["model"] != first:
                c.ask(f"reward_funcs: {one['model']} is a second model beside {first}, and one alone is a reward here")
                return None
            c.put("rewards.reward_model.path", first, "reward_funcs: a model")
            if not any((place / str(first)).expanduser().is_dir() for place in (self._path.parent, Path())):
                c.ask(
                    f"rewards.reward_model.path is a folder: `hf download {first} --local-dir {first}` beside the run "
                    "file fetches it, if that is a name on the hub"
                )
            return "reward_model"
        module, _, name = str(next(iter(one)) if isinstance(one, dict) else one).rpartition(":")
        is_theirs = module.partition(".")[0] == "trl" or (not module and name not in self._script.functions)
        if name == "get_soft_overlong_punishment" and is_theirs:
            most = one[name] if isinstance(one, dict) else {"max_completion_len": 1280, "soft_punish_cache": 256}
            longest, place = most["max_completion_len"], f"algorithms.{c.algorithm}.overlong"
            c.put(
                f"{place}_share", most["soft_punish_cache"] / longest, f"{name}: soft_punish_cache / max_completion_len"
            )
            if weight is not None:
                c.put(f"{place}_penalty", float(weight), f"reward_weights, of {name}")
            if longest != c.get("max_completion_length"):
                c.ask(f"{name} is about {longest} tokens, here the share is that of sampling.max_tokens")
            return None
        if is_theirs and name in TRLS_REWARDS:
            module = "trl.rewards"
        if (here := self.named_here(one)) is not None:
            return here
        if not module and "." in name:
            module, _, name = name.rpartition(".")
        if module:
            is_theirs = module.partition(".")[0] == "trl"
            if is_theirs:
                c.ask(f"{module}:{name} needs TRL beside rftstream: pip install trl")
            else:
                imported.append(f"{module}:{name}")
            return f"{module}:{name}"
        if self._script.code is None:
            c.ask(f"copy {name}, with what it uses, to {self._module}_rewards.py beside the run file")
        own.append(name)
        return f"{self._module}_rewards:{name}"
