"""What a wrong run file or `--set` is told: in the words of TOML, with one suggestion."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.config import load
from rftstream.errors import ConfigError

FINE = """
run = { name = "tiny", steps = 2 }
model = { path = "model" }
tasksets.sums = { source = "arithmetic", reward = "exact" }
"""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("steps=3", r"^--set steps: unknown section; did you mean run\.steps\?$"),
        ("trainr.lr=1", r"^--set trainr: unknown section; known: .*; did you mean 'trainer'\?$"),
        ("trainer.lrr=1", r"^--set trainer\.lrr: unknown key; .*; did you mean 'lr'\?$"),
        ("run=3", r"^--set run: got 3, expected a section$"),
        ("tasksets.sums=3", r"^--set tasksets\.sums: got 3, expected a section$"),
        ("trainer.adam_betas=[1]", r"^--set trainer\.adam_betas: got \[1\], expected a list of length 2$"),
        ("stages=3", r"^--set stages: got 3, expected a list$"),
        ("stages.steps=3", r"^--set stages: got a section, expected a list; .* \[\[stages\]\]$"),
        ("trainer.lr=inf", r"^--set trainer\.lr: got inf, expected a finite number$"),
        (
            "tasksets.sums.options.low=[1, nan]",
            r"^--set tasksets\.sums\.options\.low\.1: got nan, expected a finite number$",
        ),
        ("algorithms.grpo.kl_coef=-inf", r"^--set algorithms\.grpo\.kl_coef: got -inf, expected a finite number$"),
        ("log.level=INFO", r"^--set log\.level: got 'INFO'; known: .*; did you mean 'info'\?$"),
        (
            "run.seed=9223372036854775808",
            r"^--set run\.seed: got 9223372036854775808, expected an integer of at most 64 bits$",
        ),
        ("trainer.adam_betas=[0.9, 1.0]", r"^--set trainer\.adam_betas\.1: got 1\.0, expected float < 1\.0$"),
        ("transport.servers=x:1", r"^--set transport\.servers: given without transport\.kind, .* add kind = \"kafka\""),
        ("transport.options.acks=1", r"^--set transport\.options: given without transport\.kind"),
        (".=3", r"^--set \.=3: expected section\.key=value$"),
        ("=3", r"^--set =3: expected section\.key=value$"),
    ],
)
def test_a_wrong_setting_is_told_what_was_expected(tmp_path: Path, wrong: str, said: str) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(FINE)
    assert load([file], env={}).run.name == "tiny"
    with pytest.raises(ConfigError, match=said):
        load([file], sets=[wrong], env={})


@pytest.mark.parametrize(
    ("more", "env", "sets", "said"),
    [
        ("trainer.lr = -1", {}, [], r"^{file}: trainer\.lr: got -1, expected float >= 0\.0$"),
        ("trainer.lr = -1", {}, ["trainer.device=cpu"], r"^{file}: trainer\.lr: got -1"),
        ("trainer.lr = 1", {"RFTSTREAM__TRAINER__LR": "-2"}, [], r"^RFTSTREAM__TRAINER__LR: trainer\.lr: got -2"),
        ("trainer.lr = 1", {"RFTSTREAM__TRAINER__LR": "-2"}, ["trainer.lr=-3"], r"^--set trainer\.lr: got -3"),
        ("", {}, ["trainer={lr=-3}"], r"^--set trainer\.lr: got -3"),
        ("stages = [{steps = 1}, {steps = 0}]", {}, ["run.seed=1"], r"^{file}: stages\.1\.steps: got 0"),
        ("stages = [{steps = 1}]", {}, ["stages.0.steps=0"], r"^--set stages\.0\.steps: got 0"),
        ("", {}, ["run={name='x'}"], r"^{file}: run: nothing ends it"),
        ("[experts]\nratio = 0", {}, [], r"^{file}: experts\.ratio: got 0"),
    ],
)
def test_an_error_names_who_gave_the_setting(
    tmp_path: Path, more: str, env: dict[str, str], sets: list[str], said: str
) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(FINE.replace(", steps = 2", "") + more if "stages" in more else FINE + more)
    with pytest.raises(ConfigError, match=said.format(file=file)):
        load([file], sets=sets, env=env)


def test_of_several_files_the_one_with_the_setting_is_named(tmp_path: Path) -> None:
    base, mine, empty = (tmp_path / name for name in ("base.toml", "mine.toml", "empty.toml"))
    base.write_text(FINE)
    mine.write_text("[trainer]\nlr = -1\n")
    empty.write_text("")
    with pytest.raises(ConfigError, match=rf"^{mine}: trainer\.lr: got -1"):
        load([base, mine], env={})
    with pytest.raises(ConfigError, match=rf"^{mine}, {empty}: \[run\]: missing; every run file needs"):
        load([mine, empty], env={})
