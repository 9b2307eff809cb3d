"""The command ``turnwise tinker``: Tinker's API on this machine, until it is interrupted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.options import Overrides

if TYPE_CHECKING:
    from turnwise.inference.config import InferenceConfig


def tinker(
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Directory of a Hugging Face model.", show_default=False)
    ],
    overrides: Overrides = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Clients' name for it; repeatable. Default: the directory's.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to bind; 0 takes a free one.")] = 8000,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="New folder for what is recorded.")] = None,
) -> None:
    """Serve Tinker's API: LoRA models over one base, trained and sampled from, every call recorded for an audit.

    Overrides are those of the inference server, such as max_context=4096; device is the learner's, too.
    """
    import asyncio
    import signal
    from datetime import datetime

    from turnwise.config import load_config
    from turnwise.inference.config import InferenceConfig

    config = load_config(InferenceConfig, overrides=overrides or ())
    folder = out or Path("runs") / f"tinker-{datetime.now():%Y%m%d-%H%M%S}"

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        names = tuple(name or [model.absolute().name])
        async with serving(model, names, folder, config, host=host, port=port) as url:
            typer.echo(f"serving Tinker's API: export TINKER_BASE_URL={url} TINKER_API_KEY=tml-local")
            typer.echo(f"recording in {folder}: turnwise audit {folder}")
            await stop.wait()

    asyncio.run(serve())


@asynccontextmanager
async def serving(
    model: Path, names: tuple[str, ...], out: Path, config: InferenceConfig, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:  # fmt: skip
    """Serve a model in the context, and yield the URL; ``config.device`` is the learner's, too.

    Raises:
        ConfigError: The folder is not empty, or the inference server cannot be configured so.
        InferenceError: The inference server does not start, or the port cannot be bound.
    """
    from turnwise.ext.tinker.models import Models
    from turnwise.ext.tinker.sampling import Sampler
    from turnwise.ext.tinker.service import Service
    from turnwise.ext.tinker.store import BASE, Store
    from turnwise.trainer.config.policy import ModelConfig

    async with AsyncExitStack() as stack:
        store = Store(out, {"inference": config.model_dump(mode="json")})
        stack.callback(store.close)
        store.add_policy(BASE, {"path": str(model.absolute())})
        sampler = Sampler(model.absolute(), config, store)
        stack.push_async_callback(sampler.close)
        await sampler.launch()
        models = Models(ModelConfig(path=model.absolute(), device=config.device), sampler.context, store)
        yield await stack.enter_async_context(Service(names, models, sampler, store).listening(host, port))
