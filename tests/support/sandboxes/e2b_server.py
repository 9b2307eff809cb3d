"""A local server that speaks E2B's protocol: REST for sandboxes, Connect for their processes, HTTP for their files.

The real SDK talks to it. Commands really run, in the machines of ``e2b_machines.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from support.sandboxes.e2b_machines import Box
from turnwise.inference.process import bind, server_without_signal_handlers
from turnwise.sandboxes.local.boot.file_copy import remove_tree

KEY = "e2b_" + "0" * 40
_PIECE = 2**16


class Cloud:
    """All that there is of it: machines, templates, snapshots, and what was asked."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.ends: dict[str, float] = {}
        self.snapshots: dict[str, Path] = {}
        self.templates = {"base", "python"}
        self.running: dict[tuple[str, int], asyncio.subprocess.Process] = {}
        self.created: list[dict[str, Any]] = []
        self.refreshed = 0
        self.forked: list[dict[str, Any]] = []
        self.fail_starts = 0
        self.fail_forks = 0
        self.unreadable_starts = 0
        self.cut_streams = 0
        self.folder = Path(tempfile.mkdtemp(prefix="e2b-cloud-"))

    def of(self, headers: Any) -> Box | None:
        return self.boxes.get(headers.get("e2b-sandbox-id", ""))

    async def create(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.created.append(body)
        if self.fail_starts:
            self.fail_starts -= 1
            return JSONResponse({"code": 500, "message": "no machine is free"}, 500, {"Should-Retry": "false"})
        if self.unreadable_starts:
            self.unreadable_starts -= 1
            return Response("<h1>Bad gateway</h1>", 500, media_type="text/html")
        template = body["templateID"]
        if template not in self.templates and template not in self.snapshots:
            return JSONResponse({"code": 404, "message": f"template '{template}' not found"}, 404)
        box = Box(uuid.uuid4().hex[:12], self.snapshots.get(template))
        box.metadata = body.get("metadata") or {}
        await box.start()
        self.boxes[box.name] = box
        self.ends[box.name] = time.time() + body.get("timeout", 300)
        return JSONResponse(self._described(box, template), 201)

    async def one(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        box = self.boxes.get(request.path_params["name"])
        if box is None:
            return JSONResponse({"code": 404, "message": "no such sandbox"}, 404)
        if request.method == "DELETE":
            await self.remove(box)
            return Response(status_code=204)
        return JSONResponse(self._listed(box))

    async def refresh(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.boxes:
            return JSONResponse({"code": 404, "message": "no such sandbox"}, 404)
        self.refreshed += 1
        self.ends[name] = time.time() + (await request.json())["timeout"]
        return Response(status_code=204)

    async def snapshot(self, request: Request) -> Response:
        box = self.boxes.get(request.path_params["name"])
        if box is None:
            return JSONResponse({"code": 404, "message": "no such sandbox"}, 404)
        name = f"snap{uuid.uuid4().hex[:12]}"
        self.snapshots[name] = self.folder / name
        self.snapshots[name].mkdir()
        await asyncio.to_thread(box.keep, self.snapshots[name])
        return JSONResponse({"snapshotID": name, "names": []}, 201)

    async def fork(self, request: Request) -> Response:
        box = self.boxes.get(request.path_params["name"])
        if box is None:
            return JSONResponse({"code": 404, "message": "no such sandbox"}, 404)
        body = await request.json()
        self.forked.append(body)
        forks: list[dict[str, Any]] = []
        with contextlib.ExitStack() as stack:
            files = tempfile.mkdtemp(dir=self.folder)
            stack.callback(remove_tree, files)
            await asyncio.to_thread(box.keep, Path(files))
            for _ in range(body.get("count", 1)):
                if self.fail_forks:
                    self.fail_forks -= 1
                    forks.append({"error": {"code": 500, "message": "no machine is free"}})
                    continue
                fork = Box(uuid.uuid4().hex[:12], Path(files))
                fork.metadata = box.metadata
                await fork.start()
                await fork.go_on(box)
                self.boxes[fork.name] = fork
                self.ends[fork.name] = time.time() + body.get("timeout", 15)
                forks.append({"sandbox": self._described(fork, "fork")})
        return JSONResponse(forks, 201)

    async def drop(self, request: Request) -> Response:
        snapshot = self.snapshots.pop(request.path_params["name"], None)
        if snapshot is None:
            return JSONResponse({"code": 404, "message": "no such template"}, 404)
        remove_tree(str(snapshot))
        return Response(status_code=204)

    async def list(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        import urllib.parse

        metadata = dict(urllib.parse.parse_qsl(request.query_params.get("metadata", "")))
        boxes = [box for box in self.boxes.values() if metadata.items() <= box.metadata.items()]
        return JSONResponse([self._listed(box) for box in boxes])

    async def files(self, request: Request) -> Response:
        box = self.of(request.headers)
        if box is None:
            return JSONResponse({"message": "The sandbox was not found"}, 502)
        path = request.query_params["path"]
        where = box.host_path(path)
        if request.method == "GET":
            if not where.is_file():
                return JSONResponse({"message": f"path '{path}' does not exist"}, 404)
            return StreamingResponse(_pieces(where), media_type="application/octet-stream")
        if request.headers["content-type"].startswith("multipart/"):
            form = await request.form()
            data = await next(iter(form.values())).read()  # type: ignore[union-attr]
        else:
            data = await request.body()
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(data)
        return JSONResponse([{"name": where.name, "type": "file", "path": path}])

    async def health(self, request: Request) -> Response:
        return Response(status_code=204 if self.of(request.headers) else 502)

    async def remove(self, box: Box) -> None:
        self.boxes.pop(box.name, None)
        await box.stop()

    async def close(self) -> None:
        for box in list(self.boxes.values()):
            await self.remove(box)
        remove_tree(str(self.folder))

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"code": 401, "message": "invalid API key"}, 401)
        return None

    def _described(self, box: Box, template: str) -> dict[str, Any]:
        token = {"envdVersion": "0.6.4", "envdAccessToken": "token", "domain": None}
        return {"templateID": template, "sandboxID": box.name, "clientID": "c", **token}

    def _listed(self, box: Box) -> dict[str, Any]:
        now = "2026-01-01T00:00:00Z"
        sizes = {"cpuCount": 1, "memoryMB": 512, "diskSizeMB": 512}
        described = self._described(box, "base")
        return {**described, **sizes, "startedAt": now, "endAt": now, "state": "running", "metadata": box.metadata}


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


class Processes(Process):
    """The processes of all machines; which one is in the headers."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def _box(self, ctx: RequestContext[Any, Any]) -> Box:
        headers = ctx.request_headers if not callable(ctx.request_headers) else ctx.request_headers()
        box = self.cloud.boxes.get(headers.get("e2b-sandbox-id", ""))
        if box is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        return box

    def _process(self, request: Any, ctx: RequestContext[Any, Any]) -> asyncio.subprocess.Process:
        box = self._box(ctx)
        process = self.cloud.running.get((box.name, request.process.selector.value))
        if process is None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        return process

    async def start(
        self, request: pb.StartRequest, ctx: RequestContext[Any, Any], /
    ) -> AsyncIterator[pb.StartResponse]:
        box = self._box(ctx)
        command = request.process
        assert command is not None
        process = await asyncio.create_subprocess_exec(
            *box.entering(),
            command.cmd,
            *command.args,
            env={"HOME": "/root", "PATH": os.environ["PATH"], **dict(command.envs)},
            stdin=asyncio.subprocess.PIPE if request.stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        key = (box.name, process.pid)
        self.cloud.running[key] = process
        try:
            yield _event(Oneof("start", pb.ProcessEvent.StartEvent(pid=process.pid)))
            if self.cloud.cut_streams:
                self.cloud.cut_streams -= 1
                process.kill()
                await process.wait()
                return
            async for kind, data in _outputs(process):
                yield _event(Oneof("data", pb.ProcessEvent.DataEvent(output=Oneof(kind, data))))  # type: ignore[arg-type]
            code = await process.wait()
            if box.name not in self.cloud.boxes:
                raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
            end = pb.ProcessEvent.EndEvent(exit_code=code, exited=code >= 0, status=f"exit status {code}")
            yield _event(Oneof("end", end))
        finally:
            self.cloud.running.pop(key, None)

    async def send_input(self, request: pb.SendInputRequest, ctx: RequestContext[Any, Any], /) -> pb.SendInputResponse:
        process = self._process(request, ctx)
        assert process.stdin is not None
        assert request.input is not None
        assert request.input.input is not None
        try:
            process.stdin.write(bytes(request.input.input.value))
            await process.stdin.drain()
        except OSError as error:
            raise ConnectError(Code.INTERNAL, f"error writing to stdin: {error}") from error
        return pb.SendInputResponse()

    async def close_stdin(
        self, request: pb.CloseStdinRequest, ctx: RequestContext[Any, Any], /
    ) -> pb.CloseStdinResponse:
        process = self._process(request, ctx)
        assert process.stdin is not None
        process.stdin.close()
        return pb.CloseStdinResponse()

    async def send_signal(
        self, request: pb.SendSignalRequest, ctx: RequestContext[Any, Any], /
    ) -> pb.SendSignalResponse:
        process = self._process(request, ctx)
        # nsenter waits for the real one, its child: only that is signalled, as E2B does.
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        return pb.SendSignalResponse()

    async def list(self, request: pb.ListRequest, ctx: RequestContext[Any, Any], /) -> pb.ListResponse:
        box = self._box(ctx)
        running = [pb.ProcessInfo(pid=pid) for name, pid in self.cloud.running if name == box.name]
        return pb.ListResponse(processes=running)


def _event(event: Any) -> pb.StartResponse:
    return pb.StartResponse(event=pb.ProcessEvent(event=event))


async def _outputs(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[str, bytes]]:
    """Both streams until both are closed by all who hold them, as E2B waits for them."""
    queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(16)

    async def pump(kind: str, reader: asyncio.StreamReader | None) -> None:
        assert reader is not None
        while data := await reader.read(_PIECE):
            await queue.put((kind, data))
        await queue.put((kind, b""))

    pumps = [asyncio.create_task(pump("stdout", process.stdout)), asyncio.create_task(pump("stderr", process.stderr))]
    try:
        open_streams = 2
        while open_streams:
            kind, data = await queue.get()
            if data:
                yield kind, data
            else:
                open_streams -= 1
    finally:
        for task in pumps:
            task.cancel()


def _app(cloud: Cloud) -> Starlette:
    processes = ProcessASGIApplication(Processes(cloud))

    async def process_app(scope: Any, receive: Any, send: Any) -> None:
        # Starlette hands the prefix over as root_path; the stubs know the whole path.
        await processes({**scope, "root_path": ""}, receive, send)

    async def told(_: Request, error: Exception) -> Response:
        # Whoever reads that a test failed reads why.
        return JSONResponse(
            {"code": 500, "message": f"{type(error).__name__}: {error}"}, 500, {"Should-Retry": "false"}
        )

    name = "/sandboxes/{name}"
    return Starlette(
        exception_handlers={Exception: told},
        routes=[
            Route("/v2/sandboxes", cloud.create, methods=["POST"]),
            Route("/v2/sandboxes", cloud.list, methods=["GET"]),
            Route(name, cloud.one, methods=["GET", "DELETE"]),
            Route(f"{name}/timeout", cloud.refresh, methods=["POST"]),
            Route(f"{name}/snapshots", cloud.snapshot, methods=["POST"]),
            Route(f"{name}/fork", cloud.fork, methods=["POST"]),
            Route("/templates/{name}", cloud.drop, methods=["DELETE"]),
            Route("/files", cloud.files, methods=["GET", "POST"]),
            Route("/health", cloud.health),
            Mount("/process.Process", process_app),
        ],
    )


@contextlib.asynccontextmanager
async def e2b_cloud() -> AsyncIterator[tuple[Cloud, dict[str, Any]]]:
    """Run the server; give it, and how the backend is configured to reach it."""
    cloud = Cloud()
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = server_without_signal_handlers(
        # No sandbox is ended because a busy machine made the tests late.
        uvicorn.Config(_app(cloud), log_level="warning", lifespan="off", ws="none", timeout_keep_alive=600)
    )
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn tells it by nothing else
            await asyncio.sleep(0.01)
        yield cloud, {"api_url": url, "sandbox_url": url, "http_version": "1.1"}
    finally:
        await cloud.close()
        server.should_exit = True
        server.force_exit = True
        await serving
