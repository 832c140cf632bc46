"""What `check` says of the servers that sample, and of those that reward."""

import socket

import pytest

from rftstream.errors import ConfigError
from rftstream.preflight.checks.dependencies import look_at_servers, reward_server_warnings
from tests.flow.scene import make_config
from tests.loopback import taken_port


def run_with(url):
    return make_config(explorer__policy="openai", policies__openai={"url": url, "model": "it"})


def test_each_server_is_looked_at():
    with socket.create_server(("127.0.0.1", 0)) as there, taken_port() as gone:
        urls = [f"http://127.0.0.1:{port}/v1" for port in (there.getsockname()[1], gone)]
        found = look_at_servers(run_with(urls), ["openai", "fake"])
        assert found == f"openai: 1 of 2 model servers there; {urls[1]}: Connection refused"
        assert look_at_servers(run_with(urls[0]), ["openai"]) == "openai: 1 of 1 model servers there"


def test_policies_without_servers_have_nothing_to_be_looked_at():
    assert look_at_servers(make_config(), ["fake"]) is None


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://me:secret@127.0.0.1/v1", "http://127.0.0.1:x/v1"])
def test_an_address_that_is_none_is_an_error(url):
    with pytest.raises(ConfigError, match=r"policies\.openai\.url: expected http://HOST:PORT/v1"):
        look_at_servers(run_with([url]), ["openai"])


def test_a_judge_that_is_not_there_is_warned_of():
    def said(url):
        return list(reward_server_warnings(make_config(tasksets__sums__reward="judge", rewards__judge={"url": url})))

    with socket.create_server(("127.0.0.1", 0)) as there, taken_port() as gone:
        (sentence,) = said(url := f"http://127.0.0.1:{gone}/v1")
        assert sentence.startswith(f"rewards.judge: nobody accepts connections at {url} now (Connection refused); ")
        assert said(f"http://127.0.0.1:{there.getsockname()[1]}/v1") == said("no url") == said(None) == []
    assert list(reward_server_warnings(make_config(rewards__judge={"url": url}))) == [], "nothing is rewarded by it"
