"""Writes every file of the repository that follows from the code.

    python docs/generate.py            writes them
    python docs/generate.py --check    exit 1, naming the files that are out of date

These are parts of the docs (settings, commands, topics, metrics, exit codes, examples) and their pictures, the JSON
Schemas of messages and of a run file, the dashboards of Grafana, and the rights in the Helm chart.

A generated part stands in its page between `<!-- generated: NAME -->` and `<!-- end -->`. It is found from the sources:
what stands under a field becomes its line here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("docs", "", "deploy/grafana", "deploy/helm")]

import rights  # noqa: E402  after the path to it
from boards import DASHBOARDS  # noqa: E402
from pages import (  # noqa: E402
    agents,
    cli,
    coming_from,
    configuration,
    contracts,
    gallery,
    laws,
    measured,
    models,
    operations,
    parts,
    performance,
    python_api,
    scale,
)
from pictures import flow, start, weights  # noqa: E402
from pictures import scale as scale_picture  # noqa: E402

from rftstream.queries.reference import run_file_schema  # noqa: E402
from schemas import generate as contract_schemas  # noqa: E402

PICTURES = {"flow": flow, "scale": scale_picture, "start": start, "weights": weights}
EXAMPLES = ROOT / "tests" / "docs" / "examples"


def example(name: str) -> str:
    """A file of tests/docs/examples, as it is tested."""
    language = {"py": "python", "mjs": "javascript"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    return f"```{language}\n{(EXAMPLES / name).read_text(encoding='utf-8').strip()}\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    "agent settings": agents.settings,
    "sections": configuration.sections,
    "operators": configuration.operators,
    "part settings": configuration.part_settings,
    "commands": cli.commands,
    "python": python_api.reference,
    **{f"converted {system}": partial(coming_from.converted, system) for system in coming_from.SAMPLES},
    "gallery": gallery.gallery,
    "laws": laws.laws,
    "models": models.computed,
    "topics": contracts.topics,
    "headers": contracts.headers,
    "messages": contracts.messages,
    "exit codes": operations.exit_codes,
    "metrics": operations.metrics,
    "run metrics": operations.run_metrics,
    "dashboards": operations.dashboards,
    "rights": operations.rights,
    "broker wishes": operations.broker_wishes,
    "part kinds": parts.kinds,
    "capabilities": parts.capabilities,
    "measured algorithms": measured.algorithms,
    "measured staleness": measured.staleness,
    "measured reuse": measured.reuse,
    "measured trl": measured.beside_trl,
    "measured trl-smollm2": measured.beside_trl_smollm2,
    "measured trl-long": measured.beside_trl_long,
    "performance aims": performance.aims,
    "performance learning": performance.learning,
    "performance others": performance.others,
    "performance machines": performance.machines,
    "scale large": scale.large,
    "scale large on": scale.large_on,
    "scale measured": scale.measured,
    "scale measured on": scale.measured_on,
    "scale fitted": scale.fitted,
    "scale modelled": scale.modelled,
    **{f"example {path.name}": partial(example, path.name) for path in sorted(EXAMPLES.glob("*.*"))},
}

_BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with its generated parts as they should be now."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]().strip()}\n\n{match[3]}", text)


def wanted_texts() -> Iterator[tuple[Path, str]]:
    """Yield each file with its text as it should be now. Pages are made of the schemas, which come first."""
    yield from contract_schemas.documents().items()
    for page in sorted((ROOT / "docs").glob("*.md")):
        yield page, filled(page.read_text(encoding="utf-8"))
    for name, picture in PICTURES.items():
        yield ROOT / "docs" / "pictures" / f"{name}.svg", picture.draw()
    yield ROOT / "schemas" / "run_file" / run_file_schema.FILE_NAME, run_file_schema.schema_text()
    for dashboard in DASHBOARDS:
        yield ROOT / "deploy" / "grafana" / "dashboards" / f"{dashboard.name}.json", dashboard.to_text()
    yield rights.FILE, rights.to_json()
    yield python_api.FILE, python_api.kept_lines()


def is_stale(file: Path, text: str) -> bool:
    return not file.is_file() or file.read_text(encoding="utf-8") != text


def main() -> int:
    check = "--check" in sys.argv[1:]
    num_stale = 0
    for file, text in wanted_texts():
        if not is_stale(file, text):
            continue
        num_stale += 1
        if not check:
            file.write_text(text, encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: {'out of date; run python docs/generate.py' if check else 'written'}")
    return int(check and bool(num_stale))


if __name__ == "__main__":
    sys.exit(main())
