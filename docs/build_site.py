"""Builds the docs as a site with search, from mkdocs.yml, by zensical: `make docs`.

    python docs/build_site.py [FOLDER]       default: build/site

Pages lie in several folders and link files of the repository. So pages are staged with what they link, under the same
paths, and links stay as they are; a link to a folder, which a site has no page for, becomes its text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "mkdocs.yml"
STYLE = "docs/site.css"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "deploy/*.md",
    "deploy/helm/*.md",
    "deploy/patches/*.md",
    "schemas/*.md",
)

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    with tempfile.TemporaryDirectory(prefix="rftstream-docs-") as folder:
        try:
            build(Path(folder), target.absolute())
        except subprocess.CalledProcessError as error:
            print(error.stdout, file=sys.stderr)
            return 1
    print(f"{target}/index.html")
    return 0


def build(workplace: Path, target: Path) -> None:
    """Build the site into `target`, which is made anew. CalledProcessError if the builder warns of anything."""
    stage(workplace / "pages")
    text = CONFIG.read_text(encoding="utf-8")
    settings = {"docs_dir: build/pages": "docs_dir: pages", "site_dir: build/site": "site_dir: site"}
    for line, ours in settings.items():
        if line not in text:
            raise ValueError(f"mkdocs.yml: expected the line {line!r}")
        text = text.replace(line, ours)
    (workplace / CONFIG.name).write_text(text, encoding="utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run(
        [zensical, "build", "--strict", "--config-file", CONFIG.name], cwd=workplace, check=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(workplace / "site", target)


def stage(folder: Path) -> None:
    """Write the pages, and copy the style and the files that they link."""
    (folder / STYLE).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / STYLE, folder / STYLE)
    for page in pages():
        place = folder / page.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text(encoding="utf-8")
        place.write_text(as_staged(text, page), encoding="utf-8")
        for target in linked_files(page, text):
            copy = folder / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copy)


def pages() -> list[Path]:
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def navigation() -> list[str]:
    """Return the pages that the navigation has, in its order."""
    config = yaml.load(CONFIG.read_text(encoding="utf-8"), _PlainLoader)

    def below(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for value in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from below(value)

    return list(below(config["nav"]))


def linked_files(page: Path, text: str) -> Iterator[Path]:
    """Files of the repository that are no pages."""
    for link in _LINK.finditer(_FENCE.sub("", text)):
        target = _target(page, link["path"])
        if target is not None and target.is_file() and target.suffix != ".md":
            yield target


def as_staged(text: str, page: Path) -> str:
    """Return the text of a page without links to folders. Code is left as it is."""
    parts = re.split(f"({_FENCE.pattern})", text, flags=_FENCE.flags)
    return "".join(part if part.startswith("```") else _without_folders(part, page) for part in parts)


def _without_folders(text: str, page: Path) -> str:
    def replaced(link: re.Match[str]) -> str:
        target = _target(page, link["path"])
        return link["text"] if target is not None and target.is_dir() else link[0]

    return _LINK.sub(replaced, text)


def _target(page: Path, path: str) -> Path | None:
    """Return what a link leads to in the repository."""
    if "://" in path:
        return None
    target = (page.parent / path).resolve()
    return target if ROOT in target.parents else None


class _PlainLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the functions that it names."""


_PlainLoader.add_multi_constructor("!", lambda loader, suffix, node: None)
_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


if __name__ == "__main__":
    sys.exit(main())
