"""Check the links of the documents without a network: ``python scripts/check_links.py``.

Every relative link must lead to a file of the repository, every fragment to a heading of its document, every address to
a well-formed URL of https (or of this machine). Prints links that break these rules and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)|<(?:img|a)[^>]*?(?:src|href)=\"(?P<attribute>[^\"]+)\"")
HEADING = re.compile(r"^#{1,6} (?P<title>.+)$", re.MULTILINE)


def documents() -> list[Path]:
    """The Markdown files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def anchors(text: str) -> set[str]:
    """Fragments that GitHub assigns to the headings of a document."""
    found: set[str] = set()
    for match in HEADING.finditer(FENCE.sub("", text)):
        title = re.sub(r"[^\w\- ]", "", match["title"].replace("`", "").lower())
        slug = title.strip().replace(" ", "-")
        copies = sum(1 for known in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", known))
        found.add(f"{slug}-{copies}" if copies else slug)
    return found


def targets(text: str) -> Iterator[str]:
    """Targets of links and pictures outside code."""
    for match in LINK.finditer(CODE.sub("", FENCE.sub("", text))):
        yield match["target"] or match["attribute"]


def problem(document: Path, target: str) -> str | None:
    """Reason why a link is wrong; None if it is right."""
    parts = urlsplit(target)
    if parts.scheme:
        local = parts.hostname in ("localhost", "127.0.0.1")
        fine = parts.netloc and (parts.scheme == "https" or (parts.scheme == "http" and local))
        return None if fine else "is not an https address"
    file = document.parent / unquote(parts.path) if parts.path else document
    if not file.resolve().is_relative_to(ROOT) or not file.exists():
        return "leads to no file of the repository"
    if parts.fragment and (file.suffix != ".md" or parts.fragment not in anchors(file.read_text(encoding="utf-8"))):
        return f"names a heading that {file.name} does not have"
    return None


def problems() -> list[str]:
    """Every wrong link: document, link, reason."""
    return [
        f"{document.relative_to(ROOT)}: {target} {reason}"
        for document in documents()
        for target in targets(document.read_text(encoding="utf-8"))
        if (reason := problem(document, target))
    ]


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or f"links of {len(documents())} documents lead somewhere")
    sys.exit(1 if found else 0)
