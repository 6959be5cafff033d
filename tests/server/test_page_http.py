"""How the page is served: redirects, headers, caching, download size, memory of the process."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import inferencegym
from server.api.web import PAGE_DIR, page_headers
from server.settings import Settings
from tests.servers import ROOT, RunningServer, running_server

PAGE_LIMIT_BYTES = 250_000
"""What a first visit to the race downloads, compressed as the server sends it."""


@pytest.mark.parametrize("path", ["/", "/web"])
def test_the_page_is_reached_by_a_relative_redirect(server: RunningServer, path: str) -> None:
    answer = server.client.get(path + "?theme=dark")
    assert (answer.status_code, answer.headers["location"]) == (307, "web/?theme=dark")
    assert server.client.get(path, follow_redirects=True).url.path == "/web/"


@pytest.mark.parametrize("name", ["rollouts", "traffic"])
def test_an_environments_own_address_leads_to_its_tab(server: RunningServer, name: str) -> None:
    answer = server.client.get(f"/{name}")
    assert (answer.status_code, answer.headers["location"]) == (307, f"web/#{name}")
    assert server.get(f"/{name}/tasks")["tasks"]


def test_the_page_allows_nothing_but_its_own_origin(server: RunningServer) -> None:
    answer = server.client.get("/web/")
    directives = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["connect-src"] == "'self'"
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert directives["style-src"] == f"'self' 'sha256-{digest}'"
    assert directives["frame-ancestors"] == "'self' https://huggingface.co https://*.hf.space"
    assert "x-frame-options" not in answer.headers
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", answer.text)


def test_the_page_waits_for_no_other_file_before_it_shows_what_it_is(server: RunningServer) -> None:
    """Scripts hold nothing up, styles are in the page, and one round trip of TCP (ten segments) carries all of it."""
    page = server.client.get("/web/").text
    assert not re.search(r'rel="stylesheet"|<script(?![^>]*(?:defer|async|type="module"))', page)
    assert "Beat vLLM's defaults" in page.split("<main>")[1]
    assert len(_sent(server, "/web/")) < 14_000


def test_the_modules_of_the_race_are_asked_for_at_once() -> None:
    page = (PAGE_DIR / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:modulepreload" href|module" src)="js/(\w+)\.js"', page)
    needed, found = ["race"], {"main", "race"}
    while needed:
        text = (PAGE_DIR / "js" / f"{needed.pop()}.js").read_text(encoding="utf-8")
        new = set(re.findall(r'from "\./(\w+)\.js"', text)) - found
        needed += new
        found |= new
    assert sorted(named) == sorted(found)


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("", "Beat vLLM's defaults at"),
        ("?beat=0.711", "Beat my 0.711 at"),
        ('?beat="><b>', "Beat vLLM's defaults at"),
    ],
)
def test_a_shared_link_has_a_preview_with_its_score_and_a_picture(
    server: RunningServer, query: str, title: str
) -> None:
    page = server.client.get("/web/" + query).text
    tags = dict(re.findall(r'<meta property="og:(\S+)" content="([^"]*)">', page))
    assert tags["title"] == f"{title} running an LLM fleet"
    picture = httpx.get(tags["image"])
    assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")
    assert picture.content[16:24] == b"".join(int(tags[f"image:{side}"]).to_bytes(4) for side in ("width", "height"))
    behind = httpx.get(f"{server.url}/web/", headers={"x-forwarded-proto": "https", "host": "a.example"}).text
    assert 'content="https://a.example/web/img/card.png"' in behind


def test_the_documents_of_the_interface_show_code_and_no_markup(server: RunningServer) -> None:
    page, document = httpx.get(f"{server.url}/docs").text, httpx.get(f"{server.url}/openapi.json").text
    assert "``" not in document
    assert "`" not in page
    assert "<code>/reset/batch</code>" in page
    assert "<pre>    0       4 bytes   the letters IGB1" in page


def test_who_may_frame_the_page_is_a_setting() -> None:
    assert page_headers(Settings(frame_ancestors="'none'"))["content-security-policy"].endswith(
        "frame-ancestors 'none'"
    )


def test_a_file_that_did_not_change_is_not_sent_again(server: RunningServer) -> None:
    first = server.client.get("/web/js/main.js")
    again = server.client.get("/web/js/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (first.headers["cache-control"], again.status_code, again.content) == ("no-cache", 304, b"")


@pytest.mark.parametrize("path", ["/web/none.js", "/web/../app.py", "/web/charts/../../app.py", "/web/js/"])
def test_only_files_of_the_page_are_served(server: RunningServer, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 404


def test_the_page_names_no_other_host() -> None:
    hosts = {
        (file.name, host)
        for file in PAGE_DIR.rglob("*")
        if file.suffix in {".html", ".js", ".css", ".svg"}
        for host in re.findall(r"https?://([a-z0-9.-]+)", file.read_text(encoding="utf-8"))
    }
    # a namespace, which is never fetched, and the address that the page replaces by its own
    allowed = {"www.w3.org", "localhost"}
    # A comment of the chart library.
    strangers = {found for found in hosts if found[1] not in allowed}
    # A comment of the chart library, and links to the repository, which the visitor follows or does not.
    assert strangers == {("uPlot.iife.min.js", "github.com"), ("index.html", "github.com")}
    page = (PAGE_DIR / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"#]+", page)) == {inferencegym.__url__}


def test_a_first_visit_downloads_little(server: RunningServer) -> None:
    files = ["", "style.css", "charts/uPlot.min.css", "charts/uPlot.iife.min.js", "img/icon.svg"]
    files += [
        f"js/{name}.js"
        for name in (
            "main",
            "race",
            "api",
            "address",
            "dom",
            "format",
            "charts",
            "knobs",
            "strip",
            "score",
            "kept",
            "ahead",
            "players",
        )
    ]
    sent = sum(len(_sent(server, f"/web/{name}")) for name in files)
    assert sent < PAGE_LIMIT_BYTES


def _sent(server: RunningServer, path: str) -> bytes:
    with httpx.stream("GET", server.url + path, headers={"accept-encoding": "gzip"}) as answer:
        assert answer.status_code == 200
        body = b"".join(answer.iter_raw())
        if answer.headers.get("content-encoding") == "gzip":
            assert len(body) < len(gzip.decompress(body))
        return body


def test_serving_the_page_imports_neither_gymnasium_nor_pandas() -> None:
    watched = ("gymnasium", "pandas")
    code = f"import sys, server.app; server.app.app; print([m for m in {watched} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_page_finds_every_environment_whichever_is_at_the_root(tmp_path: Path) -> None:
    with running_server(tmp_path, env="traffic") as server:
        (told,) = re.findall('<html data-site="(.*?)"', server.client.get("/web/").text)
        site = json.loads(html.unescape(told))
        for name, path in (
            ("serving", "tasks"),
            ("traffic", "tasks"),
            ("serving", "policies"),
            ("traffic", "policies"),
            ("rollouts", "policies"),
        ):
            assert httpx.get(f"{server.url}/web/{site[name]}{path}").status_code == 200
        assert httpx.post(f"{server.url}/web/{site['serving']}play", json={"agent": "naive"}).status_code == 200
        assert server.client.get("/", follow_redirects=True).url.path == "/web/"
