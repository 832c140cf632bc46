"""Fills the parts of the docs that follow from the code: settings, commands, topics, metrics, exit codes, examples.
Writes the JSON Schema of a run file, too.

    python docs/generate.py            writes them
    python docs/generate.py --check    exit 1, naming the pages that are out of date

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
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "docs"))

from pages import (  # noqa: E402  after the path to them
    cli,
    configuration,
    contracts,
    gallery,
    measured,
    operations,
    parts,
    performance,
    scale,
)

from rftstream.queries import run_file_schema  # noqa: E402

SCHEMA = ROOT / "schemas" / "run_file" / run_file_schema.FILE_NAME
EXAMPLES = ROOT / "tests" / "docs" / "examples"


def example(name: str) -> str:
    """A file of tests/docs/examples, as it is tested."""
    language = {"py": "python"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    return f"```{language}\n{(EXAMPLES / name).read_text(encoding='utf-8').strip()}\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    "sections": configuration.sections,
    "operators": configuration.operators,
    "part settings": configuration.part_settings,
    "commands": cli.commands,
    "gallery": gallery.gallery,
    "topics": contracts.topics,
    "headers": contracts.headers,
    "messages": contracts.messages,
    "exit codes": operations.exit_codes,
    "metrics": operations.metrics,
    "run metrics": operations.run_metrics,
    "dashboards": operations.dashboards,
    "rights": operations.rights,
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
    """Each file with its text as it should be now."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        yield page, filled(page.read_text(encoding="utf-8"))
    yield SCHEMA, run_file_schema.schema_text()


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = [
        (page, text) for page, text in wanted_texts() if not page.is_file() or page.read_text(encoding="utf-8") != text
    ]
    for page, text in stale:
        if not check:
            page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'out of date; run python docs/generate.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
