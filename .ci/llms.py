"""Hook of the documentation's site (mkdocs.yml): ``llms.txt``, its pages with their first sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def first_sentence(text: str) -> str:
    """Return the first sentence below the title of a page, without links."""
    paragraph = next(part for part in re.split(r"\n\s*\n", text) if re.match(r"[A-Za-z`*\[]", part))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0].rstrip(":")


def llms_text(name: str, description: str, nav: Sequence[Mapping[str, Any]], docs: Path = ROOT / "docs") -> str:
    """Return the text: a section for each of the navigation, and a line for each page that has a file."""
    lines = [f"# {name}", "", f"> {description}"]
    for section in nav:
        for title, pages in section.items():
            files = [docs / page for page in pages if isinstance(page, str)] if isinstance(pages, list) else []
            lines += ["", f"## {title}", ""] if files else []
            for file in files:
                text = file.read_text(encoding="utf-8")
                heading = re.search(r"^# (.*)$", text, re.MULTILINE)
                page_title = heading[1] if heading else file.stem
                lines.append(f"- [{page_title}]({file.stem}.html): {first_sentence(text)}")
    return "\n".join(lines) + "\n"


def on_post_build(config: Any) -> None:
    """Write it beside the pages."""
    text = llms_text(config["site_name"], config["site_description"], config["nav"])
    Path(config["site_dir"], "llms.txt").write_text(text, encoding="utf-8")
