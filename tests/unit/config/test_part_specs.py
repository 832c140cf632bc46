"""What parts declare: built-in ones in their tables, users' own by attributes of their classes."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftstream.algorithms import ALGORITHMS
from rftstream.config.parts import part_specs, registry
from rftstream.config.parts.part_names import check_teacher
from rftstream.config.parts.part_specs import (
    AlgorithmSpec,
    EnvironmentSpec,
    PartSpec,
    PolicySpec,
    TransportSpec,
)
from rftstream.config.role_sections import TrackersSection
from rftstream.data.tasksets import TASKSETS
from rftstream.errors import ConfigError
from rftstream.policies import POLICIES
from rftstream.runs.folder import RunFolder, open_transport
from rftstream.trackers import TRACKERS
from tests.flow.scene import make_config
from tests.suite.each import each

OWN_PARTS = """
from rftstream.algorithms.opd import Opd
from rftstream.algorithms.clips import ReMax
from rftstream.environments.single_turn import SingleTurn
from rftstream.transport.embedded.transport import EmbeddedTransport

class Plain:
    pass

class Engine:
    loads_model = True
    takes_weights = False

class Wrong:
    loads_model = "yes"

class OwnReMax(ReMax):
    compares_siblings = True

class OwnOpd(Opd):
    pass

class Slow(EmbeddedTransport):
    pass

class Longer(SingleTurn):
    pass

class Told:
    takes_create = True

    def __init__(self, run, section, *, create=True):
        self.told = (run, create)

class Untold:
    def __init__(self, run, section):
        self.told = (run,)
"""


@pytest.fixture
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "parts_for_specs.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("parts_for_specs", None)


# ------------------------------------------------------------------------------------------------ built-in parts


@each("kind", registry.KINDS)
def test_the_records_of_a_table_are_of_its_kind(kind: str) -> None:
    assert {type(record).kind for record in registry.table(kind).values()} == {kind}


def test_a_built_in_part_is_not_imported() -> None:
    sys.modules.pop("rftstream.environments.single_turn", None)
    assert registry.spec(EnvironmentSpec, "single_turn").has_one_turn
    assert not registry.spec(EnvironmentSpec, "single_turn").gives_reward
    assert "rftstream.environments.single_turn" not in sys.modules


def test_settings_that_records_name_exist() -> None:
    for name, record in POLICIES.items():
        assert not record.update_setting or hasattr(registry.resolve("policy", name).Config, record.update_setting)
    for name, algorithm in ALGORITHMS.items():
        setting = algorithm.max_tokens_setting
        assert not setting or hasattr(registry.resolve("algorithm", name).Config(), setting), (
            f"{name}: its Config has no field {setting!r}, which its line in ALGORITHMS names as max_tokens_setting"
        )
    assert list(TRACKERS) == [field.name for field in dataclasses.fields(TrackersSection)]


def test_methods_that_records_promise_exist() -> None:
    for name, record in TASKSETS.items():
        assert hasattr(registry.resolve("taskset", name), "open_rows") == record.has_rows
        assert not record.has_rows or record.location != "name"


def test_modules_that_are_imported_before_the_fork_exist() -> None:
    records = [record for kind in registry.KINDS for record in registry.table(kind).values()]
    own = {module for record in records for module in record.preload if module.startswith("rftstream.")}
    assert own
    assert not [module for module in own if importlib.util.find_spec(module) is None]


def test_every_capability_has_a_default() -> None:
    """A user's part declares only what is different."""
    for spec_type in (
        part for part in vars(part_specs).values() if isinstance(part, type) and issubclass(part, PartSpec)
    ):
        assert spec_type("m:Thing").path == "m:Thing"


# ------------------------------------------------------------------------------------------------ users' own parts


@pytest.mark.usefixtures("own_parts")
def test_attributes_of_a_users_class_are_its_declaration() -> None:
    record = registry.spec(PolicySpec, "parts_for_specs:Engine")
    assert record == PolicySpec("parts_for_specs:Engine", loads_model=True, takes_weights=False)
    assert registry.spec(PolicySpec, "parts_for_specs:Plain") == PolicySpec("parts_for_specs:Plain")


@pytest.mark.usefixtures("own_parts")
def test_a_users_class_has_what_its_built_in_base_declares() -> None:
    record = registry.spec(AlgorithmSpec, "parts_for_specs:OwnReMax")
    assert record.greedy_baseline
    assert record.compares_siblings


@pytest.mark.usefixtures("own_parts")
def test_a_users_transport_is_built_as_one_whatever_it_inherits_from() -> None:
    assert not registry.spec(TransportSpec, "parts_for_specs:Slow").in_run_folder


@pytest.mark.usefixtures("own_parts")
def test_a_users_environment_may_have_more_turns_than_the_one_it_inherits_from() -> None:
    assert not registry.spec(EnvironmentSpec, "parts_for_specs:Longer").has_one_turn


@pytest.mark.usefixtures("own_parts")
def test_a_declaration_of_another_type_is_an_error() -> None:
    expected = "parts_for_specs:Wrong.loads_model: got 'yes', expected true or false"
    with pytest.raises(ConfigError, match=expected):
        registry.spec(PolicySpec, "parts_for_specs:Wrong")
    with pytest.raises(ConfigError, match=expected):
        registry.find_spec(PolicySpec, "parts_for_specs:Wrong")


@pytest.mark.parametrize("name", ["nothing_like_it", "no_such_module:Thing", "rftstream.policies.hf.policy:NoThing"])
def test_of_a_part_that_is_not_there_nothing_is_known(name: str) -> None:
    assert registry.find_spec(PolicySpec, name) == PolicySpec(name)
    with pytest.raises(ConfigError, match=r"explorer\.policy: "):
        registry.spec(PolicySpec, name, where="explorer.policy")


@pytest.mark.usefixtures("own_parts")
def test_a_users_algorithm_can_need_a_teacher() -> None:
    config = make_config(trainer__algorithm="parts_for_specs:OwnOpd")
    with pytest.raises(ConfigError, match="expected one for the algorithm 'parts_for_specs:OwnOpd'"):
        check_teacher(config)
    check_teacher(make_config(trainer__algorithm="parts_for_specs:OwnReMax"))


@pytest.mark.usefixtures("own_parts")
def test_a_users_transport_is_told_whether_to_make_the_log_if_it_takes_that(tmp_path: Path) -> None:
    def told(name: str) -> object:
        config = make_config(transport__kind=f"parts_for_specs:{name}")
        return open_transport(config, RunFolder(tmp_path / "run"), create=False).told  # type: ignore[attr-defined]

    assert told("Told") == ("run", False)
    assert told("Untold") == ("run",)
