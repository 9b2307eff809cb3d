"""The process of a vLLM server: its API server on a port that is bound and reported, ended with its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import Any

from turnwise_guard import control_key


def watch_parent(descriptor: int) -> None:
    """End this process and its children when the other end of the pipe is closed."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def bind(host: str, port: int) -> socket.socket:
    """Bind a port; 0 for a free one."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


async def serve(arguments: Any, listener: socket.socket, report: int, paused: bool) -> None:
    """Start the engine, configure it, report the port and serve; ``paused`` keeps requests until ``/resume``."""
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client

    host, port = listener.getsockname()[:2]
    async with build_async_engine_client(arguments) as engine:
        await engine.collective_rpc("report_temperature_logprobs")
        if paused:
            await engine.pause_generation(mode="keep")
        # From here on the kernel queues connections until the application takes them.
        listener.listen(2048)
        os.write(report, json.dumps({"port": port, "pid": os.getpid()}).encode() + b"\n")
        os.close(report)
        shutdown = await build_and_serve(engine, f"http://{host}:{port}", listener, arguments)
    await shutdown


def main() -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline."""
    report, lifeline, paused = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "paused"
    # What vLLM starts must not hold them: a pipe ends when its last copy is closed.
    os.set_inheritable(report, False)
    os.set_inheritable(lifeline, False)
    watch_parent(lifeline)
    # Before vLLM starts processes, which need not know it.
    control_key()

    import uvloop
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[4:])
    validate_parsed_serve_args(arguments)
    uvloop.run(serve(arguments, bind(arguments.host, arguments.port), report, paused))


if __name__ == "__main__":
    main()
