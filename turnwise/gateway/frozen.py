"""Frozen policies, which sample beside the trained one: other models, the start model, or hosted endpoints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

from turnwise.errors import ConfigError, InferenceError, RenderError
from turnwise.gateway.config import FrozenConfig, base_url
from turnwise.gateway.proxy.client import HostedClient
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.proxy.session import TextRenderer
from turnwise.inference.client import HTTPClient
from turnwise.inference.config import RendererConfig
from turnwise.inference.replica_set import ReplicaSet, client_of
from turnwise.model.core import LLMClient, Renderer, ServedPolicy
from turnwise.recorder.ledger import LedgerClient, LedgerWriter


def load_renderer(name: str, config: FrozenConfig, start: Path | None, run_renderer: RendererConfig) -> Renderer:
    """Return a policy's renderer.

    Args:
        name: The policy's name, for messages.
        config: The policy.
        start: The model that the run begins with.
        run_renderer: How messages become ids for the run's own model.

    Raises:
        ConfigError: Its model is not there, tokenizer or template cannot be used, or its key is not set.
    """
    if config.hosted is not None:
        config.hosted.key()
        return TextRenderer()
    directory = config.directory(name, start)
    try:
        has_renderer = "renderer" in config.model_fields_set
        return (run_renderer if config.start and not has_renderer else config.renderer).load(directory)
    except (ConfigError, RenderError) as error:
        raise ConfigError(f"rollout.frozen.{name}: no chat format in {directory}: {error}") from error


def load_renderers(
    frozen: Mapping[str, FrozenConfig], start: Path | None, run_renderer: RendererConfig
) -> dict[str, Renderer]:
    """Return the renderer of each policy, which validates all of them before a server starts.

    Args:
        frozen: The policies.
        start: The run's start model.
        run_renderer: Renderer settings of the run's own model.

    Raises:
        ConfigError: Model, tokenizer, template or API key is missing or unusable.
    """
    return {name: load_renderer(name, config, start, run_renderer) for name, config in frozen.items()}


class FrozenPolicies:
    """The open frozen policies of a run, by name.

    Attributes:
        policies: The policies that agents sample from.
        clients: Clients of their servers, whose URLs may change.
        fleets: Servers that were started here.
    """

    def __init__(self) -> None:
        self.policies: dict[str, ServedPolicy] = {}
        self.clients: list[HTTPClient] = []
        self.fleets: dict[str, ReplicaSet] = {}

    async def recover(self, error: InferenceError) -> None:
        """Wait until all servers started here run, after a request failed. Raises InferenceError."""
        for fleet in self.fleets.values():
            await fleet.recover(error)

    def served(self, configs: Mapping[str, FrozenConfig]) -> dict[str, FrozenConfig]:
        """Return the configurations with the URLs of the servers that were started here, for other processes."""
        urls = {name: ",".join(replica.url for replica in fleet.replicas) for name, fleet in self.fleets.items()}
        return {
            name: config.model_copy(update={"url": urls[name]}) if name in urls else config
            for name, config in configs.items()
        }

    async def open(
        self,
        name: str,
        config: FrozenConfig,
        renderer: Renderer,
        start: Path | None,
        logs: Path,
        ledger: LedgerWriter | None,
    ) -> contextlib.AsyncExitStack:
        """Open one policy; return the stack that closes it. Raises InferenceError if its server fails."""
        async with contextlib.AsyncExitStack() as stack:
            client: LLMClient
            if config.hosted is not None:
                endpoint = Endpoint(base_url(config.url), config.hosted, config.hosted.key())
                client = HostedClient(endpoint, model=config.hosted.model)
            elif config.urls:
                client = client_of(config.urls, config.inference, config.directory(name, start))
            else:
                fleet = ReplicaSet(config.inference, config.directory(name, start), logs=logs / f"frozen-{name}")
                stack.push_async_callback(fleet.close)
                await fleet.launch()
                self.fleets[name] = fleet
                client = fleet.client
            if isinstance(client, HTTPClient):
                self.clients.append(client)
            logged = client if config.hosted is not None or ledger is None else LedgerClient(client, ledger)
            stack.push_async_callback(logged.close)
            try:
                info = await logged.model_info()
            except InferenceError as error:
                where = f"rollout.frozen.{name}"
                raise InferenceError(f"{where}{f'.url is {config.url}' if config.url else ''}: {error}") from error
            self.policies[name] = ServedPolicy(logged, renderer, info, config.temperature)
            return stack.pop_all()


async def open_frozen(
    frozen: Mapping[str, FrozenConfig],
    renderers: Mapping[str, Renderer],
    stack: contextlib.AsyncExitStack,
    *,
    start: Path | None,
    logs: Path,
    ledger: LedgerWriter | None,
) -> FrozenPolicies:
    """Start or connect to the servers of all policies concurrently.

    Args:
        frozen: The policies.
        renderers: Result of :func:`load_renderers`.
        stack: Closes what was started.
        start: The run's start model.
        logs: Directory of the server logs.
        ledger: Ledger of all calls.

    Raises:
        InferenceError: A server does not start or respond.
    """
    policies = FrozenPolicies()
    opening = [
        asyncio.create_task(policies.open(name, config, renderers[name], start, logs, ledger))
        for name, config in frozen.items()
    ]
    try:
        await asyncio.gather(*opening)
    finally:
        # After an error or a cancellation the remaining ones are not opened.
        for task in opening:
            task.cancel()
        for done in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(done, contextlib.AsyncExitStack):
                stack.push_async_callback(done.aclose)
    return policies
