"""The catalogue of settings: what `explain` finds in it, and what a shell offers of it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rftstream.commands import COMMANDS, cli
from rftstream.config.parts import registry
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.queries.reference import explain, settings
from rftstream.queries.reference.questions import QUESTIONS, PlainQuestion
from rftstream.queries.reference.setting_completion import complete_explained, complete_set
from rftstream.queries.reference.themes import THEMES, Theme, theme_named
from tests.commands import call, called
from tests.suite.each import each

RUN_FILE = """
[tasksets.sums]
source = "arithmetic"
[tasksets.words-2]
source = "arithmetic"
[[stages]]
steps = 1
[[stages]]
steps = 2
"""


@pytest.mark.slow
def test_every_section_and_every_part_is_in_the_catalogue() -> None:
    sections = {section.key.partition(".")[0] for section in settings.run_file_sections()}
    tables = {settings.plural_of(kind) for kind in registry.KINDS}
    assert sections | tables >= {item.name for item in dataclasses.fields(RunConfig)} - {"base"}
    assert {(part.kind, part.part) for part in settings.parts()} == {
        (kind, name) for kind in registry.KINDS for name in registry.table(kind)
    }
    every = [*settings.run_file_sections(), *settings.parts()]
    assert all(setting.meaning and setting.values for section in every for setting in section.settings)


@pytest.mark.slow
@each(
    ("asked", "keys"),
    [
        ("trainer.lr", ["trainer.lr"]),
        ("[trainer]", ["trainer"]),
        ("trainer.lr=3", ["trainer.lr"]),
        ("tasksets.mine.source", ["tasksets.NAME.source"]),
        ("tasksets", ["tasksets.NAME"]),
        ("tasksets.mine.sampling.top_p", ["sampling.top_p"]),
        ("tasksets.mine.options.terms", ["tasksets.NAME.options.terms"]),
        ("stages.1.lr", ["stages.lr"]),
        ("model.make.layers", ["model.make.layers"]),
        ("algorithms.grpo", ["algorithms.grpo"]),
        ("grpo", ["algorithms.grpo"]),
        ("grpo.clip_low", ["algorithms.grpo.clip_low"]),
        ("algorithms.dapo.clip_high", ["algorithms.dapo.clip_high"]),
        ("algorithms.ppo.critic.lr", ["algorithms.ppo.critic.lr"]),
        ("learning_rate", ["trainer.lr"]),
        ("num_processes", ["backends.deepspeed.processes"]),
        ("max length", ["sampling.max_tokens"]),
        ("how many epochs", ["tasksets.NAME.passes"]),
        ("hf", ["policies.hf", "tasksets.NAME.options"]),
        ("pipeline.solve_rate", ["pipeline"]),
        ("zero_variance", ["pipeline", "buffer.zero_variance"]),
        ("clip_ratio", ["algorithms.grpo.clip_low", "algorithms.grpo.clip_high"]),
    ],
)
def test_what_a_key_is_about(asked: str, keys: list[str]) -> None:
    found = explain.explain(asked)
    assert [one.setting.key if one.setting else one.section.key for one in found] == keys
    assert explain.to_text(found)


def test_a_kind_is_all_its_parts() -> None:
    assert [one.section.part for one in explain.explain("algorithms")] == list(registry.table("algorithm"))


@each(
    ("asked", "proposed"),
    [
        ("trainer.lrr", "did you mean trainer.lr?"),
        ("trainer.learning_rate", "did you mean trainer.lr?"),
        ("explorer.lr", "trainer.lr"),
        ("algorithms.grop", "algorithms.grpo"),
        ("trianer", "did you mean trainer"),
        ("algorithms.grpo.clip_hihg", "did you mean algorithms.grpo.clip_high?"),
        ("qqqqq", "`rftstream explain` without a name lists all sections and themes"),
        ("", "expected a setting"),
    ],
)
def test_near_names_are_proposed(asked: str, proposed: str) -> None:
    with pytest.raises(ConfigError) as error:
        explain.explain(asked)
    assert proposed in str(error.value)


@each(
    ("asked", "keys"),
    [
        ("OOM", {"trainer.tokens_per_microbatch", "explorer.max_concurrent", "model.lora"}),
        ("out of memory", {"trainer.tokens_per_microbatch"}),
        ("GPU", {"trainer.device", "explorer.devices", "trainer.colocate"}),
        ("speed", {"explorer.count", "explorer.policy", "feeder.max_staleness"}),
        ("memory", {"sampling.max_tokens", "transport.options"}),  # the theme, and the transport that is called so
        ("resume", {"trainer.checkpoint_every", "run.resume"}),
        ("learning", {"trainer.lr", "feeder.group_size"}),
        *(
            (word, {"tasksets.NAME.reward", "verifier.tries", "verifier.max_dead_share"})
            for word in ("dead_letters", "retry", "reward 0", "always 0")
        ),
        *((word, {"algorithms.dpo", "experts", "algorithms.reward_model"}) for word in ("KTO", "ORPO", "KTO trainer")),
        ("gpu memory", {"trainer.device", "trainer.tokens_per_microbatch"}),  # two themes
        ("why is the reward always zero", {"tasksets.NAME.reward", "verifier.tries"}),
        ("checkpoint", {"trainer.keep_checkpoints"}),  # no theme: words of names and meanings, in any form
        ("tokenizer", {"model.init_from"}),
        ("stale", {"pipeline", "feeder.max_staleness", "feeder.on_stale"}),  # a part, and what is called like it
        ("lr", {"trainer.lr", "stages.lr"}),
        ("hacking", {"run.stop_on"}),
        ("reward hacking", {"run.stop_on"}),
        ("early stopping", {"run.stop_reward"}),
        ("off-policy", {"feeder.max_staleness"}),
        ("overfitting", {"evaluations.NAME"}),
        ("logging", {"log", "log.level"}),
        ("lora", {"model.lora"}),
        ("KL", {"algorithms.grpo.kl_coef"}),
        ("chat templates", {"model.chat_template"}),
        ("vllm batch size", {"policies.vllm.batch_size"}),
        ("learning rate schedule", {"trainer.lr_schedule"}),
    ],
)
def test_a_theme_is_the_settings_that_matter_with_a_line_each(asked: str, keys: set[str]) -> None:
    found = explain.explain(asked)
    assert {one.setting.key if one.setting else one.section.key for one in found} >= keys
    assert all(one["why"] for one in explain.to_json(found) if one.get("key") != "run.resume" and "kind" not in one)
    text = explain.to_text(found, most=None)
    assert all(f"\n  {explain.key_of(one)} " in text for one in found if one.setting and one.line)


def test_a_list_is_ranked_and_shows_ten() -> None:
    found = explain.explain("gpu memory")
    keys = [explain.key_of(one) for one in found]
    assert set(keys[:3]) == {"trainer.colocate", "explorer.max_concurrent", "trainer.device"}  # of both, and mentioned
    assert keys.index("trainer.tokens_per_microbatch") < 10 and len(keys) == len(set(keys)) > 20
    assert next(one.line for one in found if explain.key_of(one) == "explorer.max_concurrent").startswith(
        "Explorer out"
    )
    shown, every = (CliRunner().invoke(cli, ["explain", "gpu memory", *more]).stdout for more in ([], ["--all"]))
    assert len(shown.splitlines()) == 10 + 4 and shown.count("\n\n") == 2
    assert shown.endswith(f"says more about a setting; --all lists {len(keys) - 10} more\n")
    assert len(every.splitlines()) == len(keys) + 4 and "--all" not in every
    assert len(called("explain", "gpu memory")) == len(keys)
    assert "--all" not in CliRunner().invoke(cli, ["explain", "gpu"]).stdout  # there is one more, which is shown, too


@each("theme", THEMES, ids=lambda theme: theme.name)
def test_themes_name_settings_that_there_are(theme: Theme) -> None:
    found = explain.explain(theme.name)
    assert [one.setting.key if one.setting else one.section.key for one in found if one.theme] == list(theme.settings)
    commands = set(re.findall(r"`rftstream ([a-z-]+)", " ".join([theme.about, *theme.settings.values()])))
    assert commands <= set(COMMANDS)
    assert all(len(line) <= 80 for line in theme.settings.values())
    others = {word for one in THEMES if one is not theme for word in (one.name, *one.words)}
    assert not others & {theme.name, *theme.words}


def test_the_page_of_ten_settings_says_what_explain_says() -> None:
    page = (Path(explain.__file__).parents[3] / "docs" / "ten-settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", page, re.MULTILINE)
    assert len(rows) == 10
    for key, default in rows:
        ((setting, _), *_) = [(one.setting, one.section) for one in explain.explain(key)]
        assert setting is not None
        assert default == setting.default_text.replace("unset", "none"), key
    asked = set(re.findall(r"`rftstream explain (\w+)`", page))
    assert {theme.name for word in asked if (theme := theme_named(word))} == {"memory", "gpu", "resume", "speed"}
    assert all(explain.explain(word) for word in asked - {"NAME"})


def test_a_part_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_parts_explained.py").write_text(
        '"""Rewards of mine."""\nfrom dataclasses import dataclass\n\n\nclass Near:\n    @dataclass(frozen=True)\n'
        '    class Config:\n        scale: float = 2.0\n        """How much a step counts."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = explain.explain("rewards.my_parts_explained:Near")
    assert [(one.name, one.default, one.meaning) for one in found.section.settings] == [
        ("scale", 2.0, "How much a step counts.")
    ]
    assert found.section.place == '[rewards."my_parts_explained:Near"]'
    with pytest.raises(ConfigError, match="no such module"):
        explain.explain("rewards.no_such_module_here:Near")


def test_the_command() -> None:
    (found,) = called("explain", "trainer.lr")
    assert (found["key"], found["default"], found["values"]) == ("trainer.lr", 1e-6, "number >= 0")
    assert "learning_rate" in found["elsewhere"]
    (section,) = called("explain", "trainer")
    assert {"trainer.lr", "trainer.algorithm"} <= {one["key"] for one in section["settings"]}
    assert {one["section"] for one in called("explain")} >= {"run", "trainer", "tasksets.NAME"}
    shown = CliRunner().invoke(cli, ["explain", "trainer.algorithm"])
    assert "grpo, dr_grpo" in shown.stdout
    wrong = CliRunner().invoke(cli, ["explain", "trainer.lrr", "trainer.lr", "no.such", "run.seed"])
    assert wrong.exit_code == 2 and wrong.stdout.startswith("trainer.lr\n") and "\nrun.seed\n" in wrong.stdout
    assert "did you mean trainer.lr?" in wrong.stderr and wrong.stderr.count("rftstream: ") == 2
    assert called("explain", "out", "of", "memory") == called("explain", "out of memory")
    for key in settings.all_keys():
        assert explain.explain(key), f"{key} is proposed, and not found"
    nothing = CliRunner().invoke(cli, ["explain", "no.such", "--json"])
    assert (nothing.exit_code, nothing.stdout) == (2, "")


@each("question", QUESTIONS, ids=lambda question: question.example)
def test_a_question_leads_to_the_command_that_answers_it(question: PlainQuestion) -> None:
    said = call("explain", question.example).stdout
    assert said == f"{question.example}: {question.answer}\n" == call("explain", *question.example.split()).stdout
    assert not any(one.is_asked(theme.name) for one in QUESTIONS for theme in THEMES)
    for line in re.findall(r"`rftstream ([^`]+)`", question.answer):
        command: Any = cli
        for word in line.split():
            if isinstance(command, click.Group) and not word.isupper():
                command = command.get_command(click.Context(cli), word)
                assert command is not None, line
            assert not word.startswith("--") or any(word in param.opts for param in command.params), line


# ---------------------------------------------------------------------------------------------------- completion


def offered(typed: str, *files: Path) -> list[str]:
    return [text for text, _ in complete_set(typed, files)]


def test_sections_then_keys_then_values() -> None:
    assert offered("tra") == ["trainer.", "transport.", "trackers."]
    assert offered("trainer.l") == ["trainer.lr=", "trainer.lr_schedule="]
    assert offered("trainer.lr_schedule=") == [f"trainer.lr_schedule={one}" for one in ("constant", "linear", "cosine")]
    assert offered("trainer.algorithm=gr") == ["trainer.algorithm=grpo"]
    assert offered("model.make.v") == ["model.make.vision="]
    assert offered("model.make.vision=") == ["model.make.vision=true", "model.make.vision=false"]
    assert offered("algorithms.gr") == ["algorithms.grpo."]
    assert offered("algorithms.grpo.clip") == ["algorithms.grpo.clip_low=", "algorithms.grpo.clip_high="]
    assert offered("algorithms.grpo.kl_in=") == ["algorithms.grpo.kl_in=loss", "algorithms.grpo.kl_in=reward"]
    assert offered("trainer.lr=") == []
    assert offered("no_such.thing=") == []


def test_names_are_those_of_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert offered("tasksets.") == []
    (tmp_path / "mine.toml").write_text(RUN_FILE)
    assert offered("tasksets.", Path("mine.toml")) == ["tasksets.sums.", "tasksets.words-2."]
    assert offered("tasksets.sums.rew", Path("mine.toml")) == ["tasksets.sums.reward="]
    assert offered("stages.", Path("mine.toml")) == ["stages.0.", "stages.1."]
    assert offered("tasksets.", Path("missing.toml")) == []
    (tmp_path / "rftstream.toml").write_text("[tasksets.usual]\n")
    assert offered("tasksets.") == ["tasksets.usual."]
    assert "tasksets.usual.source=jsonl:" in offered("tasksets.usual.source=")
    assert "tasksets.usual.reward=math" in offered("tasksets.usual.reward=")


def test_keys_of_explain() -> None:
    def texts(typed: str) -> list[str]:
        return [text for text, _ in complete_explained(typed)]

    assert texts("trainer.l") == ["trainer.lr", "trainer.lr_schedule"]
    assert "algorithms" in texts("al")
    assert "algorithms.grpo" in texts("algorithms.g")
    assert texts("algorithms.grpo.clip") == ["algorithms.grpo.clip_low", "algorithms.grpo.clip_high"]


def test_settings_of_trl_without_a_name_here_are_said_to_be_so_and_findings_name_their_word() -> None:
    said = call("explain", "logging_steps", "trainer.lr", "eval_strategy", "word_steps").stdout
    assert "logging_steps, of TRL: the log keeps every completion" in said
    assert "eval_strategy, of TRL: evaluations.NAME.every" in said and "Learning rate of AdamW" in said
    assert said.count("nothing mentions all of") == 1 and "nothing mentions all of word_steps;" in said
    assert [one["meaning"].split(",")[0] for one in called("explain", "logging_steps")] == ["logging_steps"]
