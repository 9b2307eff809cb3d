"""Hooks of the documentation's site (mkdocs.yml): its first page, the Python reference, and files that pages link to.

The pages in ``docs/`` are read on GitHub too, where they link to files of the repository. Here each of these files has
a page of its own: Markdown as it is, code in a block, a folder with its files.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
CODE = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".md": "markdown", "": "text"}
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
"""Code is not found by the site's search: it would hide the pages."""
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def page_of(path: str) -> str:
    """Return the site's page of a file of the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path.replace('/', '-')}.md"


def relinked(text: str, path: str, add_link: Callable[[str], object]) -> str:
    """Return the Markdown of a file of the repository with links to pages of the site; other files are ``add_link``."""
    here = posixpath.dirname(page_of(path))

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        resolved = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not resolved.startswith("docs/"):
            add_link(resolved)
        return posixpath.relpath(page_of(resolved), here or ".") + (anchor if resolved.endswith(".md") else "")

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, text[end:])])


def source_page(path: str, add_link: Callable[[str], object]) -> str:
    """Return the page of a file or folder of the repository."""
    file = ROOT / path
    if file.is_dir():
        members = sorted(path for path in file.iterdir() if path.is_file() and path.suffix in CODE)
        return f"{UNSEARCHED}# {path}\n\n" + "\n\n".join(f"## {member.name}\n\n{_block(member)}" for member in members)
    if file.suffix == ".md":
        return relinked(file.read_text(encoding="utf-8"), path, add_link)
    return f"{UNSEARCHED}# {path}\n\n{_block(file)}"


def _block(file: Path) -> str:
    return f"~~~~~{CODE.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}\n~~~~~"


def reference() -> dict[str, str]:
    """Return the pages of the Python reference: one for each package, with what ``turnwise`` exports of it."""
    tree = ast.parse((ROOT / "turnwise/__init__.pyi").read_text(encoding="utf-8"))
    rooms: defaultdict[str, list[str]] = defaultdict(list)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "turnwise.version":
            home = str(node.module)
            rooms[home.split(".")[1]] += [f"{home}.{alias.name}" for alias in node.names]
    return {
        room: f"# turnwise: {room}\n\n" + "\n\n".join(f"::: {name}" for name in sorted(names))
        for room, names in sorted(rooms.items())
    }


def on_config(config: Any) -> Any:
    """Add the Python reference to the navigation."""
    [section] = [entry["Reference"] for entry in config["nav"] if "Reference" in entry]
    section.append({"Python": [{room: f"reference/{room}.md"} for room in reference()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that no file of ``docs/`` has."""
    pages = {f"reference/{room}.md": text for room, text in reference().items()}
    waiting: list[str] = ["README.md"]
    for file in sorted((ROOT / "docs").glob("*.md")):
        relinked(file.read_text(encoding="utf-8"), f"docs/{file.name}", waiting.append)
    while waiting:
        path = waiting.pop()
        if page_of(path) not in pages:
            pages[page_of(path)] = source_page(path, waiting.append)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of the pages in ``docs/`` lead to pages of the site."""
    if page.file.generated_by is not None:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", lambda _: None)
