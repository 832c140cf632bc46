"""Pods as places: what shells are told, and what a cluster says that no test has it say (tests/kubernetes has one)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rftstream.environments.places import kubernetes
from rftstream.environments.places.base import PlaceOrder, PlaceSettings, PlaceSource
from rftstream.environments.places.kubernetes import KubernetesPlaces, write_script
from rftstream.environments.places.pods import find_trouble, waiting_for
from rftstream.errors import ConfigError, HostedCodeError, HostError
from tests.suite.each import each

NASTY = "a 'b' \"c\" $HOME `id` \\ \n * # ü"


@pytest.mark.process
@each(
    ("command", "more", "expected"),
    [
        ('printf %s "$KEY"', {"variables": {"KEY": NASTY}}, f"{NASTY}\nM 0"),
        ("echo 'x'; cat; echo y >&2; exit 7", {}, "x\ny\n\nM 7"),
        ("pwd; [[ a == a ]]", {"cwd": "/usr"}, "/usr\n\nM 0"),
        ("pwd", {"cwd": "/no where"}, "\nM 126"),
        ("printf %s $RFTSTREAM_COMMAND", {}, "M\nM 0"),
    ],
)
def test_a_shell_runs_what_it_reads(command: str, more: dict[str, Any], expected: str) -> None:
    script = write_script(command, "M", **{"variables": {}, "user": "", "cwd": "", **more})
    done = subprocess.run(["sh", "-s"], input=script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert (done.stdout, done.returncode) == (expected, 0)


@each(
    ("variables", "error"),
    [
        ({"A": "x\0"}, "A: expected text without NUL, of at most 128 KiB"),
        ({"A": "ü" * 65535}, "A: expected text without NUL"),
        ({"A;B": "x"}, "variables: got the name 'A;B', expected letters, digits and _"),
    ],
)
def test_variables_that_no_command_can_have(variables: dict[str, str], error: str) -> None:
    with pytest.raises(HostedCodeError, match=error):
        write_script("true", "M", variables, "", "")


def pod(*states: dict[str, Any], **status: Any) -> dict[str, Any]:
    names = ("place", "relay")
    found = [{"name": name, "image": "x:1", "state": state} for name, state in zip(names, states, strict=False)]
    return {"metadata": {}, "spec": {"containers": [{}, {}]}, "status": {"containerStatuses": found, **status}}


RUNS: dict[str, Any] = {"running": {}}
WRITTEN = 'Container place exceeded its local ephemeral storage limit "64Mi".'
FULL = "The node was low on resource: ephemeral-storage. Container place was using 100Ki, request is 64Mi."
ENDED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (pod(phase="Failed", reason="Evicted", message=FULL), HostError, "Evicted: The node was low on resource"),
    (pod(phase="Failed", reason="Evicted", message=WRITTEN), HostedCodeError, "wrote more than it may"),
    (pod(phase="Failed", reason="DeadlineExceeded"), HostError, "the place has ended: DeadlineExceeded"),
    (pod({"terminated": {"reason": "OOMKilled"}}, RUNS), HostedCodeError, "more memory than it may"),
    (pod(RUNS, {"terminated": {"reason": "Error"}}), HostError, "its container relay ended: Error"),
    (pod({"waiting": {"reason": "CreateContainerError", "message": "no"}}), HostedCodeError, "be started: .*: no"),
    (pod(phase="Succeeded"), HostError, "its pod was removed"),
    ({**pod(RUNS, RUNS), "metadata": {"deletionTimestamp": "now"}}, HostError, "its pod was removed"),
]  # fmt: skip


@each(("said", "kind", "error"), ENDED)
def test_how_a_pod_ended(said: dict[str, Any], kind: type[Exception], error: str) -> None:
    with pytest.raises(kind, match=error):
        raise find_trouble(said) or AssertionError("none")


def test_what_a_pod_waits_for() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    assert find_trouble(pod(RUNS, RUNS)) is None and not waiting_for(pod(RUNS, RUNS))
    assert waiting_for(pod(phase="Pending", conditions=[condition])) == "0/3 nodes are available"
    assert waiting_for(pod(RUNS, waiting, phase="Pending")) == "ContainerCreating"


KUBECTL = """#!/bin/sh
echo "$@" >>"$0.asked"
case "$*" in
  *"get pods"*) echo "W1: throttled" >&2; echo '{"items": []}' ;;
  *create*|*delete*) read -r said <"$0.says"; sed -i 1d "$0.says"; echo "$said" >&2; exit 1 ;;
esac
"""


SAYS = """\
pods "x" is forbidden: exceeded quota: q
The connection to the server 127.0.0.1:1 was refused - did you specify the right host or port?
The connection to the server 127.0.0.1:1 was refused - did you specify the right host or port?
it is still there
The Pod "x" is invalid: spec
"""


@pytest.mark.process
@pytest.mark.anyio
async def test_clusters_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning that is a wrong setting, later it is waited for, and so is a quota."""
    monkeypatch.setattr(kubernetes, "LOOK_S", 0.01)
    program = tmp_path / "kubectl"
    order, settings = PlaceOrder(source=PlaceSource(image="x")), PlaceSettings(engine=str(program), namespace="here")
    program.write_text("#!/bin/sh\necho 'Unable to connect to the server: no such host'; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="reaches no engine: Unable to connect"):
        await KubernetesPlaces(settings).create(order)
    program.write_text(KUBECTL)
    (tmp_path / "kubectl.says").write_text(SAYS)
    with pytest.raises(ConfigError, match=r"environments\.harbor\.pod: .*is invalid"):
        await KubernetesPlaces(settings).create(order)
    asked = [line.removeprefix("--namespace=here ") for line in (tmp_path / "kubectl.asked").read_text().splitlines()]
    words = ["get", "apply", "create", "create", "delete", "version", "delete", "create", "delete"]
    assert [line.split()[0] for line in asked] == words
    with pytest.raises(ConfigError, match="'kubernetes' installs nothing; put the harness into the tasks' images"):
        await KubernetesPlaces(settings).create(PlaceOrder(source=PlaceSource(image="x", install="pip install y")))
