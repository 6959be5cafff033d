"""The documents as a static site: which files are collected, and how links are checked. `make site` builds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import build_site
from tests.servers import ROOT


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site.collect(folder)
    return folder


def test_every_document_becomes_a_page_and_the_readme_the_first(collected: Path) -> None:
    chapters = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    pages = {str(path.relative_to(collected)) for path in collected.rglob("*.md")}
    assert pages >= chapters | {"index.md", "ENVIRONMENT.md", "CONTRIBUTING.md"}
    assert "# InferenceGym" in (collected / "index.md").read_text(encoding="utf-8")


def test_a_link_leads_to_a_page_a_picture_or_the_repository(collected: Path) -> None:
    first = (collected / "docs/first-steps.md").read_text(encoding="utf-8")
    assert "](../index.md)" in first
    log = f"{build_site.repository()}/blob/main/server/web/data/azure-conversation.csv"
    assert f"]({log})" in first
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", first)
    assert pictures
    assert all((collected / "docs" / picture).is_file() for picture in pictures)


def test_a_chapter_that_is_in_no_part_of_the_site_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {part: [n for n in names if n != "docs/live.md"] for part, names in build_site.PARTS.items()}
    monkeypatch.setattr(build_site, "PARTS", parts)
    with pytest.raises(ValueError, match=r"docs/live\.md: in no part of the site"):
        build_site.documents()


def test_links_of_pages_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h1 id="there">Other</h1>')
    (tmp_path / "index.html").write_text(
        '<h1 id="here">A</h1><a href="#here">1</a><a href="other/#there">2</a><a href="https://example.org/x">3</a>'
        '<a href="none/">4</a><a href="other/#gone">5</a><img src="picture.png">'
    )
    assert [found for _, found in build_site.broken(tmp_path)] == [
        "none/ leads to no file",
        "other/#gone names no element of that page",
        "picture.png leads to no file",
    ]
