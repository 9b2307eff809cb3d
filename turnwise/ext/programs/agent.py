"""The black-box agent: runs an external program in an episode, with its session as the program's model endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from turnwise.agents.core import Agent, Episode
from turnwise.agents.registry import row_of
from turnwise.errors import AgentError, shown, undo_on_error
from turnwise.ext.programs.config import BlackBoxConfig, mounts_of, read_config, resolve_recipe
from turnwise.ext.programs.mounts import paths_within
from turnwise.ext.programs.program import (
    Exit,
    Output,
    Program,
    ProgramError,
    StartError,
    WorkerReply,
    Workers,
    count_oom_kills,
)
from turnwise.ext.programs.reward_events import RewardEvents
from turnwise.ext.programs.sandboxed_program import ProgramFolder, SandboxedProgram
from turnwise.ext.programs.tool_server import ToolServer
from turnwise.ext.programs.workdir import (
    API_KEY,
    PLACEHOLDERS,
    Workdir,
    check_arguments,
    environment,
    fill,
    observation_values,
    placeholders_in,
    read_answer,
    row_values,
    shell_tools,
)
from turnwise.gateway.local import SessionEndpoint
from turnwise.model.canonical import clean
from turnwise.sandboxes.core import Mount, Sandbox
from turnwise.types import StopReason

How = Literal["ended", "timeout", "lingered"]
_log = logging.getLogger(__name__)
_NO_OUTPUT = Output("", 0, False)


@dataclass(slots=True)
class _RunState:
    """State of one episode that a program acts in.

    Attributes:
        oom_kills: What the machine had killed for want of memory at the start; None in a sandbox, which has its own.
    """

    episode: Episode
    endpoint: SessionEndpoint
    offered: ToolServer | None
    values: dict[str, str]
    started: float
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class _Launch:
    """Inputs of a program: command line, files by path, standard input."""

    argv: list[str]
    files: dict[str, str]
    stdin: bytes


@dataclass(frozen=True, slots=True)
class _RunEnd:
    """How the run of a program in an episode ended.

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

    # The program's requests or prompts name the tools.
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
        texts = (*self._recipe.command, *self._recipe.env.values(), *self._recipe.files.values())
        self._posts_rewards = "event_url" in placeholders_in(texts)
        limit = self._config.max_concurrent
        self._slots = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._workers = Workers(self._config.workers, self._start_worker) if self._config.workers else None
        self._warned = False

    async def run(self, episode: Episode) -> None:
        """Run one episode.

        Raises:
            ProgramError: The program could not be started, ended before its first model request, or was killed while
                the machine was out of memory.
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
                offered = await ToolServer.start(episode, endpoint, with_reply=self._config.reply, listener=listener)
                stack.push_async_callback(offered.close)
            url = endpoint.url if sandbox is None else await endpoint.serve_at(await sandbox.listen())
            values = self._values(episode, url, offered)
            events = None
            if self._posts_rewards:
                events = await RewardEvents.start(None if sandbox is None else await sandbox.listen())
                stack.push_async_callback(events.close)
                values["event_url"] = events.url
            oom_kills = count_oom_kills() if sandbox is None else None
            state = _RunState(episode, endpoint, offered, values, time.monotonic(), oom_kills)
            if sandbox is not None:
                end = await self._run_in_sandbox(state, sandbox)
            elif self._workers is not None:
                end = await self._run_on_worker(self._workers, state)
            else:
                end = await self._run_in_workdir(state)
            self._count_metrics(state, end)
            if events is not None and events.value is not None and not episode.ended:
                episode.reward(events.value)
            await self._conclude(state, end)

    async def close(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            await self._workers.close()

    def sandbox_mounts(self) -> tuple[Mount, ...]:
        """The program's files and the configured ``mounts``, where it runs in a sandbox."""
        return self._mounts

    async def _run_in_workdir(self, state: _RunState) -> _RunEnd:
        info = state.episode.info
        workspace = info.get("workspace")
        config = self._config
        workdir = await asyncio.to_thread(Workdir.make, config.scratch, config.workspace, workspace)
        failed = True
        try:
            end = await self._run_program(state, workdir, dict(info.get("files") or {}))
            failed = end.how != "ended" or end.exit.status != 0
            return end
        finally:
            if config.keep == "never" or (config.keep == "failed" and not failed):
                await asyncio.to_thread(workdir.remove)

    async def _run_program(self, state: _RunState, workdir: Workdir, files: dict[str, str]) -> _RunEnd:
        home, root = str(workdir.home), workdir.root
        launch = self._prepare_launch(state, home=home, work=str(workdir.work), root=str(root))
        workdir.write({**files, **launch.files})
        path = os.environ.get("PATH", os.defpath)
        if state.offered is not None:
            path = f"{workdir.install_tool(state.offered.url)}{os.pathsep}{path}"
        env = self._environment(state, str(root / "tmp"), path)
        kept_bytes, output_limit = self._config.output_bytes, self._config.output_limit
        program = await Program.start(
            launch.argv, env=env, cwd=workdir.work, stdin=launch.stdin, kept_bytes=kept_bytes, output_limit=output_limit
        )
        try:
            how = await self._watch(program.wait, state)
        finally:
            exit_state = await program.end()
            if self._config.keep != "never":
                outputs = {"stdout": exit_state.stdout, "stderr": exit_state.stderr}
                # Where the program left no room for them, they are in the error or nowhere.
                with contextlib.suppress(AgentError):
                    workdir.write({str(workdir.root / name): output.text for name, output in outputs.items()})

        async def read(name: str) -> str | None:
            return await asyncio.to_thread(workdir.read, name)

        return _RunEnd(
            how, exit_state, await read_answer(fill(self._recipe.result, state.values), exit_state.stdout.text, read)
        )

    async def _run_in_sandbox(self, state: _RunState, sandbox: Sandbox) -> _RunEnd:
        folder = await ProgramFolder.make(sandbox, self._config.workspace)
        if not self._config.mount_program:
            state.values["python"] = "python3"
        launch = self._prepare_launch(state, home=folder.home, work=folder.work, root=folder.root)
        await folder.write({**(state.episode.info.get("files") or {}), **launch.files})
        path = os.pathsep.join([folder.path, *paths_within(self._mounts)])
        if state.offered is not None:
            path = f"{await folder.install_tool(state.offered.url)}:{path}"
        env = self._environment(state, f"{folder.root}/tmp", path)
        kept_bytes, output_limit = self._config.output_bytes, self._config.output_limit
        program = await SandboxedProgram.start(
            folder, launch.argv, env=env, stdin=launch.stdin, kept_bytes=kept_bytes, output_limit=output_limit
        )
        how: How | None = None
        try:
            how = await self._watch(program.wait, state)
        finally:
            # The output of an abandoned program is not read.
            exit_state = await program.end(collect=how == "ended")
        location = fill(self._recipe.result, state.values)
        return _RunEnd(how, exit_state, await read_answer(location, exit_state.stdout.text, folder.read))

    def _prepare_launch(self, state: _RunState, *, home: str, work: str, root: str) -> _Launch:
        recipe, values = self._recipe, state.values
        values |= {"home": home, "work": work, "prompt_file": f"{root}/prompt.txt"}
        values["prompt"] = fill(recipe.prompt, values).strip()
        offered = state.offered is not None
        recipe_files = {**recipe.files, **(recipe.tool_files if offered else {})}
        written = {fill(name, values): fill(text, values) for name, text in recipe_files.items()}
        argv = [fill(argument, values) for argument in (*recipe.command, *(recipe.tool_arguments if offered else ()))]
        check_arguments(argv)
        files = {**written, values["prompt_file"]: values["prompt"]}
        return _Launch(argv, files, fill(recipe.stdin, values).encode())

    def _environment(self, state: _RunState, temporary: str, path: str) -> dict[str, str]:
        recipe, passed = self._recipe, self._config.pass_env
        return environment(recipe.dialect, state.values, recipe.env, passed, temporary=temporary, path=path)

    def _sandbox_of(self, episode: Episode) -> Sandbox:
        if episode.sandbox is None:
            raise AgentError(
                f"blackbox: the program runs in a sandbox, but {type(episode.env).__qualname__} opened none in "
                "its reset: choose an environment that works in one (swe, terminal), or leave 'sandbox' out"
            )
        return episode.sandbox

    async def _watch(self, wait: Callable[[], Awaitable[Any]], state: _RunState) -> How:
        """Wait for a program's exit, with a grace period once its budget is used up or the episode is over."""
        exited = asyncio.ensure_future(wait())
        # A program that can sample no more, or whose episode is over, has a grace period to exit by itself.
        stops: list[asyncio.Future[Any]] = [asyncio.ensure_future(state.endpoint.wait_exhausted())]
        if state.offered is not None:
            stops.append(asyncio.ensure_future(state.offered.ended.wait()))
        try:
            async with asyncio.timeout(self._config.timeout):
                await asyncio.wait({exited, *stops}, return_when=asyncio.FIRST_COMPLETED)
                if not exited.done():
                    await asyncio.wait({exited}, timeout=self._config.grace)
                return "ended" if exited.done() else "lingered"
        except TimeoutError:
            return "timeout"
        finally:
            for future in (exited, *stops):
                future.cancel()

    async def _run_on_worker(self, workers: Workers, state: _RunState) -> _RunEnd:
        job: dict[str, Any] = {name: state.values[name] for name in _JOB}
        job |= {"id": secrets.token_hex(8), "prompt": fill(self._recipe.prompt, state.values).strip()}
        async with workers.borrowed() as worker:
            serving: asyncio.Task[WorkerReply | None] = asyncio.ensure_future(worker.serve(job))
            try:
                how = await self._watch(lambda: asyncio.shield(serving), state)
                result = serving.result() if how == "ended" else None
            finally:
                serving.cancel()
            if result is not None:
                resumed = Exit(0 if result.error is None else 1, _NO_OUTPUT, _NO_OUTPUT, 0)
                return _RunEnd(how, resumed, result.answer, result.error)
            return _RunEnd(how, await worker.end())

    async def _start_worker(self, stdin: int, on_line: Callable[[bytes], None]) -> tuple[Program, Callable[[], None]]:
        workdir = await asyncio.to_thread(Workdir.make, self._config.scratch, self._config.workspace, None)
        values = dict.fromkeys(PLACEHOLDERS, "") | {"model": self._config.model, "api_key": API_KEY}
        values |= {"home": str(workdir.home), "work": str(workdir.work), "python": sys.executable}
        with undo_on_error(workdir.remove):
            workdir.write({fill(name, values): fill(text, values) for name, text in self._recipe.files.items()})
            env = environment(
                *(self._recipe.dialect, values, self._recipe.env, self._config.pass_env),
                temporary=str(workdir.root / "tmp"),
                path=os.environ.get("PATH", os.defpath),
            )
            argv = [fill(argument, values) for argument in self._recipe.command]
            kept_bytes, output_limit = self._config.output_bytes, self._config.output_limit
            program = await Program.start(
                argv,
                env=env,
                cwd=workdir.work,
                stdin=stdin,
                kept_bytes=kept_bytes,
                output_limit=output_limit,
                on_line=on_line,
            )
        return program, workdir.remove

    async def _conclude(self, state: _RunState, end: _RunEnd) -> None:
        episode, endpoint, exit_state = state.episode, state.endpoint, end.exit
        if state.offered is not None and state.offered.failure is not None:
            raise state.offered.failure
        if episode.ended:
            return
        await endpoint.wait_settled()
        if end.how == "timeout":
            episode.finish(StopReason.TIMEOUT)
            return
        if end.how == "lingered" or endpoint.failure is not None:
            # The program's last error response ends the episode: the runner maps it to a stop reason.
            return
        how = self._exit_text(exit_state)
        if endpoint.entry.session.turns == 0:
            raise StartError(self._failure_message(f"{how}, and it never asked the model", end))
        if exit_state.killed and state.oom_kills not in (None, count_oom_kills()):
            raise ProgramError(self._failure_message(f"{how} while the machine was out of memory", end))
        if exit_state.flooded or exit_state.status != 0:
            if self._config.nonzero_exit == "error":
                raise AgentError(self._failure_message(how, end))
            if (exit_state.flooded or exit_state.killed) and not self._warned:
                self._warned = True
                _log.warning("an episode is scored as it is: %s", self._failure_message(how, end))
        await self._answer(episode, endpoint, end.answer)

    async def _answer(self, episode: Episode, endpoint: SessionEndpoint, answer: str | None) -> None:
        message = endpoint.entry.session.last
        if answer is None and self._recipe.result == "message":
            if message is not None and message.get("finish_reason") == "length" and not message.get("tool_calls"):
                episode.finish(StopReason.MAX_TOKENS, final=message)
                return
            final = episode.answer
        else:
            final = {"role": "assistant", "content": clean(answer or "").strip()}
            if message is not None and "turn_id" in message:
                final["turn_id"] = message["turn_id"]
        if final is None:
            episode.finish(StopReason.COMPLETED)
            return
        result = await episode.step(final)
        if not (result.terminated or result.truncated):
            # The environment would continue, but the program has ended.
            episode.finish(StopReason.COMPLETED, final=final)

    def _values(self, episode: Episode, url: str, offered: ToolServer | None) -> dict[str, str]:
        return {
            **observation_values(episode.observation),
            **row_values(row_of(episode)),
            "tools": shell_tools(offered.schemas) if offered is not None else "",
            "model": self._config.model,
            "api_key": API_KEY,
            "base_url": url,
            "openai_base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "tools_url": offered.url if offered is not None else "",
            "mcp_url": offered.mcp_url if offered is not None else "",
            "event_url": "",
            "python": sys.executable,
            "context_length": str(episode.limits.context_length),
            "max_turns": str(episode.limits.max_turns),
        }

    def _count_metrics(self, state: _RunState, end: _RunEnd) -> None:
        exit_state = end.exit
        failed = end.how == "ended" and exit_state.status != 0
        state.episode.count(
            {
                "blackbox/seconds": time.monotonic() - state.started,
                "blackbox/nonzero_exits": float(failed),
                **({} if exit_state.swept is None else {"blackbox/killed_processes": float(exit_state.swept)}),
                "blackbox/output_bytes": float(exit_state.stdout.size + exit_state.stderr.size),
                "blackbox/lingered": float(end.how == "lingered"),
            }
        )

    def _exit_text(self, exit_state: Exit) -> str:
        if exit_state.flooded:
            return (
                f"it wrote more than output_limit={self._config.output_limit} bytes and was killed (raise that key of "
                "agent.config, or have the program write less)"
            )
        if exit_state.status is None:
            return "its supervisor was killed"
        status = exit_state.status
        return f"signal {-status} ended it" if status < 0 else f"exit status {status}"

    def _failure_message(self, how: str, end: _RunEnd) -> str:
        """Return how a program ended and the tail of its output, without secrets of this process."""
        reason = end.error or end.exit.stderr.tail() or end.exit.stdout.tail() or "it wrote nothing"
        for name in self._config.pass_env:
            secret = os.environ.get(name, "")
            reason = reason.replace(secret, f"<{name}>") if len(secret) > 3 else reason
        return f"the program {shown(Path(self._recipe.command[0]).name)} failed: {how}: {reason}"


_JOB = (
    *("model", "api_key", "base_url", "openai_base_url", "anthropic_base_url", "tools_url", "mcp_url"),
    *("max_turns", "task", "system", "user"),
)
