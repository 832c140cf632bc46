"""Every setting of ours that the page names exists and has the default that the page says; its commands run."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from itertools import takewhile
from typing import Any

import pytest

from rftstream.algorithms.grpo import Grpo
from rftstream.algorithms.ppo import Ppo
from rftstream.algorithms.ratios import Dppo
from rftstream.algorithms.settings import CriticConfig
from rftstream.backends.deepspeed.backend import DeepSpeedBackend
from rftstream.backends.torch.backend import TorchBackend
from rftstream.commands import COMMANDS
from rftstream.config import aliases
from rftstream.config.parts import registry
from rftstream.config.sections import (
    EvaluationSection,
    LoraSection,
    ModelSection,
    RunConfig,
    RunSection,
    TasksetSection,
)
from rftstream.policies.vllm.policy import VllmPolicy
from rftstream.queries.reference import explain
from tests.docs.following import FEW_STEPS, NO_MODEL, Reader, assert_all_are_marked
from tests.docs.reading import ROOT, blocks, read
from tests.e2e.workplace import Workplace
from tests.suite.each import each

PAGES = {
    "TRL": ROOT / "docs" / "coming-from-trl.md",
    "verl": ROOT / "docs" / "coming-from-verl.md",
    "prime-rl": ROOT / "docs" / "coming-from-prime-rl.md",
    "Trinity-RFT": ROOT / "docs" / "coming-from-trinity-rft.md",
}
HEADER = "| there | default | here | default | remark |"
NONE_YET = "*none yet*"
OF_PARTS = {
    "tasksets.NAME": TasksetSection,
    "evaluations.NAME": EvaluationSection,
    "algorithms.grpo": Grpo.Config,
    "algorithms.dppo": Dppo.Config,
    "algorithms.ppo": Ppo.Config,
    "algorithms.ppo.critic": CriticConfig,
    "backends.deepspeed": DeepSpeedBackend.Config,
    "backends.torch": TorchBackend.Config,
    "policies.vllm": VllmPolicy.Config,
}
ROWS = [
    (system, [cell.strip() for cell in line.strip("|").split("|")])
    for system, page in PAGES.items()
    for line in takewhile(lambda line: line.startswith("|"), read(page).partition(f"{HEADER}\n")[2].splitlines())
    if not line.startswith("|-")
]


def default_of(setting: str) -> Any:
    """KeyError if there is no such setting."""
    section, _, name = setting.rpartition(".")
    owner = OF_PARTS.get(section) or _section(section)
    field = {item.name: item for item in dataclasses.fields(owner)}[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "required" if field.default is dataclasses.MISSING else field.default


def _section(name: str) -> Any:
    if not name:
        return RunConfig
    field = {item.name: item for item in dataclasses.fields(RunConfig)}[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return {"run": RunSection, "model": ModelSection}[name]


def written(text: str) -> Any:
    words = {"none": None, "required": "required"}
    return words[text] if text in words else tomllib.loads(f"value = {text}")["value"]


@each(("section", "row"), ROWS, ids=[f"{section}: {row[0]}" for section, row in ROWS])
def test_settings_exist_and_have_these_defaults(section: str, row: list[str]) -> None:
    there, _, here, default, remark = row
    assert there
    for setting in re.findall(r"`((?:\w+\.)+\w+)`", remark):
        default_of(setting)
    if here == NONE_YET:
        assert default == ""
        return
    (setting,) = re.findall(r"^`([\w.]+)`$", here)
    found = default_of(setting)
    assert written(default) == (list(found) if isinstance(found, tuple) else found)


def test_what_there_is_is_not_told_as_none_yet() -> None:
    """A part that the others call alike, and what another name leads to here, have a row of their own."""
    parts = {name for kind in registry.KINDS for name in registry.table(kind)} - {"log"}
    named = {name.rpartition(".")[2] for _, row in ROWS if row[2] == NONE_YET for name in row[0].split(", ")}
    assert not named & (parts | set(aliases.SETTINGS))
    assert not re.findall(
        r"(?:environments|processors?|tools|reward models?|value head)[^|]*: none yet",
        "".join(map(read, PAGES.values())),
    )


def test_all_four_are_told() -> None:
    assert {section for section, _ in ROWS} == set(PAGES)
    first = read(ROOT / "docs" / "coming-from.md")
    assert all(f"({page.name})" in first for page in PAGES.values())
    screen = "\n".join(first.splitlines()[:24])
    assert "rftstream convert-config trl" in screen
    for asked in re.findall(r"^rftstream explain ([\w ]+?)(?:  #.*)?$", screen, re.MULTILINE):
        assert all(explain.explain(word) for word in asked.split())
    assert "rftstream explain num_generations" in screen


@pytest.mark.sampled(2, "pages")
@pytest.mark.process
@pytest.mark.slow
def test_what_is_a_mode_there_is_a_command_here(place: Workplace) -> None:
    page = PAGES["Trinity-RFT"]
    assert_all_are_marked(page)
    place.write("examples/arithmetic.toml", (ROOT / "examples" / "arithmetic.toml").read_text(encoding="utf-8"))
    reader = Reader(place, {**FEW_STEPS, **NO_MODEL})
    for block in blocks(page, "console"):
        if block.name.endswith(", together"):
            reader.together(block.commands)
            reader.run("rftstream audit examples/arithmetic.toml")
        else:
            reader.do(block)
    for folder in ("runs/trained/final", "served"):
        assert (place.folder / folder / "model.safetensors").is_file()


def test_other_names_lead_to_settings_that_there_are() -> None:
    owners = {"trackers", "transport", "buffer"}
    for name, meant in aliases.SETTINGS.items():
        for setting in meant:
            if setting.startswith("model.lora."):
                assert setting.rpartition(".")[2] in LoraSection.__annotations__, name
            elif setting.partition(".")[0] in owners:
                section, _, key = setting.partition(".")
                assert key in {item.name for item in dataclasses.fields(_section(section))}, name
            else:
                default_of(setting)
    assert set(aliases.COMMANDS.values()) <= set(COMMANDS)
    assert not set(aliases.COMMANDS) & set(COMMANDS)


@pytest.mark.parametrize("system", ["TRL", "verl", "prime-rl"])
def test_each_name_leads_to_the_setting_that_the_page_names(system: str) -> None:
    wrong = []
    rows = [row for section, row in ROWS if section == system]
    assert len(rows) > 40
    for there, _, here, _, remark in rows:
        setting = here.strip("`")
        for name in there.partition(" (")[0].split(", "):
            if here == NONE_YET or name in ("model", "[[env]] id") or ends_alike(name, setting):
                continue
            meant = aliases.meant(name)
            if not any(one.startswith(setting) or f"`{one}`" in remark for one in meant):
                wrong.append((name, setting))
    assert wrong == []


def ends_alike(name: str, setting: str) -> bool:
    return name.rpartition(".")[2] == setting.rpartition(".")[2]
