"""The documentation as a site: built strictly, found by its search, and complete without a network."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.browser import Browser, missing
from support.doc_pages import DOCS, ROOT

MKDOCS = ROOT / ".venv-docs/bin/mkdocs"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MKDOCS.exists(), reason=f"{MKDOCS} is missing: make docs"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The built site; a link or an anchor that leads nowhere is a warning, and a warning an error."""
    folder = tmp_path / "site"
    built = subprocess.run(
        [MKDOCS, "build", "--strict", "-d", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING -" not in built.stderr
    pages = re.findall(r"^- \[.+\]\(([\w-]+\.html)\): ", (folder / "llms.txt").read_text(), re.MULTILINE)
    assert len(pages) > 20
    assert [page for page in pages if not (folder / page).is_file()] == []
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *details: object) -> None:
        """Say nothing."""


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


async def test_the_site_has_every_page_and_is_searched_without_a_network(
    site: Path, address: str, tmp_path: Path
) -> None:
    pages = {file.stem for file in site.glob("*.html")}
    assert {file.stem for file in DOCS.glob("*.md")} <= pages
    async with Browser(tmp_path / "profile") as browser:
        await browser.run("await page.goto(given); await page.waitForSelector('h1')", f"{address}index.html")
        assert "Turnwise" in await browser.run("return page.innerText('h1')")
        # The reference has what docstrings say.
        await browser.run("await page.goto(given)", f"{address}reference/envs.html")
        assert "An environment at the level of messages" in await browser.run("return page.innerText('article')")
        await browser.run("await page.click('.md-search__input')")
        await browser.run("await page.keyboard.type('staleness')")
        await browser.run("await page.waitForSelector('.md-search-result__link')")
        assert "replay-and-durability" in await browser.run("return page.innerHTML('.md-search-result__list')")
        seen = await browser.run("return seen")
    assert seen["errors"] == []
    assert [address_ for address_ in seen["requests"] if not address_.startswith((address, "data:", "blob:"))] == []
