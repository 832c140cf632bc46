"""What a wrong run file or `--set` is told: in the words of TOML, with one suggestion."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rftstream.config.loader import load
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.launch.start import as_sets

FINE = """
run = { name = "tiny", steps = 2 }
model = { path = "model" }
tasksets.sums = { source = "arithmetic", reward = "exact" }
"""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("steps=3", r"^--set steps: unknown section; did you mean run\.steps\?$"),
        ("trainr.lr=1", r"^--set trainr: unknown section; did you mean 'trainer'\?$"),
        ("trainer.lrr=1", r"^--set trainer\.lrr: unknown key; did you mean 'lr'\?$"),
        ("feeder.grup_size=1", r"^--set feeder\.grup_size: unknown key; known: group_size, .* mean 'group_size'\?$"),
        ("transport.server=x", r"^--set transport\.server: unknown key; .*did you mean 'servers'\?$"),
        ("trainer.learning_rate=1", r"^--set trainer\.learning_rate: unknown key; did you mean 'lr'\?$"),
        ("trainer.adam-beta1=1", r"^--set trainer\.adam-beta1: unknown key; did you mean 'adam_betas'\?$"),
        ("trainer.temperature=1", r"^--set trainer\.temperature: unknown key; did you mean sampling\.temperature\?$"),
        ("sampling.max_new_tokens=1", r"^--set sampling\.max_new_tokens: unknown key; did you mean 'max_tokens'\?$"),
        ("sampling_temperature=1", r"^--set sampling_temperature: unknown section; did you mean sampling\.temperature"),
        ("tasksets.sums.reward_funcs=x", r"^--set tasksets\.sums\.reward_funcs: unknown key; did you mean 'reward'\?$"),
        ("sampling.temperature=-1", r"^--set sampling\.temperature: got -1\.0, expected at least 0$"),
        ("tasksets.sums.sampling.top_p=2", r"^--set tasksets\.sums\.sampling\.top_p: got 2\.0, expected in \(0, 1\]$"),
        (
            "sampling.grammar={regx='a'}",
            r"^--set sampling\.grammar\.regx: unknown kind of form; known: choice",
        ),
        ("sampling.grammar={regex=3}", r"^--set sampling\.grammar\.regex: got 3, expected a regular expression$"),
        ("sampling.grammar={regex='a', choice=['b']}", r"^--set sampling\.grammar: got regex and choice, expected one"),
        ("sampling.min_tokens=999", r"^--set sampling\.min_tokens: got 999, expected between 0 and max_tokens$"),
        (
            "run.name=My Run",
            r"^--set run\.name: got 'My Run', expected lower case letters, digits, .* e\.g\. 'words-2'$",
        ),
        ("run.name=" + "x" * 231, r"^--set run\.name: got 'x+', expected lower case letters, .* at most 230, "),
        ("tasksets." + "x" * 231 + '.source="arithmetic"', r"got 'x+' as the name of a section, .* at most 230, "),
        ("feeder.groups_per_batch=65537", r"groups_per_batch: got 65,537, expected at most 65,536; the manifest of a"),
        (
            "feeder.group_size=65537",
            r"group_size: got 65,537, expected at most 25,845; the outcome of a",
        ),
        ("stages=[{steps=1,name='A B'}]", r"^--set stages\.0\.name: got 'A B', expected lower case letters, digits"),
        (
            'tasksets.Sums.source="arithmetic"',
            r"^--set tasksets\.\"Sums\": got 'Sums' as the name of a section, .* case",
        ),
        ("run=3", r"^--set run: got 3, expected a section$"),
        ("tasksets.sums=3", r"^--set tasksets\.sums: got 3, expected a section$"),
        ("trainer.adam_betas=[1]", r"^--set trainer\.adam_betas: got \[1\], expected a list of length 2$"),
        ("stages=3", r"^--set stages: got 3, expected a list$"),
        ("stages.steps=3", r"^--set stages: got a section, expected a list; .* \[\[stages\]\]$"),
        ("explorer.devices={a=1}", r"^--set explorer\.devices: got {'a': 1}, expected a list$"),
        ("trainer.lr=fast", r"^--set trainer\.lr: got 'fast', expected a number$"),
        ("run.steps=1.5", r"^--set run\.steps: got 1\.5, expected a whole number$"),
        ("run.name=3", r"^--set run\.name: got 3, expected text$"),
        ("tasksets.sums.shuffle=yes", r"^--set tasksets\.sums\.shuffle: got 'yes', expected true or false$"),
        ("explorer.devices=cpu", r"^--set explorer\.devices: got 'cpu', expected a list, as in \[\"cpu\"\]$"),
        ("explorer.count=1.5", r"^--set explorer\.count: got 1\.5, expected a whole number or 'auto'$"),
        ("verifier.tries=true", r"^--set verifier\.tries: got true, expected a whole number$"),
        ("trainer.lr=inf", r"^--set trainer\.lr: got inf, expected a finite number$"),
        (
            "tasksets.sums.options.low=[1, nan]",
            r"^--set tasksets\.sums\.options\.low\.1: got nan, expected a finite number$",
        ),
        ("algorithms.grpo.kl_coef=-inf", r"^--set algorithms\.grpo\.kl_coef: got -inf, expected a finite number$"),
        ("log.level=INFO", r"^--set log\.level: got 'INFO'; known: .*; did you mean 'info'\?$"),
        (
            "run.seed=9223372036854775808",
            r"^--set run\.seed: got 9223372036854775808, expected a whole number of at most 64 bits$",
        ),
        ("trainer.adam_betas=[0.9, 1.0]", r"^--set trainer\.adam_betas\.1: got 1\.0, expected a number < 1$"),
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


def test_a_difference_that_does_not_go_with_the_rest_is_the_one_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(FINE)
    sets = ["sampling.min_tokens=3", "tasksets.sums.sampling.max_tokens=2"]
    said = r"^--set tasksets\.sums\.sampling\.max_tokens: got 2, expected at least min_tokens = 3"
    with pytest.raises(ConfigError, match=said):
        load([file], sets=sets, env={})


def test_no_pattern_is_without_words() -> None:
    """A regular expression explains nothing to whoever names a run."""

    def patterns(info: Any, described: bool = False) -> Iterator[str]:
        if isinstance(info, msgspec.inspect.Metadata):
            yield from patterns(info.type, "description" in (info.extra_json_schema or {}))
        elif getattr(info, "pattern", None) is not None and not described:
            yield info.pattern
        for name in ("type", "key_type", "value_type", "item_type"):
            inner = None if isinstance(info, msgspec.inspect.Metadata) else getattr(info, name, None)
            if isinstance(inner, msgspec.inspect.Type):
                yield from patterns(inner)
        for one in (*getattr(info, "types", ()), *(field.type for field in getattr(info, "fields", ()))):
            yield from patterns(one)

    assert list(patterns(msgspec.inspect.type_info(RunConfig))) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainer]\nlr = 1\ndevice = 'cpu'\nlr = 2\n", "line 4: trainer.lr: given twice, first in line 2; keep one"),
        (
            "[trainer]\nlr = 1\n[run]\nseed = 1\n[trainer]\nx = 2\n",
            "line 5: [trainer]: this section was begun in line 1",
        ),
        ("[trainer]\nlr = 1\n[trainer.lr]\nx = 1\n", "line 3: trainer.lr: line 2 gives trainer.lr already"),
        ("run = {seed = 1}\n[run]\nsteps = 2\n", "line 2: run: line 1 gives run already, and both cannot be"),
        ('[a]\nx = """1\n2"""\nx = """3\n4"""\n', "line 4: a.x: given twice, first in line 2"),
        (
            "[run]\nname = abc\n",
            "line 2: run.name: found 'name = abc', which is not TOML: invalid value; texts stand in",
        ),
        ("[run]\nname 3\n", "line 2: found 'name 3', which is not TOML: expected '=' after a key"),
        ("[run]\nx = [1,\n2\n", "line 2: run.x: not TOML: unclosed array"),
    ],
)
def test_what_is_not_toml_is_told_with_its_line_and_its_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as told:
        load([file], env={})
    assert str(told.value).startswith(f"{file}: {said}")


@pytest.mark.parametrize(
    ("more", "env", "sets", "said"),
    [
        ("trainer.lr = -1", {}, [], r"^{file}: trainer\.lr: got -1, expected a number >= 0$"),
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


def test_a_setting_that_is_taken_away_has_its_default_again(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(FINE + "[verifier]\ntries = 7\ngroup_timeout_s = 3.0\n")
    config = load(
        [file], sets=["verifier.tries=unset", "verifier.group_timeout_s=unset", "verifier.count=unset"], env={}
    )
    assert (config.verifier.tries, config.verifier.group_timeout_s) == (3, None)
    assert load([file], sets=as_sets({"verifier.tries": None}), env={}).verifier.tries == 3
    assert as_sets({"a.reward": [{"name": as_sets}]}) == ['a.reward=[{ name = "rftstream.launch.start:as_sets" }]']
    for unnamed in (lambda: None, partial(load), type("Own", (), {"__module__": "__main__"})):
        with pytest.raises(
            ConfigError, match=r"^a.reward: got .* itself, which the run's own processes cannot import; write it"
        ):
            as_sets({"a.reward": unnamed})
    assert load([file], env={"RFTSTREAM__VERIFIER__TRIES": "unset"}).verifier.tries == 3
    assert load([file], sets=['run.name="unset"'], env={}).run.name == "unset"
    untouched = load(
        [file], sets=["retention.checkpoints=unset", "experts.source=unset", "stages.0.steps=unset"], env={}
    )
    assert untouched == load([file], env={}), "no section begins: [retention] alone deletes"
    with pytest.raises(ConfigError, match=r"^--set verifier\.trys: unknown key; .*did you mean 'tries'"):
        load([file], sets=["verifier.trys=unset"], env={})


def test_of_several_files_the_one_with_the_setting_is_named(tmp_path: Path) -> None:
    base, mine, empty = (tmp_path / name for name in ("base.toml", "mine.toml", "empty.toml"))
    base.write_text(FINE)
    mine.write_text("[trainer]\nlr = -1\n")
    empty.write_text("")
    with pytest.raises(ConfigError, match=rf"^{mine}: trainer\.lr: got -1"):
        load([base, mine], env={})
    with pytest.raises(ConfigError, match=rf"^{mine}, {empty}: \[run\]: missing; every run file needs"):
        load([mine, empty], env={})
    (tmp_path / "bare.toml").write_text("[run]\nname = 'a'\n[model]\n")
    with pytest.raises(ConfigError, match=r"\[model\]: nothing in it; every run file needs"):
        load([tmp_path / "bare.toml"], env={})
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    with pytest.raises(ConfigError, match=r"is data, expected a run file; `rftstream init --tasks .*train\.jsonl`"):
        load([tmp_path / "train.jsonl"], env={})


@pytest.mark.parametrize(
    ("later", "env", "sets", "left"),
    [
        ('model.init_from = "run"', {}, (), {"init_from"}),
        ("model.make.width = 8", {}, (), {"make"}),
        ("model.dtype = 'float32'", {}, (), {"path"}),
        ("run.steps = 3", {"RFTSTREAM__MODEL__MAKE__WIDTH": "8"}, (), {"make"}),
        ("model.make.width = 8", {}, ("model.path=other",), {"path"}),
        ("model.make.width = 8", {}, ("model.make.width=16",), {"make"}),
        ("model = { path = 'other', init_from = 'run' }", {}, (), None),
        ("", {"RFTSTREAM__MODEL__PATH": "a", "RFTSTREAM__MODEL__INIT_FROM": "b"}, (), None),
        ("", {}, ("model.path=a", "model.init_from=b"), None),
        ("", {}, ("model.init_from=unset",), {"path"}),
        ("", {"RFTSTREAM__MODEL__INIT_FROM": "unset"}, (), {"path"}),
        ("model.make.width = 8", {}, ("model.path=unset",), {"make"}),
        ("", {}, ("=a",), None),
    ],
)
def test_a_later_source_replaces_the_origin_of_the_model(
    tmp_path: Path, later: str, env: dict[str, str], sets: tuple[str, ...], left: set[str] | None
) -> None:
    for name, text in (("a.toml", FINE), ("b.toml", later)):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    if left is None:
        with pytest.raises(ConfigError, match=r"expected (exactly one of path|section\.key=value)"):
            load(files, env=env, sets=sets)
        return
    model = load(files, env=env, sets=sets).model
    assert {name for name in ("path", "make", "init_from") if getattr(model, name) is not None} == left
