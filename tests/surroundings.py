"""The surroundings that tests run in: their own, whoever starts them on whatever machine.

`enter` replaces the variables of this process, and so of all that it starts, before anything reads them. Tests find
tools on a path of their own, a home that holds nothing of the user, and none of the user's settings: those of Python,
of Kafka, of a cluster's scheduler, of GPUs, of clouds and of services.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from rftstream.threads import thread_limits

ROOT = Path(__file__).parents[1]
OWN = ROOT / ".cache" / "surroundings"

SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

TOOLS = ("bwrap", "chromium", "docker", "gcc", "git", "go", "java", "mvn", "node", "prometheus", "promtool", "uv")
"""What tests may use from elsewhere. They find it on their path by a link."""

KEPT = (
    "TMPDIR", "JAVA_HOME", "DOCKER_HOST", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HISTORIES", "HISTORIES_SEED",
    "SAMPLE_SEED", "SIMULATION_SEED", "MUTANT", "RFTSTREAM_TEST_FAILED",
    "RFTSTREAM_DATA_JUICER", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "GOENV",
    "GOFLAGS", "GOPROXY", "GOSUMDB", "GOTOOLCHAIN",
)  # fmt: skip
KEPT_BEGINNINGS = ("PYTEST_", "HYPOTHESIS_", "COVERAGE_", "UV_", "PIP_")
"""Variables of the test run itself, and of how this machine fetches packages."""

SET = {
    **thread_limits(1),  # torch's threads would spin, with models as small as those of tests
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "COLUMNS": "80",
    "LINES": "24",
    "TZ": "UTC",
    "no_proxy": "127.0.0.1,localhost,::1",
    "NO_PROXY": "127.0.0.1,localhost,::1",
}


def surroundings(variables: Mapping[str, str], own: Path = OWN) -> dict[str, str]:
    """Return the variables of a test run that was started with these. Make the folders that they name."""
    home, tools = own / "home", own / "bin"
    for folder in (home, tools):
        folder.mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        if shutil.which(tool, path=os.pathsep.join(SYSTEM_PATH)) is None:
            link_to(shutil.which(tool, path=variables.get("PATH")), tools / tool)
    kept = {name: value for name, value in variables.items() if name in KEPT or name.startswith(KEPT_BEGINNINGS)}
    if "GOENV" not in kept and (file := home_of(variables) / ".config" / "go" / "env").exists():
        kept["GOENV"] = str(file)
    # What was fetched already is there for those who ask without a network.
    kept.setdefault("UV_CACHE_DIR", str(Path(variables.get("XDG_CACHE_HOME") or home_of(variables) / ".cache", "uv")))
    return {**kept, **SET, "HOME": str(home), "PATH": os.pathsep.join([str(tools), *SYSTEM_PATH])}


def home_of(variables: Mapping[str, str]) -> Path:
    """Return the home of whoever started the tests."""
    return Path(variables.get("HOME", "/nonexistent"))


def link_to(program: str | None, link: Path) -> None:
    """Make or renew the link, also beside other processes that do so."""
    if program is None or Path(program) == link:
        return
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(program)
    new.replace(link)


def enter(variables: MutableMapping[str, str] = os.environ) -> None:
    """Give this process the surroundings of a test run."""
    own = surroundings(variables)
    for name in [name for name in variables if name not in own]:
        del variables[name]
    variables.update(own)
