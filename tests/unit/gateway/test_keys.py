"""Keys: each opens one rollout of one run, nobody makes another's, and the secret stays with this user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftstream.errors import ConfigError
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys, KeyOwner, run_secret, secret_file

KEYS = GatewayKeys(b"0123456789abcdef", "run-1")


def test_a_key_names_its_rollout() -> None:
    key = KEYS.rollout_key("sums/0/3/0/1")
    assert key.startswith("rft-") and "/" not in key
    assert KEYS.owner_of(key) == KeyOwner("sums/0/3/0/1", "")
    assert KEYS.rollout_key("sums/0/3/0/2") != key


@pytest.mark.law("fencing")
def test_keys_of_other_runs_and_secrets_open_nothing() -> None:
    key = KEYS.rollout_key("sums/0/3/0/1")
    assert GatewayKeys(b"0123456789abcdef", "run-2").owner_of(key) is None
    assert GatewayKeys(b"0123456789abcdeF", "run-1").owner_of(key) is None


@pytest.mark.law("fencing")
def test_a_key_with_the_name_of_another_rollout_opens_nothing() -> None:
    own, other = KEYS.rollout_key("sums/0/3/0/1"), KEYS.rollout_key("sums/0/3/0/2")
    assert KEYS.owner_of(other.partition(".")[0] + "." + own.partition(".")[2]) is None


@settings(deadline=None)
@given(st.text())
def test_whatever_is_sent_opens_nothing(text: str) -> None:
    for key in (text, f"rft-{text}", f"rft-{text}.{text}"):
        assert KEYS.owner_of(key) is None
        assert not KEYS.is_session_token(key)


def test_the_token_of_the_run_is_no_key_of_a_rollout() -> None:
    token = KEYS.session_token()
    assert KEYS.is_session_token(token) and KEYS.owner_of(token) is None
    assert not KEYS.is_session_token(KEYS.rollout_key("run"))
    assert not GatewayKeys(b"0123456789abcdef", "run-2").is_session_token(token)


def test_the_secret_is_made_once_and_for_this_user_alone(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    secret = run_secret("runs/a b", environment)
    assert len(secret) == 64 and run_secret("runs/a b", environment) == secret
    assert run_secret("other", environment) != secret
    path = secret_file("runs/a b", environment)
    assert path == tmp_path / "rftstream" / "gateway" / "runs_a_b"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert {found.name for found in path.parent.iterdir()} == {"runs_a_b", "other"}


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    run_secret("a", environment)
    os.chmod(secret_file("a", environment), 0o644)
    with pytest.raises(ConfigError, match="expected mode 0600"):
        run_secret("a", environment)


def test_the_environment_comes_first(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path), SECRET_VARIABLE: "sixteen bytes and more"}
    assert run_secret("a", environment) == b"sixteen bytes and more"
    assert not secret_file("a", environment).exists()
    with pytest.raises(ConfigError, match="got 5 bytes, expected at least 16"):
        run_secret("a", {SECRET_VARIABLE: "short"})


def test_keys_do_not_show_their_secret() -> None:
    assert "0123" not in repr(KEYS)


def test_each_launch_has_a_key_of_its_own() -> None:
    first, second = KEYS.rollout_key("sums/0/3/0/1", "a1"), KEYS.rollout_key("sums/0/3/0/1", "a2")
    assert KEYS.owner_of(first) == KeyOwner("sums/0/3/0/1", "a1")
    assert KEYS.owner_of(second) == KeyOwner("sums/0/3/0/1", "a2")
    assert KEYS.owner_of(first.replace("~a1.", "~a2.")) is None
    assert KEYS.owner_of(first.replace("~a1.", ".")) is None
    assert KEYS.owner_of(KEYS.rollout_key("sums/0/3/0/1").replace(".", "~.", 1)) is not None, "no launch is none"


@pytest.mark.law("bounded")
def test_only_so_many_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.gateway.keys.MAX_KNOWN", 2)
    keys = GatewayKeys(b"s" * 16, "r")
    for number in range(5):
        key = keys.rollout_key(f"a/0/0/0/{number}")
        assert keys.owner_of(key) == keys.owner_of(key) == KeyOwner(f"a/0/0/0/{number}", "")
        assert keys.owner_of(key + "0") is None
        assert len(keys._known) <= 2
