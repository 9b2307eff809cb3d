"""docs/tools.md: the code runs as it stands there; each test that the comparison with verl names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.doc_pages import page, section
from turnwise.config import load_config
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.tools import load_function_tools
from turnwise.types import ToolCall

ROOT = Path(__file__).parents[3]
TEXT = page("tools.md").replace(section("tools.md", "Sandbox tools"), "")
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", TEXT, re.DOTALL)
NAMED = re.compile(r"`(test_\w+\.py)((?:::\w+)+)`")


def named_tests(file: Path) -> set[str]:
    """The tests of a file, as pytest writes them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"::{node.name}" if isinstance(node, ast.ClassDef) else ""
        functions = [member for member in members if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))]
        names |= {f"{prefix}::{function.name}" for function in functions if function.name.startswith("test_")}
    return names


def rows() -> list[list[str]]:
    table = section("coming-from-other-frameworks.md", "Tools compared with verl")
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_row_names_a_test_that_is_there() -> None:
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(rows()) > 30
    for row in rows():
        assert len(row) == 4, row
        named = NAMED.fullmatch(row[3])
        assert named is not None, row
        assert named[1] in files, row
        assert named[2] in named_tests(files[named[1]]), row


def test_a_test_that_is_not_there_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text("class TestA:\n    async def test_b(self): ...\n    def helper(self): ...\ndef test_c(): ...\n")
    assert named_tests(file) == {"::TestA::test_b", "::test_c"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the blocks say they are; one, since tools are registered by name."""
    folder: Path = tmp_path_factory.mktemp("docs")
    for _, text in BLOCKS:
        name = re.match(r"# (\S+\.(?:py|yaml))\n", text)
        if name is not None:
            (folder / name[1]).write_text(text)
    return folder


def test_the_blocks_without_a_file_run() -> None:
    plain = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# ")]
    assert len(plain) == 2
    names: dict = {"__name__": "docs_tools"}
    for text in plain:
        exec(compile(text, "docs/tools.md", "exec"), names)
    assert "table" not in names["find_row"].schema.parameters["properties"]


async def test_the_run_that_is_described(folder: Path) -> None:
    loaded = load_config(RolloutConfig, folder / "run.yaml")
    [block] = [text for kind, text in BLOCKS if kind == "python" and text.startswith("from turnwise import Task")]
    task: Task = eval(block.partition("\n\n")[2].strip(), {"Task": Task})
    renderer = ToyRenderer()
    script = [
        {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "search", {"query": "Rome"})]},
        {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "weather", {"city": "Rome"})]},
        "old",
    ]
    producer = await RolloutProducer.create(loaded, ScriptedClient(renderer, script), None, RolloutParts(renderer))
    [group] = await producer.gather([RolloutRequest(task)])
    await producer.close()
    [trajectory] = group.trajectories
    assert trajectory.error is None
    assert [tool["function"]["name"] for tool in trajectory.segments[0].tools] == ["weather", "search"]
    assert trajectory.rewards[0] == ("t0", "tool/search", 0.1)
    assert ("t2", "tool/search", 1.0) in trajectory.rewards
    assert trajectory.reward == pytest.approx(2.1)
    assert "Use your tools." in renderer.decode(trajectory.segments[0].token_ids)


def test_the_functions_that_are_described(folder: Path) -> None:
    weather, read = load_function_tools(folder / "my_tools.py")
    assert weather.schema.parameters["properties"]["city"]["description"] == "Its name, without the country."
    assert read.schema.parameters["properties"]["page"] == {"type": "integer", "description": "from 1"}
    assert (read.max_output.amount, read.max_output.unit, read.max_output.keep) == (500, "tokens", "head")


def test_mcp_configuration_of_the_page_is_valid(folder: Path) -> None:
    loaded = load_config(RolloutConfig, folder / "mcp.yaml")
    first, second = loaded.env.tools.mcp
    assert (first.scope, second.prefix, second.include) == ("episode", "web_", ["search"])
