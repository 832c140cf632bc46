"""Reads a training script of TRL without running it: the arguments of its trainer and its config, under TRL's own
names.

The script becomes settings of TRL's command line: `load_dataset(...)` becomes dataset_name and related settings,
`LoraConfig(...)` becomes lora_r and so on. A value that only the script's run makes is noted as unreadable, with its
line.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.trl.files import rows_file
from rftstream.integrations.foreign_configs.trl.scripts import loaded, rest
from rftstream.integrations.foreign_configs.trl.scripts.modules import FunctionReader, Script, ScriptCode
from rftstream.integrations.foreign_configs.trl.scripts.rows import DatasetReader
from rftstream.integrations.foreign_configs.trl.scripts.scopes import (
    UNKNOWN,
    Scope,
    UnreadableExpression,
    attributes_of,
    last_name,
    of_object,
)
from rftstream.integrations.foreign_configs.trl.scripts.slices import rows_script
from rftstream.integrations.foreign_configs.trl.scripts.values import ARGUMENTS, ScriptValues

KINDS = ("GRPO", "RLOO", "SFT", "DPO", "Reward")
ENDS = ("train_dataset", "eval_dataset", "processing_class")
SAMPLES = ("model", "reward_funcs", "args", *ENDS)
PLACES = {
    "GRPO": SAMPLES,
    "RLOO": SAMPLES,
    "DPO": ("model", "ref_model", "args", "data_collator", *ENDS),
    "SFT": ("model", "args", "data_collator", *ENDS),
}
"""Trainer -> its parameters, by place. Reward models have those of SFT."""
COPIES = ("replace", "deepcopy", "copy")
"""Functions that return another object with the same settings."""
LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
ADAPTERS = {"LoraConfig": {"lora_r": 8, "lora_alpha": 8}, "ModelConfig": {"lora_r": 16, "lora_alpha": 32}}
"""Class of an adapter's settings -> its defaults: peft's, and those of TRL's command line."""
ANOTHER_TRAINER = (
    "another trainer, which is not in the run file: convert it from a script of its own, and join both as [[stages]] "
    "(docs/algorithms.md), or begin the one with model.init_from the other"
)


class ScriptReader(ScriptValues):
    """Reads one script. `read` is called once."""

    def read(self) -> Script:
        """Return the arguments of the script's trainer. ConfigError if there is none."""
        call, scope, kind, body = self._trainer()
        every = list(ast.walk(self._tree))
        names = {node.name for node in every if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        names |= {ast.unparse(node.targets[0]) for node in every if isinstance(node, ast.Assign)}
        script = Script(kind.lower(), functions=names, environment=self._environment)
        script.arguments, script.own, script.own_taken = self._arguments_taken, set(self._own), self._own_taken
        script.code = ScriptCode(self._path.name, self._lines, scope, self)
        script.makes_chats = any(
            rest.is_message(one) for tree in (self._tree, *self.beside.trees) for one in ast.walk(tree)
        )
        script.images = rest.column_of_images(every)
        positional = dict(zip(PLACES.get(kind, PLACES["SFT"]), call.args, strict=False))
        given: dict[str, ast.expr] = {**positional}
        for one in call.keywords:
            given |= {one.arg: one.value} if one.arg else self._spread(one.value, scope)
        for name, node in given.items():
            try:
                self._argument(script, name, node, given, scope)
            except UNKNOWN as error:
                script.unreadable[name] = str(error)
        for bound in scope.bound + self.scope.bound:
            is_template = bound.name.endswith(".chat_template")
            if is_template or "WANDB_PROJECT" in bound.name:  # os.environ["WANDB_PROJECT"] = ...
                with contextlib.suppress(*UNKNOWN):
                    value = self.value(bound.value, bound.scope)
                    if is_template and (not bound.is_known() or not isinstance(value, str)):
                        continue
                    script.settings["tokenizer.chat_template" if is_template else "wandb_project"] = value
                    self.read_statements.add(id(bound.statement))
        trained = (one for one in every if isinstance(one, ast.Call) and last_name(one.func) == "train")
        for one in (
            keyword for call in trained for keyword in call.keywords if keyword.arg == "resume_from_checkpoint"
        ):
            if isinstance(one.value, ast.Constant):
                script.settings["resume_from_checkpoint"] = one.value.value
            else:
                script.unreadable["resume_from_checkpoint"] = str(UnreadableExpression(one.value))
        for bound in scope.bound + self.scope.bound:
            made = bound.value
            if isinstance(made, ast.Call) and last_name(made.func) == "train_on_responses_only":  # of unsloth
                script.settings["assistant_only_loss"] = True
                self.read_statements.add(id(bound.statement))
        functions = {one.name: one for one in every if isinstance(one, ast.FunctionDef)}
        bodies = rest.bodies_around(self._tree, body)
        own = [one for one in self._classes if one.name == last_name(call.func)]  # a class derived from TRL's trainer
        datasets_given = {one: given[one] for one in ("train_dataset", "eval_dataset") if one in given}
        for name, node in datasets_given.items():
            file, others = (
                rows_file(self._path, "eval_" if name == "eval_dataset" else ""),
                [one for one in datasets_given.values() if one is not node],
            )
            script.rows[name] = rows_script(self._path, self._lines, bodies, call, node, file, others)
        read = self.read_statements | rest.passed_over(bodies, lambda one: self.holds(one, scope))
        left = rest.unread_statements(bodies, call, functions, read)
        script.unread_statements += [*self._loops, *(rest.to_do_about(one) for one in [*own, *left])]
        calls = (one for one in every if isinstance(one, ast.Call) and one is not call)
        more = [one for one in calls if self._kind(last_name(one.func)) is not None]
        script.configs = self._configs.read
        script.unread_statements += [f"{UnreadableExpression(one)}: {ANOTHER_TRAINER}" for one in more]
        return script

    def _spread(self, node: ast.expr, scope: Scope) -> dict[str, ast.expr]:
        """Return the arguments in `**node`; under the name `**` if they are not known one by one."""
        with contextlib.suppress(*UNKNOWN):
            found, around = self.resolved(node, scope)
            if isinstance(found, ast.Call) and last_name(found.func) == "dict" and not found.args and around is scope:
                return {str(one.arg): one.value for one in found.keywords}
            if isinstance(found, ast.Dict) and around is scope:
                pairs = zip(found.keys, found.values, strict=True)
                return {str(self.value(key or node, scope)): one for key, one in pairs}
        return {"**": node}

    def _argument(self, script: Script, name: str, node: ast.expr, given: Mapping[str, ast.expr], scope: Scope) -> None:
        """Take one argument of the trainer. An error in UNKNOWN if its value is not known."""
        if name == "args":
            script.settings |= self._config(node, scope, script)
        elif name == "peft_config":
            script.settings |= self.lora(node, scope, script)
        elif name in ("reward_funcs", "tools") and script.code is not None:
            script.settings[name] = FunctionReader(self, script.code).read(node, scope)
        elif name == "train_dataset":
            script.settings |= DatasetReader(self).read(node, scope)
        elif name == "eval_dataset" and ast.unparse(self.resolved(node, scope)[0]) != "None":
            found = DatasetReader(self).read(node, scope)
            script.settings |= {f"eval_{key}": value for key, value in found.items()}
        elif name in ("environment_factory", "rollout_func", "callbacks"):
            script.settings[name] = ast.unparse(node)
        elif name == "model":
            script.settings |= loaded.loaded_as(self, node, scope, script)
            script.settings["model_name_or_path"] = self._model(node, scope)
        elif name in ("processing_class", "tokenizer", "ref_model") and self._is_models_own(node, given, scope):
            return
        elif name != "eval_dataset":
            script.settings[name] = (self._model if name == "ref_model" else self.value)(node, scope)

    def _is_models_own(self, node: ast.AST, given: Mapping[str, ast.expr], scope: Scope) -> bool:
        """Return whether a tokenizer, a processor or the reference is loaded from the model that is trained."""
        with contextlib.suppress(*UNKNOWN):
            return bool(self._model(node, scope) == self._model(given["model"], scope))
        return False

    def _trainer(self) -> tuple[ast.Call, Scope, str, list[ast.stmt]]:
        """Return the call that makes the trainer, its scope, the kind of trainer, and the body that it is in."""
        for scope, body in self._bodies():
            for node in body:
                for call in ast.walk(node) if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ():
                    if isinstance(call, ast.Call) and (kind := self._kind(last_name(call.func))):
                        return call, scope, kind, body
        known = ", ".join(f"{kind}Trainer" for kind in KINDS)
        calls = [last_name(one.func) for one in ast.walk(self._tree) if isinstance(one, ast.Call)]
        if other := next((name for name in calls if name.removesuffix("Trainer") in rest.ELSEWHERE), None):
            near = rest.ELSEWHERE[other.removesuffix("Trainer")]
            raise ConfigError(f"{self._path}: {other} has no counterpart here: {near}; what is converted is {known}")
        raise ConfigError(f"{self._path}: no trainer in it that has a counterpart here; expected one of {known}")

    def _kind(self, name: str) -> str | None:
        """Return the kind of trainer of a class: TRL's, or one that the script derives from it."""
        if name.endswith("Trainer") and name[:-7] in KINDS:
            return name[:-7]
        own = next((one.value for one in self.scope.bound if one.name == name), None)
        bases = [last_name(one) for one in own.bases] if isinstance(own, ast.ClassDef) else []
        return next((kind for base in bases if base != name and (kind := self._kind(base))), None)

    def _bodies(self) -> Iterator[tuple[Scope, list[ast.stmt]]]:
        yield self.scope, self._tree.body
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef):
                owner = next((one for one in self._classes if node in one.body), None)
                name = node.name if owner is None else owner.name
                every = (one for one in ast.walk(self._tree) if isinstance(one, ast.Call))
                calls = [one for one in every if isinstance(one.func, ast.Name) and one.func.id == name]
                call = calls[0] if len(calls) == 1 else None
                if owner is None:
                    yield self.scope.inside(node, call, self.scope), node.body
                else:
                    around = of_object(self.scope, owner, call)
                    yield around if node.name == "__init__" else around.inside(node), node.body

    # ------------------------------------------------------------------------------- arguments of a trainer

    def arguments(self, call: ast.Call, scope: Scope, script: Script, prefix: str = "") -> dict[str, Any]:
        """Return the keyword arguments of a call. Unreadable ones are noted."""
        found: dict[str, Any] = {}
        for one in call.keywords:
            try:
                if one.arg == "vllm_sampling_params":
                    found = {**loaded.sampling_of(self, *self._called(one.value, scope)), **found}
                    continue
                value = self.value(one.value, scope)
                found |= {str(key): item for key, item in value.items()} if one.arg is None else {one.arg: value}
            except UNKNOWN as error:
                script.unreadable[f"{prefix}{one.arg or f'**{ast.unparse(one.value)}'}"] = str(error)
        return found

    def _called(self, node: ast.AST, scope: Scope) -> tuple[ast.Call, Scope]:
        found, around = self.resolved(node, scope)
        if not isinstance(found, ast.Call):
            raise UnreadableExpression(node)
        with contextlib.suppress(*UNKNOWN):
            function, home = self.resolved(found.func, around)
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            if isinstance(function, ast.FunctionDef) and len(returned) == 1:
                return self._called(returned[0], home.inside(function, found, around))
        return found, around

    def _config(self, node: ast.expr, scope: Scope, script: Script, *, is_copied: bool = False) -> dict[str, Any]:
        found, around = {}, scope
        if self._is_parsed(node, scope):
            others = [one for one in self._changed if one.arg not in self._given]
            found = self.arguments(ast.Call(ast.Name("Config"), [], others), self.scope, script)
        else:
            call, inside = self._called(node, scope)
            around = self.resolved(node, scope)[1]
            if last_name(call.func) in COPIES and call.args:  # dataclasses.replace(args, seed=1)
                found = self._config(call.args[0], inside, script, is_copied=True)
                return found | self.arguments(call, inside, script) | self._set_in(node, around, script, sys.maxsize)
            own = self._defaults_of(call, inside, script)
            if not last_name(call.func).endswith(ARGUMENTS) and own is None:
                raise UnreadableExpression(call, "its settings come from a command line or another place")
            given = self.arguments(call, inside, script)
            if call.args:
                given.setdefault("output_dir", self.value(call.args[0], inside))
            found = (own or {}) | given
        return found | self._set_in(node, around, script, node.lineno if is_copied else sys.maxsize)

    def _defaults_of(self, call: ast.Call, scope: Scope, script: Script) -> dict[str, Any] | None:
        """Return the settings that a class of the script, derived from TRL's, gives other defaults. None for any other
        class."""
        with contextlib.suppress(UnreadableExpression):
            kind, around = self.resolved(call.func, scope)
            bases = [last_name(one) for one in kind.bases] if isinstance(kind, ast.ClassDef) else []
            if isinstance(kind, ast.ClassDef) and any(one.endswith(ARGUMENTS) for one in bases):
                methods = (one for one in kind.body if isinstance(one, ast.FunctionDef))
                script.unread_statements += [rest.to_do_about(one) for one in methods]
                given = [ast.keyword(name, one) for name, one in attributes_of(kind).items() if name in self._known]
                return self.arguments(ast.Call(call.func, [], given), around, script)
        return None

    def _set_in(self, node: ast.AST, around: Scope, script: Script, end: int) -> dict[str, Any]:
        """Return what the script sets in its settings, `args.seed = 1`, before a line."""
        found: dict[str, Any] = {}
        changed = re.compile(rf"{re.escape(ast.unparse(node))}\.(\w+)") if isinstance(node, ast.Name) else None
        for one in around.bound if changed is not None else ():
            match = changed.fullmatch(one.name) if changed and one.statement.lineno < end else None
            if match:
                self.read_statements.add(id(one.statement))
                if (is_known := one.is_known()) is None:
                    script.unreadable[match[1]] = str(UnreadableExpression(one.value, "which is set in a branch"))
                elif is_known:
                    found[match[1]] = self.value(one.value, around)
        return found

    def lora(self, node: ast.AST, scope: Scope, script: Script) -> dict[str, Any]:
        """Return the settings of an adapter that the script names. What it leaves out is a default, or in the YAML."""
        call, around = self._called(node, scope)
        kind = last_name(call.func)
        if kind == "get_peft_config" and call.args:
            script.defaults = ADAPTERS["ModelConfig"]
            if self._is_parsed(call.args[0], around):
                return {}
            call, around = self._called(call.args[0], around)
            return self.arguments(call, around, script, "peft_config.")
        found = self.arguments(call, around, script, "peft_config.")
        script.defaults = ADAPTERS["LoraConfig"]
        given = {"use_peft": True, **{LORA.get(name, name): value for name, value in found.items()}}
        return {
            name if "lora" in name or name == "use_peft" else f"peft_config.{name}": value
            for name, value in given.items()
        }

    def _model(self, node: ast.AST, scope: Scope) -> Any:
        node, scope = self.resolved(node, scope)
        made = loaded.made_of(node)
        return self.value(node, scope) if made is None else self._model(made, scope)
