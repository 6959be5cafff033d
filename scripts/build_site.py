"""Build the documents as a static site: ``python -m scripts.build_site [--out build/site]``, which `make site` calls.

The documents stay plain Markdown that also reads well on a code host. This script collects them, points links to other
files of the repository at its public address, lets Zensical (requirements-site.txt) turn them into pages, and checks
every link and fragment of every page. It exits with 1 if a link is broken.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import yaml

from scripts.check_links import LINK

ROOT: Final = Path(__file__).resolve().parent.parent
INDEX: Final = "README.md"
PARTS: Final = {
    "Start": ["README.md", "docs/first-steps.md", "ENVIRONMENT.md", "docs/cli.md"],
    "Learn": [
        "docs/learning.md",
        "docs/ppo.md",
        "docs/language-models.md",
        "docs/rollouts.md",
        "docs/results.md",
        "docs/openenv.md",
        "docs/server.md",
        "docs/deploy.md",
        "docs/performance.md",
    ],
    "Operate": [
        "docs/operators.md",
        "docs/live.md",
        "docs/live-results.md",
        "docs/session-gate.md",
        "docs/autoscaling.md",
        "docs/hardware.md",
    ],
    "Trust": ["docs/dynamics.md", "docs/fidelity.md", "docs/policy-fidelity.md", "docs/traffic.md"],
    "Contribute": ["docs/architecture.md", "CONTRIBUTING.md", "TASK_AUTHORING.md", "docs/decisions.md", "CHANGELOG.md"],
}
"""Parts of the site and their documents; every chapter must be in one."""
ANCHORS: Final = """\
- toc:
    permalink: true
    slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}
"""
"""The last Markdown extension, which gives headings the same anchors as code hosts do."""
PICTURES: Final = {".png", ".gif", ".svg", ".jpg"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder of the site")
    parser.add_argument("--generator", default="zensical", help="command or path of Zensical")
    options = parser.parse_args()
    found = shutil.which(options.generator)
    if found is None:
        parser.error(f"no program {options.generator}: `make site` installs Zensical and calls this")
    generator = Path(found).absolute()  # absolute, because the generator runs in another folder
    source = options.out.with_name(options.out.name + "-source")
    for folder in (source, options.out):
        shutil.rmtree(folder, ignore_errors=True)
    collect(source / "documents")
    (source / "mkdocs.yml").write_text(settings(), encoding="utf-8")
    built = subprocess.run([generator, "build", "--clean", "--strict"], cwd=source, check=False)
    if built.returncode:
        return built.returncode
    shutil.move(source / "site", options.out)
    wrong = [f"{page.relative_to(options.out)}: {found}" for page, found in broken(options.out)]
    n_pages = len(list(options.out.rglob("*.html")))
    print("\n".join(wrong) or f"{n_pages} pages in {options.out}, every link leads somewhere")
    return 1 if wrong else 0


def documents() -> list[str]:
    """The documents of the site. Raises ValueError for a chapter that is in no part."""
    listed = [name for names in PARTS.values() for name in names]
    forgotten = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - set(listed)
    if forgotten:
        raise ValueError(f"{', '.join(sorted(forgotten))}: in no part of the site, add it to PARTS")
    return listed


def settings() -> str:
    """Settings of the generator, in MkDocs' format, which other generators also read."""
    plain = {
        "site_name": "InferenceGym",
        "repo_url": repository(),
        "docs_dir": "documents",
        "site_dir": "site",
        "nav": [{part: [page_of(name) for name in names]} for part, names in PARTS.items()],
        "theme": {
            "font": False,
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "markdown_extensions": [
            "tables",
            "md_in_html",
            "pymdownx.superfences",
        ],
    }
    return yaml.safe_dump(plain, sort_keys=False) + ANCHORS


def repository() -> str:
    """Public address of the repository."""
    return str(yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"])


def page_of(document: str) -> str:
    return "index.md" if document == INDEX else document


def collect(folder: Path) -> None:
    """Copy the documents with their pictures into a folder of the same layout."""
    for name in documents():
        text = (ROOT / name).read_text(encoding="utf-8")
        page = folder / page_of(name)
        page.parent.mkdir(parents=True, exist_ok=True)
        led = partial(_led, document=name, folder=folder)
        page.write_text(LINK.sub(led, text), encoding="utf-8")


def _led(match: re.Match[str], document: str, folder: Path) -> str:
    """A link as the site needs it: to a page, to a picture (which is copied), or to a file of the repository."""
    link, target = match[0], match["target"] or match["attribute"]
    parts = urlsplit(target)
    if parts.scheme or not parts.path:
        return link
    file = (ROOT / document).parent / unquote(parts.path)
    name = os.path.relpath(file.resolve(), ROOT)
    if name in documents():
        path = os.path.relpath(page_of(name), Path(page_of(document)).parent)
        return link.replace(target, parts._replace(path=path).geturl())
    if file.suffix in PICTURES:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
        return link
    kind = "tree" if file.is_dir() else "blob"
    return link.replace(target, f"{repository()}/{kind}/main/{name}")


class _Page(HTMLParser):
    """Ids of a page, and the addresses of its links, pictures, scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(site: Path) -> Iterator[tuple[Path, str]]:
    """Links that lead to no file of the site, or to no element of a page."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of the future site, wherever that is
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                yield path, f"{link} leads to no file"
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].ids:
                yield path, f"{link} names no element of that page"


if __name__ == "__main__":
    sys.exit(main())
