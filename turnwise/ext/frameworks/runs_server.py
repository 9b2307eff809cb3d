"""MCP server over the runs of a folder: read them, and start and stop them where that is allowed (extra ``mcp``)."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import orjson

from turnwise.append_file import is_locked
from turnwise.cli.options import as_overrides
from turnwise.config import read_yaml
from turnwise.envs.core import tool_methods
from turnwise.errors import ToolError, TurnwiseError, requires_extra
from turnwise.evaluation.tables import run_file
from turnwise.ext.frameworks.started_run import StartedRun
from turnwise.inference.guard.turnwise_guard import child_environment
from turnwise.tools.core import function_tool
from turnwise.tools.execute import ToolRunner
from turnwise.trainer.observe.metrics import METRICS_FILE, figures, read_metrics
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryFile
from turnwise.types import ToolCall
from turnwise.version import __version__

with requires_extra("mcp", "mcp", "serving runs over MCP"):
    import mcp_types
    from mcp.server import Server

_HOW: Final = (
    "Training runs and evaluations of Turnwise below one folder; paths are relative to it. list_runs finds them and "
    "configurations; start_run needs a budget; follow_run reports what is new since a cursor; explain_run says what to "
    "change."
)
_RIGHTS: Final = ("start_run", "stop_run", "bisect_episode")
_REFUSED: Final = " Refused here: this server is read-only."
_REWARD: Final = "reward/mean"
_HEADLINE: Final = (_REWARD, "reward/informative", "rollout/turns", "gap/mean")
_ROW: Final = ("id", "task_id", "group_id", "partition", "policy", "reward", "stop_reason", "turns", "sampled_tokens")
_DEEPEST: Final = 5
_MOST_RUNS, _PAGE, _TEXT_PAGE = 50, 20, 8_000
_LONGEST_WAIT_S, _LOOK_S = 60.0, 0.5

# Calls wait for news, and run models: none of them waits for another one.
_run_tool: Final = function_tool(concurrent=True, max_output=200_000)
Run = Annotated[str, "Directory of a run, as list_runs names it."]
Cursor = Annotated[int, "That of the last answer; 0 is the beginning."]


class RunTools:
    """What a client may do with the runs below a folder.

    Args:
        root: The folder; no path leads out of it.
        may_start: Whether clients may start and stop runs, and have models continue episodes.
    """

    def __init__(self, root: Path, *, may_start: bool = False) -> None:
        self.root = root.resolve()
        self.may_start = may_start
        self._started: dict[Path, StartedRun] = {}

    async def close(self) -> None:
        """Stop the runs that were started: the same configuration and name resume them."""
        await asyncio.gather(*(run.stop("the server's end") for run in self._started.values()))

    @_run_tool
    def list_runs(self, folder: Annotated[str, "Where to look."] = ".") -> dict[str, Any]:
        """List the newest runs (kind, state, steps, last mean reward), and configurations that start_run takes."""
        runs, configs = [], []
        for home, folders, names in os.walk(self._path(folder)):
            is_run = METRICS_FILE in names or TRAJECTORIES in names
            deep = is_run or len(Path(home).relative_to(self.root).parts) >= _DEEPEST
            folders[:] = [] if deep else [name for name in folders if not name.startswith((".", "__"))]
            runs += [Path(home)] if is_run else []
            files = (Path(home, name) for name in names if name.endswith((".yaml", ".yml")))
            configs += [self._name(file) for file in files if b"\npolicies:" in b"\n" + file.read_bytes()]
        runs.sort(key=lambda run: run.stat().st_mtime, reverse=True)
        return {"runs": [self._row(run) for run in runs[:_MOST_RUNS]], "configs": sorted(configs)}

    @_run_tool
    async def start_run(
        self,
        config: Annotated[str, "YAML file, as list_runs names it; config.yaml in a run's directory resumes that run."],
        name: Annotated[str | None, "By default the configuration's; that of a run resumes it."] = None,
        steps: Annotated[int | None, "Budget: train steps in all."] = None,
        minutes: Annotated[float | None, "Budget: wall time in all."] = None,
        cpu_seconds: Annotated[float | None, "Budget: CPU seconds of the processes that are started now."] = None,
        overrides: Annotated[list[str] | None, "Further keys, as section.key=value."] = None,
    ) -> dict[str, Any]:
        """Start a training run, or resume one, within a budget of at least one limit."""
        self._check_right("start_run")
        if steps is None and minutes is None and cpu_seconds is None:
            raise ToolError("start_run needs a budget: give steps, minutes or cpu_seconds")
        file = self._path(config)
        loaded = read_yaml(file.read_text(encoding="utf-8")) if file.is_file() else None
        if not isinstance(loaded, Mapping):
            raise ToolError(f"{config} is no configuration: list_runs names those below the folder")
        name = name or str(loaded.get("name", ""))
        runs = self._path(str(loaded.get("runs", "runs")))
        directory = self._path(str(runs / name))
        if directory.parent != runs:
            raise ToolError(f"name is {name!r}: give the run a name, without a folder")
        if directory.is_dir() and self._state(directory) == "running":
            raise ToolError(f"{self._name(directory)} is running: stop it first, or choose another name")
        limits = {"steps": steps, "budget.wall_time": None if minutes is None else 60 * minutes}
        keys = [*(overrides or ()), *as_overrides({**limits, "name": name, "runs": runs})]
        run = await StartedRun.start(directory, [str(file), *keys], self.root, cpu_seconds)
        self._started[directory] = run
        if run.status:
            reason = f"was stopped by {run.ended_by}" if run.ended_by else f"ended with status {run.status}"
            raise ToolError(f"the run {reason} before its first step: {run.log()}")
        return self._row(directory)

    @_run_tool
    async def stop_run(self, run: Run) -> dict[str, Any]:
        """Stop a run as Ctrl-C does: with a checkpoint of its last step, from which start_run resumes it."""
        self._check_right("stop_run")
        started = self._started.get(self._path(run))
        if started is None:
            names = ", ".join(map(self._name, self._started)) or "no run"
            raise ToolError(f"this server did not start {run}, it started {names}: stop it where it was started")
        await started.stop()
        return {**self._row(self._path(run)), "log": started.log()}

    @_run_tool
    async def follow_run(
        self, run: Run, cursor: Cursor = 0, wait_seconds: Annotated[float, "At most 60."] = 0.0
    ) -> dict[str, Any]:
        """Report steps, evaluations and warnings since a cursor, waiting for the first one, and the run's state."""
        directory = self._directory(run)
        bound = time.monotonic() + min(wait_seconds, _LONGEST_WAIT_S)
        while True:
            # Asked before the file is read: what a run writes at its end is in the answer that says so.
            state = self._state(directory)
            records, end = _new_records(directory / METRICS_FILE, cursor)
            if records or state != "running" or time.monotonic() >= bound:
                break
            await asyncio.sleep(_LOOK_S)
        started = self._started.get(directory)
        log = {"log": started.log()} if started is not None and started.status else {}
        return {"state": state, "records": records, "cursor": end, **log}

    @_run_tool
    def read_curves(
        self,
        runs: Annotated[list[str], "Directories of runs."],
        metrics: Annotated[list[str] | None, "By default the mean reward and evaluations."] = None,
        points: Annotated[int, "Most rows of a table; of longer curves every so many steps."] = 20,
    ) -> dict[str, Any]:
        """Return metrics of runs as tables, rows of step and value, and the names of those that there are."""
        answer: dict[str, Any] = {}
        for run in runs:
            series = _series(self._directory(run))
            names = metrics or [name for name in series if name == _REWARD or name.startswith("eval/")]
            if missing := [name for name in names if name not in series]:
                raise ToolError(f"{run} has no metric {missing[0]!r}; it has {', '.join(sorted(series))}")
            tables = {name: _thinned(series[name], points) for name in names}
            answer[run] = {"tables": tables, "metrics": sorted(series)}
        return answer

    @_run_tool
    def list_trajectories(
        self, run: Run, cursor: Cursor = 0, task: Annotated[str | None, "Only those of this task."] = None
    ) -> dict[str, Any]:
        """List trajectories, a page of 20 in the order of their ends: task, reward, stop reason, turns, tokens."""
        with TrajectoryFile(run_file(self._directory(run))) as file:
            entries = [entry for entry in file.entries if task in (None, entry.task_id)]
        end = cursor + _PAGE
        page = [{name: getattr(entry, name) for name in _ROW} for entry in entries[cursor:end]]
        return {"trajectories": page, "total": len(entries), "cursor": end if end < len(entries) else None}

    @_run_tool
    async def read_trajectory(self, run: Run, trajectory: Annotated[str, "Its id."], cursor: Cursor = 0) -> Any:
        """Read a trajectory as text, in pages: messages, calls, rewards, forks."""
        text = await self._command("view", str(self._directory(run)), "--id", trajectory)
        end = cursor + _TEXT_PAGE
        return {"text": text[cursor:end], "total": len(text), "cursor": end if end < len(text) else None}

    @_run_tool
    async def explain_run(self, run: Run) -> Any:
        """Say what holds a training run back: the first cause first, with evidence and the keys to change."""
        return orjson.loads(await self._command("explain", str(self._directory(run)), "--json"))

    @_run_tool
    async def compare_runs(self, before: Run, after: Run, metric: Literal["success", "reward"] = "success") -> Any:
        """Compare two evaluations task by task: difference, 95 % interval, p-value, tasks that changed sides."""
        folders = [str(self._directory(run)) for run in (before, after)]
        return orjson.loads(await self._command("compare", *folders, "--metric", metric, "--json"))

    @_run_tool
    async def bisect_episode(
        self,
        run: Run,
        episode: Annotated[str, "Id of an episode or trajectory."],
        model: Annotated[str | None, "Directory of the model; by default the evaluation's."] = None,
        samples: Annotated[int, "Continuations from each turn."] = 4,
    ) -> Any:
        """Continue an episode from each of its turns with a model, to find the turn that won or lost it."""
        self._check_right("bisect_episode")
        options = [] if model is None else ["--model", str(self._path(model))]
        arguments = [str(self._directory(run)), episode, "--samples", str(samples), *options]
        return orjson.loads(await self._command("bisect", *arguments, "--json"))

    async def _command(self, *arguments: str) -> str:
        """Return what a command of ``turnwise`` prints; it works beside this process, and ends with the call."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turnwise", *arguments),
            cwd=self.root, env={**child_environment(), "COLUMNS": "120", "NO_COLOR": "1"},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
        if process.returncode:
            raise ToolError(err.decode(errors="replace")[-2000:].strip())
        return out.decode(errors="replace")

    def _check_right(self, name: str) -> None:
        if not self.may_start:
            raise ToolError(
                f"{name} needs the right to start, and this server is read-only: its owner may add --allow start"
            )

    def _path(self, text: str) -> Path:
        path = (self.root / text).resolve()
        if not path.is_relative_to(self.root):
            raise ToolError(f"{text} is outside of {self.root}, the folder that is served: give a path below it")
        return path

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _directory(self, run: str) -> Path:
        directory = self._path(run)
        if not directory.is_dir():
            raise ToolError(f"there is no run {run!r}: list_runs names them")
        return directory

    def _state(self, directory: Path) -> str:
        started = self._started.get(directory)
        if is_locked(directory) or (started is not None and started.status is None):
            return "running"
        if started is not None and started.ended_by is not None:
            return f"stopped by {started.ended_by}"
        return "ended" if (directory / "summary.json").is_file() else "interrupted"

    def _row(self, directory: Path) -> dict[str, Any]:
        rewards = _series(directory).get(_REWARD, [])
        kind = "training" if (directory / METRICS_FILE).is_file() else "evaluation"
        row = {"run": self._name(directory), "kind": kind, "state": self._state(directory)}
        return {**row, "step": rewards[-1][0], _REWARD: rewards[-1][1]} if rewards else row


def _series(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of each metric of a run's train steps and evaluations."""
    series: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    file = directory / METRICS_FILE
    for record in read_metrics(file) if file.is_file() else ():
        for name, value in figures({key: value for key, value in record.items() if value is not None}).items():
            series[name].append((record["step"], value))
    return dict(series)


def _thinned(rows: list[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    """Return every so many rows, with the last one."""
    return rows[:: -max(1, -(-len(rows) // max(points, 1)))][::-1]


def _new_records(file: Path, cursor: int) -> tuple[list[dict[str, Any]], int]:
    """Return what follows a byte of a file, of train steps the headlines, and where its complete lines end."""
    data = file.read_bytes() if file.is_file() else b""
    start = cursor if 0 <= cursor <= len(data) else 0
    end = max(start, data.rfind(b"\n") + 1)
    records = [orjson.loads(line) for line in data[start:end].splitlines() if line.endswith(b"}")]
    names = ("kind", "step", *_HEADLINE)
    return [
        {name: record[name] for name in names if name in record} if record.get("kind") == "train" else record
        for record in records
    ], end


def create_server(tools: RunTools) -> Server[Any]:
    """Return the server of a folder's runs, for any transport."""
    runner = ToolRunner(tool_methods(RunTools), owner=tools)

    async def list_tools(_ctx: Any, _: Any) -> mcp_types.ListToolsResult:
        refused = () if tools.may_start else _RIGHTS
        listed = [
            mcp_types.Tool(
                name=name,
                description=f"{tool.schema.description}{_REFUSED if name in refused else ''}",
                input_schema=tool.schema.parameters,
                annotations=mcp_types.ToolAnnotations(read_only_hint=name not in _RIGHTS),
            )
            for name, tool in runner.tools.items()
        ]
        return mcp_types.ListToolsResult(tools=listed)

    async def call_tool(_ctx: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        try:
            outcome = await runner.run(ToolCall("", params.name, params.arguments or {}))
        except TurnwiseError as error:
            text, failed = f"{type(error).__name__}: {error}", True
        else:
            text, failed = outcome.response.text or "", outcome.response.error is not None
        return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=text)], is_error=failed)

    return Server(
        "turnwise-runs", version=__version__, instructions=_HOW, on_list_tools=list_tools, on_call_tool=call_tool
    )
