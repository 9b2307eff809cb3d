"""The sandboxed tools, in a local sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from support.envs.sandboxed_episodes import some_boxes
from support.event_loop import pass_time
from turnwise.errors import ConfigError, SandboxDied
from turnwise.sandboxes.core import Sandbox, SandboxSpec
from turnwise.sandboxes.local import host_python
from turnwise.tools.config import ToolsConfig
from turnwise.tools.core import SHIPPED, AgentData, BaseTool, as_tool
from turnwise.tools.execute import ToolRunner
from turnwise.tools.response import ToolResponse
from turnwise.tools.sandboxed.python import PythonTool
from turnwise.tools.sandboxed.shell import ShellTool
from turnwise.tools.selection import Toolbox
from turnwise.types import ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")
Do = Callable[..., Awaitable[ToolResponse]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    mounts, env = host_python()
    async with some_boxes() as manager:
        yield await manager.open(SandboxSpec(mounts=tuple(mounts), env=env))


@pytest_asyncio.fixture(loop_scope="module")
async def use(box: Sandbox) -> AsyncIterator[Callable[[BaseTool], Do]]:
    """Runs tools as an episode does."""
    async with AsyncExitStack() as stack:

        def bind_tool(tool: BaseTool) -> Do:
            runner = ToolRunner({tool.name: tool}, data=AgentData(sandbox=box))
            stack.push_async_callback(runner.close)

            async def do(**arguments: Any) -> ToolResponse:
                return (await runner.run(ToolCall("c", tool.name, arguments))).response

            return do

        yield bind_tool


async def test_shell_session_keeps_its_state(use: Callable[[BaseTool], Do]) -> None:
    shell = use(ShellTool())
    assert (await shell(command="mkdir -p deep && cd deep && X=3 && f() { echo f $X; }")).text == "(no output)"
    response = await shell(command="f; pwd; echo err >&2; false")
    assert str(response.text).split("\n")[0] == "f 3"
    assert str(response.text).endswith("/deep\nerr\n(exit code 1)")
    assert response.error is None
    assert "'a b'\nit's !x" in str((await shell(command='echo "\'a b\'"\necho "it\'s !x"')).text)
    assert "unexpected end of file" in str((await shell(command="if")).text)
    assert (await shell(command="cat; echo read")).text == "read"
    assert "NUL" in str((await shell(command="echo \0")).text)


async def test_hanging_command_is_interrupted_and_session_continues(use: Callable[[BaseTool], Do]) -> None:
    shell, probe = use(ShellTool()), use(ShellTool({"persistent": False}))
    await shell(command="X=kept; sleep 1000 & echo $! > job")

    async def hanging(command: str) -> ToolResponse:
        """Run a command that creates the file ``hangs``; let its timeout expire once that file exists."""
        running = asyncio.create_task(shell(command=command, timeout=60))
        while (await probe(command="rm hangs 2>/dev/null && echo it does")).text != "it does":
            assert not running.done(), running.result()
        pass_time(60)
        return await running

    response = await hanging("echo before; touch hangs; sleep 1000; echo after")
    assert response.error == "timeout"
    assert str(response.text).startswith(
        "before\n(no end within 60 s: the command was interrupted; the session continues)"
    )
    # Bash goes on with a list where a command of it ends well at an interrupt.
    response = await hanging("(trap 'exit 0' INT; touch hangs; while :; do :; done); echo next; sleep 1000; echo after")
    assert str(response.text).startswith("next\n(no end within 60 s: the command was interrupted")
    response = await hanging("touch hangs; while :; do :; done")
    assert "the session continues" in str(response.text)
    assert (await shell(command="echo $X; kill -0 $(cat job) && echo alive")).text == "kept\nalive"


async def test_shell_that_ended_is_restarted_in_its_directory(use: Callable[[BaseTool], Do]) -> None:
    shell = use(ShellTool())
    await shell(command="mkdir -p other; cd other; X=gone")
    response = await shell(command="echo last; exit 3")
    assert "(the shell ended with exit code 3; a new one was started)" in str(response.text)
    assert (await shell(command='echo "[$X]"; basename "$PWD"')).text == "[]\nother"


async def test_long_output_keeps_head_and_tail(use: Callable[[BaseTool], Do]) -> None:
    for persistent in (True, False):
        shell = use(ShellTool({"max_output": 2000, "persistent": persistent}))
        text = str((await shell(command="seq 100000; exit_code() { return 7; }; exit_code")).text)
        assert len(text) <= 2000
        assert text.startswith("1\n2\n")
        assert text.endswith("99999\n100000\n(exit code 7)")
        assert "cut ...]" in text


@pytest.mark.long
async def test_calls_without_session_share_no_state(use: Callable[[BaseTool], Do]) -> None:
    shell = use(ShellTool({"persistent": False, "env": {"GIVEN": "1"}}))
    assert (await shell(command="X=1; cd /; echo out; echo err >&2; echo $GIVEN")).text == "out\nerr\n1"
    assert (await shell(command='echo "[$X]"')).text == "[]"
    response = await shell(command="echo part; sleep 1000", timeout=1.5)
    assert (response.error, response.text) == ("timeout", "part\n(no end within 1.5 s: the command was killed)")


async def test_python_tool_keeps_names_between_calls(use: Callable[[BaseTool], Do]) -> None:
    python = use(PythonTool())
    assert (await python(code="import math\ndef half(n):\n    return n / 2\nhalf(6)")).text == "3.0"
    assert (await python(code="print('a'); _ = __import__('os').system('echo b'); half(1)")).text == "a\nb\n0.5"
    response = str((await python(code="half(None)")).text)
    assert response.startswith('Traceback (most recent call last):\n  File "<cell 3>", line 1, in <module>\n')
    assert "interpreter.py" not in response
    assert "<string>" not in response
    assert "SyntaxError" in str((await python(code="x =")).text)
    response = await python(code="kept = 1\nwhile True: pass", timeout=1.5)
    assert response.error == "timeout"
    assert "names are still there" in str(response.text)
    assert (await python(code="kept, (other := 2)")).text == "(1, 2)"
    response = await python(code="import os; print('last', flush=True); os._exit(3)")
    assert response.error == "interpreter_died"
    assert str(response.text).startswith("last\n(the interpreter ended with exit code 3)")
    assert "NameError" in str((await python(code="kept")).text)


async def test_editor_views_and_changes_files(use: Callable[[BaseTool], Do], box: Sandbox) -> None:
    editor = use(as_tool("editor"))  # type: ignore[arg-type]
    text = "def f():\n    return 1\n\ndef g():\n    return 1\n"
    assert "5 lines" in str((await editor(command="create", path="src/a.py", file_text=text)).text)
    assert (
        await editor(command="view", path="src/a.py", view_range=[4, -1])
    ).text == "     4\tdef g():\n     5\t    return 1"
    response = await editor(command="str_replace", path="src/a.py", old_str="return 1", new_str="return 2")
    assert response.error == "tool_error"
    assert "occurs 2 times, at lines 2, 5" in str(response.text)
    response = await editor(
        command="str_replace", path="src/a.py", old_str="def g():\n    return 1", new_str="def g(): ..."
    )
    assert "     4\tdef g(): ..." in str(response.text)
    await editor(command="insert", path="src/a.py", insert_line=0, new_str="import os")
    assert (await box.read_file("src/a.py")).startswith(b"import os\ndef f")
    assert "src/a.py" in str((await editor(command="view", path=".")).text)
    await box.write_file("bin", b"a\0b")
    for arguments, message in (
        ({"command": "view", "path": "bin"}, "not a text file"),
        ({"command": "view", "path": "none"}, "there is no file 'none'"),
        ({"command": "view", "path": "src/a.py", "view_range": [9, 12]}, "has 5 lines"),
        ({"command": "insert", "path": "src/a.py"}, "insert needs insert_line and new_str"),
    ):
        assert message in str((await editor(**arguments)).text)


async def test_patch_is_applied_whole_or_not_at_all(use: Callable[[BaseTool], Do], box: Sandbox) -> None:
    patch = use(as_tool("apply_patch"))  # type: ignore[arg-type]
    await box.write_file("p/a", b"1\n2\n3\n")
    await box.write_file("p/b", b"x\n")
    begin = "*** Begin Patch\n*** Update File: p/a\n@@\n 1\n-2\n+two\n"
    response = await patch(patch=f"{begin}*** Delete File: p/none\n*** End Patch")
    assert "there is no file 'p/none' to delete" in str(response.text)
    response = await patch(patch=f"{begin}*** Update File: p/b\n@@\n-y\n+z\n*** End Patch")
    assert "p/b: hunk 1 does not match: the file has no line 'y'" in str(response.text)
    assert await box.read_file("p/a") == b"1\n2\n3\n"
    moved = "*** Update File: p/b\n*** Move to: p/c\n*** Add File: p/d\n+new\n*** End Patch"
    assert (await patch(patch=begin + moved)).text == "updated p/a\nmoved p/b to p/c\nadded p/d"
    assert await box.read_file("p/a") == b"1\ntwo\n3\n"
    assert (await box.read_file("p/c"), await box.read_file("p/d")) == (b"x\n", b"new\n")
    assert not (await box.exec(["test", "-e", "p/b"])).ok


async def test_dead_sandbox_raises_instead_of_answering() -> None:
    async with some_boxes() as manager:
        box = await manager.open()
        runner = ToolRunner({"shell": as_tool("shell")}, data=AgentData(sandbox=box))
        await runner.run(ToolCall("a", "shell", {"command": "true"}))
        await box.close()
        with pytest.raises(SandboxDied):
            await runner.run(ToolCall("b", "shell", {"command": "true"}))
        await runner.close()


async def test_shipped_tools_are_configured_by_name() -> None:
    config = ToolsConfig.model_validate(["editor", {"name": "shell", "config": {"timeout": 5}}, "submit"])
    async with Toolbox(config) as toolbox:
        tools = {tool.name: tool for tool in await toolbox.tools()}
    assert list(tools) == ["editor", "shell", "submit"]
    assert "5 by default" in tools["shell"].schema.parameters["properties"]["timeout"]["description"]
    assert as_tool("python") is as_tool("python")
    assert {as_tool(name).name for name in SHIPPED} == set(SHIPPED)
    for wrong, message in (
        (["shel"], "there is no tool 'shel'; did you mean 'shell'"),
        (
            [{"name": "shell", "config": {"timeot": 5}}],
            "config: timeot: unknown key, value 5; .* its keys are timeout, .*persistent",
        ),
        ([{"name": "submit", "config": {"a": 1}}], "takes no config"),
    ):
        with pytest.raises(ConfigError, match=message):
            await Toolbox(ToolsConfig.model_validate(wrong)).tools()


PYPLOT = """
figures = [1, 2]
class Figure:
    def savefig(self, path, **given):
        open(path, "wb").write(bytes([137]) + b"PNG\\r\\n" + bytes([26]) + b"\\n, a picture")
def get_fignums(): return list(figures)
def figure(number): return Figure()
def close(which): figures.clear()
"""


async def test_open_figures_are_returned_as_images(use: Callable[[BaseTool], Do], box: Sandbox) -> None:
    # A stand-in for matplotlib, which is no dependency: what the interpreter calls of it.
    await box.write_file("matplotlib/__init__.py", b"")
    await box.write_file("matplotlib/pyplot.py", PYPLOT.encode())
    python = use(PythonTool({"plots": True}))
    response = await python(code="import matplotlib.pyplot as plt; 7")
    assert response.text == "7"
    assert response.image == ["data:image/png;base64,iVBORw0KGgosIGEgcGljdHVyZQ=="] * 2
    assert (await python(code="8")).image is None
    without = use(PythonTool())
    assert (await without(code="import matplotlib.pyplot")).image is None
    assert (PythonTool({"plots": True}).media, PythonTool().media) == (("image",), ())
