"""The list of pages for language models, which the documentation's site gets when it is built."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import yaml

from support.doc_pages import DOCS, ROOT


class NavLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose other keys may call functions of its plugins."""


NavLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def llms_text() -> str:
    spec = importlib.util.spec_from_file_location("llms", ROOT / ".ci" / "llms.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), NavLoader)
    assert ".ci/llms.py" in config["hooks"]
    text: str = module.llms_text(config["site_name"], config["site_description"], config["nav"])
    return text


def test_every_page_has_a_line_with_its_first_sentence() -> None:
    text = llms_text()
    assert text.startswith("# Turnwise\n\n> Gym-style environments and agents")
    lines = re.findall(r"^- \[(.+)\]\(([\w-]+)\.html\): (.+)$", text, re.MULTILINE)
    assert {stem for _, stem, _ in lines} == {file.stem for file in DOCS.glob("*.md")}
    assert [line for line in lines if len(line[2]) < 20 or len(line[2]) > 400 or "](" in line[2]] == []
    assert "- [Quickstart](quickstart.html): From a clean checkout to a trained model" in text
