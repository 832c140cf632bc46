"""Reads a training script of TRL without running it: the arguments of its trainer and its config, under TRL's own
names.

The script becomes settings of TRL's command line: `load_dataset(...)` becomes dataset_name and related settings,
`LoraConfig(...)` becomes lora_r and so on. Constants, names that are bound once or in a row, arithmetic, f-strings and
defaults of argparse are resolved; anything else is noted as unreadable, with its line.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rftstream.errors import ConfigError
from rftstream.integrations.foreign_configs.reading import COMPARED, OPERATORS, read_python
from rftstream.integrations.foreign_configs.trl import loaded, rest
from rftstream.integrations.foreign_configs.trl.beside import ModulesBeside, attribute_of
from rftstream.integrations.foreign_configs.trl.files import rows_file
from rftstream.integrations.foreign_configs.trl.modules import FunctionReader, Script, ScriptCode
from rftstream.integrations.foreign_configs.trl.rows import DatasetReader
from rftstream.integrations.foreign_configs.trl.scopes import (
    UNKNOWN,
    Scope,
    UnreadableExpression,
    fields_of,
    last_name,
    of_object,
)
from rftstream.integrations.foreign_configs.trl.slices import rows_script

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
LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
ADAPTERS = {"LoraConfig": {"lora_r": 8, "lora_alpha": 8}, "ModelConfig": {"lora_r": 16, "lora_alpha": 32}}
"""Class of an adapter's settings -> its defaults: peft's, and those of TRL's command line."""
ANOTHER_TRAINER = (
    "another trainer, which is not in the run file: convert it from a script of its own, and join both as [[stages]] "
    "(docs/algorithms.md), or begin the one with model.init_from the other"
)
PARSED_DEFAULTS = {"dataset_train_split": "train", "dataset_test_split": "test", "eval_strategy": "no"}
"""Defaults of TRL's command line that scripts read."""
PARSED = ("parse_args_and_config", "parse_args_into_dataclasses")
CASTS = {"int": int, "float": float, "str": str}
ARGUMENTS = ("Config", "Arguments")
"""Ends of the names of classes of settings."""
TEXTS = ("split", "replace", "lower", "upper", "strip", "rstrip", "lstrip")
"""String methods that can be evaluated."""


class ScriptReader:
    """Reads one script. `read` is called once."""

    def __init__(
        self,
        path: Path,
        parsed: Mapping[str, Any] | None,
        known: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`parsed`: the settings of the command line and of its YAML, if they are given. `known`: the names of all
        settings that a command line has. `environment`: variables that the shell gives to the script."""
        text, self._tree = read_python(path)
        self._path, self._lines = path, text.splitlines()
        self._given = parsed or {}
        self._parsed = None if parsed is None else {**PARSED_DEFAULTS, **parsed}
        if self._parsed and self._parsed["eval_strategy"] is False:  # YAML's no
            self._parsed["eval_strategy"] = "no"
        self._known = known
        self._loops = rest.take_first_turns(self._tree)
        self.scope = Scope(decide=self.holds).add(self._tree.body)
        self.read_statements: set[int] = set()
        """Ids of statements, beside those that bind a name, that a rule has read."""
        self.beside = ModulesBeside(self._tree, path.parent, self.holds)
        self._configs = loaded.ConfigFiles(self, self._tree, path.parent)
        self._exported = environment or {}
        self._environment: dict[str, Any] = {}
        self._arguments_taken: set[str] = set()
        self._classes = classes = [node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)]
        classes = [
            *classes,
            *(one for tree in self.beside.trees for one in ast.walk(tree) if isinstance(one, ast.ClassDef)),
        ]
        self._own = {name: default for one in classes for name, default in fields_of(one)}
        """Fields of the script's own dataclasses, which its command line has beside TRL's, and their defaults."""
        derived = (one for one in classes if any(last_name(base).endswith(ARGUMENTS) for base in one.bases))
        defaults = dict(field for one in derived for field in fields_of(one))
        self._changed = [ast.keyword(name, one) for name, one in defaults.items() if one is not None and name in known]
        """Other defaults of TRL's settings, which a class of the script gives to them."""
        self._own_taken: set[str] = set()

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
        given: dict[str, ast.expr] = {**positional, **{one.arg or "**": one.value for one in call.keywords}}
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
        script.unread_statements = [*self._loops, *(rest.to_do_about(one) for one in [*own, *left])]
        calls = (one for one in every if isinstance(one, ast.Call) and one is not call)
        more = [one for one in calls if self._kind(last_name(one.func)) is not None]
        script.configs = self._configs.read
        script.unread_statements += [f"{UnreadableExpression(one)}: {ANOTHER_TRAINER}" for one in more]
        return script

    def _argument(self, script: Script, name: str, node: ast.expr, given: Mapping[str, ast.expr], scope: Scope) -> None:
        """Take one argument of the trainer. An error in UNKNOWN if its value is not known."""
        readers = {"args": self._config, "peft_config": self.lora}
        if name in readers:
            script.settings |= readers[name](node, scope, script)
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

    def resolved(self, node: ast.AST, scope: Scope) -> tuple[ast.AST, Scope]:
        """Follow names to their value, and choices whose condition is known. Return the node with the scope in which
        to evaluate it."""
        while isinstance(node, (ast.Name, ast.IfExp, ast.Attribute)):
            if isinstance(node, ast.IfExp):
                node = node.body if self.holds(node.test, scope) else node.orelse
            elif isinstance(node, ast.Name):
                name, (node, scope) = node.id, scope.find(node)
                node, scope = self.beside.find(node, name, scope)
            elif (found := self.beside.attribute(node, scope)) is not None:
                node, scope = found
            elif ast.unparse(node.value) == "self" and (bound := scope.set_before(node)) is not None:
                node, scope = bound.value, bound.scope
            else:
                break
        return node, scope

    def holds(self, test: ast.expr, scope: Scope) -> bool:
        """Return whether a condition holds. UnreadableExpression if running the script would be needed."""
        return bool(self.value(test, scope))

    # ------------------------------------------------------------------------------------------ values

    def value(self, node: ast.AST, scope: Scope) -> Any:
        """Return the value of an expression. UnreadableExpression if running the script would be needed."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.value(one, scope) for one in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:
            pairs = zip(node.keys, node.values, strict=True)
            return {self.value(key, scope): self.value(one, scope) for key, one in pairs if key is not None}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand, scope)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand, scope)
        if isinstance(node, ast.BoolOp):
            ends, found = isinstance(node.op, ast.Or), None
            for one in node.values:
                if bool(found := self.value(one, scope)) is ends:
                    break
            return found
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
            return COMPARED[type(node.ops[0])](left, right)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self.value(node.left, scope), self.value(node.right, scope))
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(self.value(one.value if isinstance(one, ast.FormattedValue) else one, scope)) for one in node.values
            )
        if isinstance(node, ast.Call) and last_name(node.func) in CASTS and len(node.args) == 1:
            return CASTS[last_name(node.func)](self.value(node.args[0], scope))
        if isinstance(node, ast.Call) and last_name(node.func) in loaded.ANSWERED:
            return loaded.answer_of(self, node, scope, self._parsed or {})
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("environ.get", "getenv")):
            return self._of_environment(node, scope)
        if isinstance(node, ast.Call) and self._configs.is_loaded(node):
            return self._configs.load(node, scope)
        if isinstance(node, ast.Call) and last_name(node.func) == "to_container" and node.args:  # of OmegaConf
            return self.value(node.args[0], scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            key, *default = (self.value(one, scope) for one in node.args)
            return loaded.held_by(self, node.func.value, scope).get(key, *default)
        if isinstance(node, ast.Call) and last_name(node.func) == "dict" and not node.args:
            return {one.arg: self.value(one.value, scope) for one in node.keywords}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXTS:
            said = str(self.value(node.func.value, scope))
            return getattr(said, node.func.attr)(*(self.value(one, scope) for one in node.args))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            return self._exported_as(str(self.value(node.slice, scope)), node)
        if isinstance(node, ast.Subscript):
            with contextlib.suppress(*UNKNOWN):
                of, around = self.resolved(node.value, scope)
                if isinstance(of, ast.Call) and last_name(of.func) == "vars":
                    return self._attribute(ast.Attribute(of.args[0], self.value(node.slice, scope)), around)
            return loaded.held_by(self, node.value, scope)[self.value(node.slice, scope)]
        if isinstance(node, (ast.Name, ast.IfExp)):
            return self.value(*self.resolved(node, scope))
        if isinstance(node, ast.Attribute):
            found, around = self.resolved(node, scope)
            return self._attribute(node, scope) if found is node else self.value(found, around)
        raise UnreadableExpression(node)

    def _of_environment(self, node: ast.Call, scope: Scope) -> Any:
        """Return an environment variable as the launch gives it, or its default."""
        given = [*node.args, *(one.value for one in node.keywords if one.arg == "default")]
        name = str(self.value(given[0], scope))
        if name in self._exported:
            return self._exported_as(name, node)
        if len(given) < 2:
            raise UnreadableExpression(node, "which has no default")
        self._environment[name] = default = self.value(given[1], scope)
        return default

    def _exported_as(self, name: str, node: ast.AST) -> str:
        """Return an environment variable as the launch gives it."""
        if name not in self._exported or "$" in self._exported[name]:
            raise UnreadableExpression(node, "which only the shell knows" if name in self._exported else "")
        return self._exported[name]

    def _is_parsed(self, node: ast.AST, scope: Scope) -> bool:
        """Return whether a value comes from TRL's command line, whose settings are given."""
        return self._parsed is not None and self._is_of_dataclasses(node, scope)

    def _is_of_dataclasses(self, node: ast.AST, scope: Scope) -> bool:
        """Return whether a value is one of the dataclasses that the script's command line becomes."""
        with contextlib.suppress(UnreadableExpression):
            node, scope = self.resolved(node, scope)
            if isinstance(node, ast.Subscript):
                return self._is_of_dataclasses(node.value, scope)
            return isinstance(node, ast.Call) and last_name(node.func) in PARSED
        return False

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        """Return a setting of the command line, an argument of argparse as it is given or by default, or the last part
        of a constant such as torch.bfloat16."""
        if (bound := scope.set_before(node)) is not None:
            self.read_statements.add(id(bound.statement))
            return self.value(bound.value, bound.scope)
        if self._is_of_dataclasses(node.value, scope):
            if node.attr in self._own and node.attr not in self._given:
                return self.value(self._own[node.attr] or node.value, self.scope)
            if self._parsed is not None and node.attr in self._known:
                return self._parsed.get(node.attr)
            if node.attr in self._own:
                self._own_taken.add(node.attr)
                return self._given[node.attr]
        if ast.unparse(node.value) in ("torch", "TaskType", "jnp"):
            return node.attr
        trees = (self._tree, *self.beside.trees)
        loaded.refuse_own_words(trees, node)
        for call in (one for tree in trees for one in ast.walk(tree)):
            if isinstance(call, ast.Call) and last_name(call.func) == "add_argument":
                flags = [
                    str(one.value).lstrip("-").replace("-", "_") for one in call.args if isinstance(one, ast.Constant)
                ]
                if node.attr not in flags:
                    continue
                if taken := [one for one in flags if one in self._given]:
                    self._arguments_taken.update(taken)
                    return self._given[taken[0]]
                said = {one.arg: one.value for one in call.keywords}
                if "default" in said:
                    return self.value(said["default"], scope)
                if "action" in said and (action := str(self.value(said["action"], scope))).startswith("store_"):
                    return {"store_true": False, "store_false": True}[action]
        with contextlib.suppress(*UNKNOWN):
            return attribute_of(self, node, scope)
        raise UnreadableExpression(node)

    # ------------------------------------------------------------------------------- arguments of a trainer

    def arguments(self, call: ast.Call, scope: Scope, script: Script, prefix: str = "") -> dict[str, Any]:
        """Return the keyword arguments of a call. Unreadable ones are noted."""
        found: dict[str, Any] = {}
        for one in call.keywords:
            try:
                if one.arg == "vllm_sampling_params":
                    found = {**loaded.sampling_of(self, *self._called(one.value, scope)), **found}
                    continue
                is_all = one.arg is None
                value = loaded.changed_dict(self, one.value, scope) if is_all else self.value(one.value, scope)
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

    def _config(self, node: ast.AST, scope: Scope, script: Script) -> dict[str, Any]:
        found, around = {}, scope
        if self._is_parsed(node, scope):
            others = [one for one in self._changed if one.arg not in self._given]
            found = self.arguments(ast.Call(ast.Name("Config"), [], others), self.scope, script)
        else:
            call, inside = self._called(node, scope)
            around = self.resolved(node, scope)[1]
            if not last_name(call.func).endswith(ARGUMENTS):
                raise UnreadableExpression(call, "its settings come from a command line or another place")
            found = self.arguments(call, inside, script)
            if call.args:
                found.setdefault("output_dir", self.value(call.args[0], inside))
        changed = re.compile(rf"{re.escape(ast.unparse(node))}\.(\w+)") if isinstance(node, ast.Name) else None
        for one in around.bound if changed is not None else ():
            if match := changed.fullmatch(one.name) if changed else None:
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
