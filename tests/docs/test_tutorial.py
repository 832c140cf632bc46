"""The blocks of the tutorial run in order in an empty folder, with few steps; those of Kafka on a real broker."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tests.broker.conftest import run_id, servers  # noqa: F401  the fixtures of a real broker
from tests.docs.following import FEW_STEPS, Reader, assert_all_are_marked
from tests.docs.reading import ROOT, Block, blocks
from tests.e2e.workplace import Workplace

PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = [block for block in blocks(PAGE) if block.kind]
ADDRESS, NAME = "127.0.0.1:9092", "letters-kafka"


def test_what_can_be_run_is_marked() -> None:
    assert_all_are_marked(PAGE)


@pytest.mark.sampled(1, "tutorial")
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.heavy("every command of the page runs, with processes of their own")
def test_on_this_machine(place: Workplace) -> None:
    follow("local", place)


@pytest.mark.sampled(1, "tutorial")
@pytest.mark.broker
def test_on_kafka(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:  # noqa: F811
    name = run_id()
    follow("kafka", place, {ADDRESS: servers, NAME: name})


def follow(name: str, place: Workplace, instead: Mapping[str, str] | None = None) -> None:
    """`instead`: what stands in the page for what is there in the test."""
    reader = Reader(place, FEW_STEPS)  # the fake policy writes digits, of which the models here know none
    for block in BLOCKS:
        text = block.text
        for old, new in (instead or {}).items():
            text = text.replace(old, new)
        block = replace(block, text=text)
        if block.kind == "file":
            reader.write_files([block])
        elif block.name == f"{name}, interrupted":
            interrupt(block, reader)
        elif block.name == name:
            reader.do(block)


def interrupt(block: Block, reader: Reader) -> None:
    """Ctrl-C once steps are trained, of a run that does not end by itself."""
    (command,) = block.commands
    process = reader.start(f"{command} --progress plain", RFTSTREAM__RUN__STEPS="1000000")
    reader.place.wait_for(lambda: re.search(r"^step [1-9]", process.out, re.MULTILINE), "a step")
    process.send(signal.SIGINT)
    reader.ended_well(command, process.finish())
    reader.compare(block)
