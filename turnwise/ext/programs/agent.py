"""The black-box agent: runs an external program in an episode, with its session as the program's model endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from turnwise.agents.core import Agent, Episode
from turnwise.errors import AgentError, shown, undo_on_error
from turnwise.ext.programs.config import BlackBoxConfig, mounts_of, paths_within, read_config, resolve_recipe
from turnwise.ext.programs.program import Exit, Output, Program, ProgramError, WorkerReply, Workers
from turnwise.ext.programs.sandboxed_program import ProgramFolder, SandboxedProgram
from turnwise.ext.programs.tool_server import OfferedTools, ToolServer
from turnwise.ext.programs.workdir import (
    API_KEY,
    PLACEHOLDERS,
    Workdir,
    check_arguments,
    environment,
    fill,
    read_answer,
    shell_tools,
    told_of,
)
from turnwise.gateway.local import SessionEndpoint
from turnwise.model.canonical import clean
from turnwise.sandboxes.core import Mount, Sandbox
from turnwise.types import StopReason

How = Literal["ended", "timeout", "lingered"]
_NO_OUTPUT = Output("", 0, False)


@dataclass(slots=True)
class _Acting:
    """State of one episode that a program acts in."""

    episode: Episode
    endpoint: SessionEndpoint
    offered: OfferedTools | None
    values: dict[str, str]
    started: float


@dataclass(frozen=True, slots=True)
class _Given:
    """Inputs of a program: command line, files by path, standard input."""

    argv: list[str]
    files: dict[str, str]
    stdin: bytes


@dataclass(frozen=True, slots=True)
class _End:
    """How a program's part in an episode ended.

    Attributes:
        how: By itself, or why it was killed.
        exit: Exit status and outputs; empty for a persistent worker.
        answer: The answer, where the recipe locates one and it exists.
        error: The failure that a worker reported.
    """

    how: How
    exit: Exit
    answer: str | None = None
    error: str | None = None


class BlackBoxAgent(Agent):
    """Runs an external program against the episode's model endpoint."""

    # The program's own requests say which tools there are, or its prompts do.
    offers_tools: ClassVar[bool] = False
    forkable: ClassVar[bool] = False

    def __init__(self, **config: Any) -> None:
        """Validate the configuration; start nothing.

        Args:
            **config: See :class:`~turnwise.ext.programs.config.BlackBoxConfig`.

        Raises:
            AgentError: A key is invalid, or the program is missing.
            RegistryError: The recipe is unknown.
            ConfigError: A reference cannot be loaded.
        """
        self._config: BlackBoxConfig = read_config(config)
        self._recipe = resolve_recipe(self._config)
        self._mounts = mounts_of(self._config, self._recipe)
        most = self._config.max_concurrent
        self._slots = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)
        self._tools = ToolServer()
        self._workers = Workers(self._config.workers, self._start_worker) if self._config.workers else None

    async def run(self, episode: Episode) -> None:
        """Run one episode.

        Raises:
            ProgramError: The program could not be started, was killed, or exited before its first model request.
            AgentError: Files or folders are invalid, the program failed under ``nonzero_exit: error``, or the episode
                has no sandbox.
            EnvError: The environment failed in a tool call.
            SandboxError: The sandbox failed.
        """
        async with self._slots, contextlib.AsyncExitStack() as stack:
            endpoint = await episode.endpoint()
            sandbox = self._sandbox_of(episode) if self._config.sandbox else None
            offered = None
            if self._config.tools and (episode.tools or self._config.reply):
                listener = None if sandbox is None else await sandbox.listen()
                offered = await self._tools.offer(episode, endpoint, reply=self._config.reply, listener=listener)
                stack.push_async_callback(self._tools.withdraw, offered)
            url = endpoint.url if sandbox is None else await endpoint.serve_at(await sandbox.listen())
            acting = _Acting(episode, endpoint, offered, self._values(episode, url, offered), time.monotonic())
            if sandbox is not None:
                end = await self._in_sandbox(acting, sandbox)
            elif self._workers is not None:
                end = await self._serve(self._workers, acting)
            else:
                end = await self._once(acting)
            self._count(acting, end)
            await self._conclude(acting, end)

    async def close(self) -> None:
        """Stop the workers and the tool server."""
        if self._workers is not None:
            await self._workers.close()
        await self._tools.close()

    def sandbox_mounts(self) -> tuple[Mount, ...]:
        """The program's files and the configured ``mounts``, where it runs in a sandbox."""
        return self._mounts

    async def _once(self, acting: _Acting) -> _End:
        info = acting.episode.info
        workspace = info.get("workspace")
        config = self._config
        places = await asyncio.to_thread(Workdir.make, config.scratch, config.workspace, workspace)
        failed = True
        try:
            end = await self._in_places(acting, places, dict(info.get("files") or {}))
            failed = end.how != "ended" or end.exit.status != 0
            return end
        finally:
            if config.keep == "never" or (config.keep == "failed" and not failed):
                await asyncio.to_thread(places.remove)

    async def _in_places(self, acting: _Acting, places: Workdir, files: dict[str, str]) -> _End:
        home, root = str(places.home), places.root
        launch = self._given(acting, home=home, work=str(places.work), root=str(root))
        places.write({**files, **launch.files})
        path = os.environ.get("PATH", os.defpath)
        if acting.offered is not None:
            path = f"{places.install_tool(acting.offered.url)}{os.pathsep}{path}"
        env = self._environment(acting, str(root / "tmp"), path)
        kept, most = self._config.output_bytes, self._config.output_limit
        program = await Program.start(
            launch.argv, env=env, cwd=places.work, stdin=launch.stdin, most_output=kept, output_limit=most
        )
        try:
            how = await self._watch(program.wait, acting)
        finally:
            left = await program.end()
            if self._config.keep != "never":
                outputs = {"stdout": left.stdout, "stderr": left.stderr}
                places.write({str(places.root / name): output.text for name, output in outputs.items()})

        async def read(name: str) -> str | None:
            try:
                return (places.work / name).read_text(errors="replace")
            except OSError:
                return None

        return _End(how, left, await read_answer(fill(self._recipe.result, acting.values), left.stdout.text, read))

    async def _in_sandbox(self, acting: _Acting, sandbox: Sandbox) -> _End:
        quarters = await ProgramFolder.make(sandbox, self._config.workspace)
        if not self._config.mount_program:
            acting.values["python"] = "python3"
        launch = self._given(acting, home=quarters.home, work=quarters.work, root=quarters.root)
        await quarters.write({**(acting.episode.info.get("files") or {}), **launch.files})
        path = os.pathsep.join([quarters.path, *paths_within(self._mounts)])
        if acting.offered is not None:
            path = f"{await quarters.install_tool(acting.offered.url)}:{path}"
        env = self._environment(acting, f"{quarters.root}/tmp", path)
        kept, most = self._config.output_bytes, self._config.output_limit
        program = await SandboxedProgram.start(
            quarters, launch.argv, env=env, stdin=launch.stdin, most_output=kept, output_limit=most
        )
        how: How | None = None
        try:
            how = await self._watch(program.wait, acting)
        finally:
            # The output of an abandoned program is not read.
            left = await program.end(collect=how == "ended")
        where = fill(self._recipe.result, acting.values)
        return _End(how, left, await read_answer(where, left.stdout.text, quarters.read))

    def _given(self, acting: _Acting, *, home: str, work: str, root: str) -> _Given:
        recipe, values = self._recipe, acting.values
        values |= {"home": home, "work": work, "prompt_file": f"{root}/prompt.txt"}
        values["prompt"] = fill(recipe.prompt, values).strip()
        offered = acting.offered is not None
        own = {**recipe.files, **(recipe.tool_files if offered else {})}
        written = {fill(name, values): fill(text, values) for name, text in own.items()}
        argv = [fill(each, values) for each in (*recipe.command, *(recipe.tool_arguments if offered else ()))]
        check_arguments(argv)
        files = {**written, values["prompt_file"]: values["prompt"]}
        return _Given(argv, files, fill(recipe.stdin, values).encode())

    def _environment(self, acting: _Acting, temporary: str, path: str) -> dict[str, str]:
        recipe, passed = self._recipe, self._config.pass_env
        return environment(recipe.dialect, acting.values, recipe.env, passed, temporary=temporary, path=path)

    def _sandbox_of(self, episode: Episode) -> Sandbox:
        if episode.sandbox is None:
            raise AgentError(
                f"blackbox: the program runs in a sandbox, but {type(episode.env).__qualname__} opened none in "
                "its reset: choose an environment that works in one (swe, terminal), or leave 'sandbox' out"
            )
        return episode.sandbox

    async def _watch(self, wait: Callable[[], Awaitable[Any]], acting: _Acting) -> How:
        """Wait for a program's exit, with a grace period once its budget is used up or the episode is over."""
        over = asyncio.ensure_future(wait())
        # A program with nothing left to sample or to do has a moment to end by itself.
        stops: list[asyncio.Future[Any]] = [asyncio.ensure_future(acting.endpoint.wait_exhausted())]
        if acting.offered is not None:
            stops.append(asyncio.ensure_future(acting.offered.over.wait()))
        try:
            async with asyncio.timeout(self._config.timeout):
                await asyncio.wait({over, *stops}, return_when=asyncio.FIRST_COMPLETED)
                if not over.done():
                    await asyncio.wait({over}, timeout=self._config.grace)
                return "ended" if over.done() else "lingered"
        except TimeoutError:
            return "timeout"
        finally:
            for each in (over, *stops):
                each.cancel()

    async def _serve(self, workers: Workers, acting: _Acting) -> _End:
        job: dict[str, Any] = {name: acting.values[name] for name in _JOB}
        job |= {"id": secrets.token_hex(8), "prompt": fill(self._recipe.prompt, acting.values).strip()}
        async with workers.borrowed() as worker:
            serving: asyncio.Task[WorkerReply | None] = asyncio.ensure_future(worker.serve(job))
            try:
                how = await self._watch(lambda: asyncio.shield(serving), acting)
                result = serving.result() if how == "ended" else None
            finally:
                serving.cancel()
            if result is not None:
                goes_on = Exit(0 if result.error is None else 1, _NO_OUTPUT, _NO_OUTPUT, 0)
                return _End(how, goes_on, result.answer, result.error)
            return _End(how, await worker.end())

    async def _start_worker(self, stdin: int, on_line: Callable[[bytes], None]) -> tuple[Program, Callable[[], None]]:
        places = await asyncio.to_thread(Workdir.make, self._config.scratch, self._config.workspace, None)
        values = dict.fromkeys(PLACEHOLDERS, "") | {"model": self._config.model, "api_key": API_KEY}
        values |= {"home": str(places.home), "work": str(places.work), "python": sys.executable}
        with undo_on_error(places.remove):
            places.write({fill(name, values): fill(text, values) for name, text in self._recipe.files.items()})
            env = environment(
                *(self._recipe.dialect, values, self._recipe.env, self._config.pass_env),
                temporary=str(places.root / "tmp"),
                path=os.environ.get("PATH", os.defpath),
            )
            argv = [fill(each, values) for each in self._recipe.command]
            kept, most = self._config.output_bytes, self._config.output_limit
            program = await Program.start(
                argv, env=env, cwd=places.work, stdin=stdin, most_output=kept, output_limit=most, on_line=on_line
            )
        return program, places.remove

    async def _conclude(self, acting: _Acting, end: _End) -> None:
        episode, endpoint, left = acting.episode, acting.endpoint, end.exit
        if acting.offered is not None and acting.offered.failure is not None:
            raise acting.offered.failure
        if episode.ended:
            return
        await endpoint.wait_settled()
        if left.flooded:
            raise AgentError(
                self._story(
                    f"it wrote more than output_limit={self._config.output_limit} bytes and was killed: raise that key "
                    "of agent.config, or have the program write less; the end of its output",
                    end,
                )
            )
        if end.how == "timeout":
            episode.finish(StopReason.TIMEOUT)
            return
        if end.how == "lingered" or endpoint.failure is not None:
            # The program's last error response ends the episode: the runner maps it to a stop reason.
            return
        if left.status is None or left.status < 0:
            how = "its supervisor was killed" if left.status is None else f"signal {-left.status} ended it"
            raise ProgramError(self._story(how, end))
        turns = endpoint.entry.session.turns
        if turns == 0:
            raise ProgramError(self._story(f"exit status {left.status}, and it never asked the model", end))
        if left.status != 0 and self._config.nonzero_exit == "error":
            raise AgentError(self._story(f"exit status {left.status}", end))
        await self._answer(episode, endpoint, end.answer)

    async def _answer(self, episode: Episode, endpoint: SessionEndpoint, answer: str | None) -> None:
        last = endpoint.entry.session.last
        if answer is None and self._recipe.result == "message":
            if last is not None and last.get("finish_reason") == "length" and not last.get("tool_calls"):
                episode.finish(StopReason.MAX_TOKENS, final=last)
                return
            final = episode.answer
        else:
            final = {"role": "assistant", "content": clean(answer or "").strip()}
            if last is not None and "turn_id" in last:
                final["turn_id"] = last["turn_id"]
        if final is None:
            episode.finish(StopReason.COMPLETED)
            return
        result = await episode.step(final)
        if not (result.terminated or result.truncated):
            # The environment would continue, but the program has ended.
            episode.finish(StopReason.COMPLETED, final=final)

    def _values(self, episode: Episode, url: str, offered: OfferedTools | None) -> dict[str, str]:
        return {
            **told_of(episode.observation),
            "tools": shell_tools(offered.schemas) if offered is not None else "",
            "model": self._config.model,
            "api_key": API_KEY,
            "base_url": url,
            "openai_base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "tools_url": offered.url if offered is not None else "",
            "mcp_url": offered.mcp_url if offered is not None else "",
            "python": sys.executable,
            "context_length": str(episode.limits.context_length),
            "max_turns": str(episode.limits.max_turns),
        }

    def _count(self, acting: _Acting, end: _End) -> None:
        left = end.exit
        failed = end.how == "ended" and left.status != 0
        acting.episode.count(
            {
                "blackbox/seconds": time.monotonic() - acting.started,
                "blackbox/nonzero_exits": float(failed),
                **({} if left.swept is None else {"blackbox/killed_processes": float(left.swept)}),
                "blackbox/output_bytes": float(left.stdout.size + left.stderr.size),
                "blackbox/lingered": float(end.how == "lingered"),
            }
        )

    def _story(self, how: str, end: _End) -> str:
        """Return how a program ended and the tail of its output, without secrets of this process."""
        reason = end.error or end.exit.stderr.end() or end.exit.stdout.end() or "it wrote nothing"
        for name in self._config.pass_env:
            secret = os.environ.get(name, "")
            reason = reason.replace(secret, f"<{name}>") if len(secret) > 3 else reason
        return f"the program {shown(Path(self._recipe.command[0]).name)} failed: {how}: {reason}"


_JOB = (
    *("model", "api_key", "base_url", "openai_base_url", "anthropic_base_url", "tools_url", "mcp_url"),
    *("max_turns", "task", "system", "user"),
)
