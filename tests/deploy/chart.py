"""The Helm chart as its users see it: rendered by helm, judged by kubeconform and by the operators' own models."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.conftest import ROOT

FOLDER = ROOT / "deploy" / "helm"
CHART = FOLDER / "rftstream"
ARITHMETIC = ROOT / "examples" / "arithmetic.toml"
RELEASE = "sums"
SEPARATOR = "\n---\n"
KAFKA = ("--set", "kafka.servers=kafka:9092")
MODELLED = ("kafka.strimzi.io/v1", "monitoring.coreos.com/v1")
"""Of these there are no schemas; the operators' own classes know them."""

SYNTHESIS = """
[run]
name = "more"
steps = 5
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[tasksets.grown]
source = "log:problems"
[synthesiser]
read = "verified"
"""


@cache
def tools() -> tuple[Path, Path, Path]:
    found: tuple[Path, Path, Path] = runpy.run_path(str(ROOT / "scripts" / "kubernetes"))["tools"]()
    return found


@cache
def kubernetes_versions() -> tuple[str, ...]:
    found: tuple[str, ...] = runpy.run_path(str(ROOT / "scripts" / "kubernetes"))["KUBERNETES"]
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tools()[0] / "helm", *arguments], capture_output=True, text=True, timeout=1200)


def template(
    *arguments: str, run_file: Path = ARITHMETIC, version: str = "", release: str = RELEASE
) -> subprocess.CompletedProcess[str]:
    version = version or kubernetes_versions()[0]
    return helm(
        "template", release, str(CHART), "--namespace", "training", "--kube-version", version,
        "--set-file", f"runFile={run_file}", *arguments,
    )  # fmt: skip


@cache
def render(*arguments: str, run_file: Path = ARITHMETIC, version: str = "", release: str = RELEASE) -> str:
    done = template(*arguments, run_file=run_file, version=version, release=release)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def by_name(text: str) -> dict[str, dict[str, Any]]:
    """`KIND NAME` -> document. The digest in the name of a Job is left out."""
    found = {}
    for document in documents(text):
        name = document["metadata"]["name"]
        found[f"{document['kind']} {name.rpartition('-')[0] if document['kind'] == 'Job' else name}"] = document
    return found


def pods(text: str) -> dict[str, dict[str, Any]]:
    """Component -> the template of its pods."""
    return {
        document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: document["spec"]["template"]
        for document in documents(text)
        if "template" in document.get("spec", {})
    }


@dataclass(frozen=True)
class Judgement:
    """What kubeconform or a model says of a document."""

    name: str
    """`KIND NAME`."""
    refused: str
    """Why; empty if it is accepted."""


def kubeconform(text: str, version: str) -> list[Judgement]:
    """Strict: a field that is not in the schema is refused, and so is a kind without a schema."""
    commands, schemas, _ = tools()
    places = (
        f"{schemas}/{{{{.NormalizedKubernetesVersion}}}}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
        f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
    )
    done = subprocess.run(
        [commands / "kubeconform", "-strict", "-verbose", "-output", "json", "-kubernetes-version", version,
         *(word for place in places for word in ("-schema-location", place))],
        input=text, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    found = json.loads(done.stdout)["resources"]
    judged = [
        Judgement(f"{one['kind']} {one['name']}", "" if one["status"] == "statusValid" else one["msg"]) for one in found
    ]
    assert (done.returncode == 0) == (not any(one.refused for one in judged)), done.stderr
    return judged


def models(text: str) -> list[Judgement]:
    """One start of Java, whatever the number of documents."""
    source = Path(__file__).with_name("ModelCheck.java")
    done = subprocess.run(
        ["java", "-cp", f"{tools()[2]}/*", "-Xshare:auto", "-XX:TieredStopAtLevel=1", str(source)],
        input=text, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    judged = []
    for line in done.stdout.splitlines():
        verdict, _, rest = line.partition(" ")
        name, _, why = rest.partition(": ")
        assert verdict in ("ok", "refused"), done.stderr
        judged.append(Judgement(name, why))
    assert judged and (done.returncode == 0) == (not any(one.refused for one in judged)), done.stderr
    return judged


def split(text: str) -> tuple[list[str], list[str]]:
    """The documents for kubeconform, and those for the models."""
    parts: tuple[list[str], list[str]] = ([], [])
    for part in text.split(SEPARATOR):
        if version := re.search("^apiVersion: (.+)$", part, re.MULTILINE):
            parts[version[1] in MODELLED].append(part)
    return parts


def with_mistakes(parts: Sequence[str], mistakes: Iterable[tuple[str, str]]) -> str:
    """The documents, and after them one for each mistake, `mistake-N`: the first one in which something can be replaced
    so. Many in one stream, since what judges them takes longest to start."""
    stream = list(parts)
    for number, (good, bad) in enumerate(mistakes):
        part = next((part for part in parts if good in part), None)
        assert part is not None, f"{good!r} is nowhere"
        name = part.partition("\n  name: ")[2].partition("\n")[0]
        stream.append(part.replace(good, bad).replace(f"\n  name: {name}\n", f"\n  name: mistake-{number}\n"))
    return SEPARATOR.join(stream)
