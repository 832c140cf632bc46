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
        ("steps=3", r"^steps: unknown section; did you mean run\.steps\?$"),
        ("trainr.lr=1", r"^trainr: unknown section; known: .*; did you mean 'trainer'\?$"),
        ("trainer.lrr=1", r"^trainer\.lrr: unknown key; .*; did you mean 'lr'\?$"),
        ("run=3", r"^run: got 3, expected a section$"),
        ("tasksets.sums=3", r"^tasksets\.sums: got 3, expected a section$"),
        ("trainer.adam_betas=[1]", r"^trainer\.adam_betas: got \[1\], expected a list of length 2$"),
        ("stages=3", r"^stages: got 3, expected a list$"),
        ("stages.steps=3", r"^stages: got a section, expected a list; .* \[\[stages\]\]$"),
        ("trainer.lr=inf", r"^trainer\.lr: got inf, expected a finite number$"),
        ("tasksets.sums.options.low=[1, nan]", r"^tasksets\.sums\.options\.low\.1: got nan, expected a finite number$"),
        ("algorithms.grpo.kl_coef=-inf", r"^algorithms\.grpo\.kl_coef: got -inf, expected a finite number$"),
        (
            "run.seed=9223372036854775808",
            r"^run\.seed: got 9223372036854775808, expected an integer of at most 64 bits$",
        ),
        ("trainer.adam_betas=[0.9, 1.0]", r"^trainer\.adam_betas\.1: got 1\.0, expected float < 1\.0$"),
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
