"""Reward models: a sequence classifier behind an HTTP server grades a conversation."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import orjson

from turnwise.config import load_config
from turnwise.envs.rewards.core import RewardFunction
from turnwise.envs.rewards.endpoint import (
    Endpoint,
    EndpointError,
    EndpointOptions,
    PerLoop,
    read_options,
    wire_messages,
)
from turnwise.errors import ConfigError, EnvError, InferenceError, shown
from turnwise.inference.builtin import RewardReplica
from turnwise.inference.config import RewardServerConfig
from turnwise.types import Message

_log = logging.getLogger(__name__)


class _Served(NamedTuple):
    """A server started by this process, with its endpoint."""

    replica: RewardReplica
    endpoint: Endpoint
    logs: tempfile.TemporaryDirectory[str]


async def _close(served: _Served) -> None:
    await served.endpoint.close()
    await served.replica.close()
    served.logs.cleanup()


class RewardModel(RewardFunction):
    """The raw output of a reward model for the conversation; the server applies its chat template.

    Connections and a started server are shared by all episodes of an event loop.
    """

    # Loading a model takes longer than a function's default time-out.
    timeout: ClassVar[float | None] = 600.0

    def __init__(
        self,
        url: str | None = None,
        *,
        model_dir: str | None = None,
        server: Mapping[str, Any] | None = None,
        model: str | None = None,
        label: int = 0,
        activation: bool = False,
        last_message_only: bool = False,
        without_answer: float = 0.0,
        **connection: Any,
    ) -> None:
        """Configure a server, or the directory of a model to serve.

        Args:
            url: Base URL of a running server.
            model_dir: Instead of ``url``: a Hugging Face sequence classifier. Its server starts with the first request,
                restarts when it dies, and ends with this process.
            server: With ``model_dir``: the settings of that server (:class:`RewardServerConfig`).
            model: ``model`` of requests, for servers of several.
            label: Index of the output that is the reward.
            activation: Whether the server applies the activation (a sigmoid of one output, a softmax of several).
            last_message_only: Whether only the answer is sent, as plain text.
            without_answer: Value of an episode without a final message (or with an empty one, if only that would be
                sent), without a request.
            **connection: The fields of :class:`~turnwise.envs.rewards.endpoint.EndpointOptions`.
        """
        if (url is None) == (model_dir is None):
            raise ConfigError("reward_model: give either url (a running server) or model_dir (a model to serve)")
        if isinstance(label, bool) or not isinstance(label, int) or label < 0:
            raise ConfigError(f"reward_model: label is {shown(label)}: it must be an integer of at least 0")
        self._connection = read_options(EndpointOptions, {"concurrency": 64, **connection}, "reward_model")
        self._endpoint = None if url is None else Endpoint(url, self._connection, what="reward_model")
        self._directory = None if model_dir is None else Path(model_dir).expanduser()
        if self._directory is not None:
            _check_classifier(self._directory)
        self._server = load_config(RewardServerConfig, defaults=server)
        self._served: PerLoop[_Served] = PerLoop(self._serve, _close)
        self._model = model
        self._label = label
        self._activation = activation
        self._last_only = last_message_only
        self._without = without_answer

    async def __call__(self, final: Message | None, text: str, messages: list[Message]) -> float:
        """Grade the conversation."""
        if final is None or (self._last_only and not text):
            return self._without
        body: dict[str, Any] = {"input": text} if self._last_only else {"messages": wire_messages(messages)}
        if self._model is not None:
            body["model"] = self._model
        answer, endpoint = await self._post({**body, "use_activation": self._activation})
        try:
            outputs = answer["data"][0]["probs"]
            return float(outputs[self._label])
        except IndexError:
            raise EnvError(f"{endpoint.name} returned {len(outputs)} outputs; label is {self._label}") from None
        except (KeyError, TypeError, ValueError) as error:
            text = endpoint.redact(shown(answer, 200))
            raise EnvError(f"{endpoint.name} returned no data[0].probs: {text}") from error

    async def close(self) -> None:
        """Close this event loop's connections and server."""
        await self._served.close()
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _post(self, body: Mapping[str, Any]) -> tuple[Any, Endpoint]:
        """Return the response and its endpoint, restarting a dead own server once."""
        if self._endpoint is not None:
            return await self._endpoint.post("/classify", body), self._endpoint
        served = await self._running()
        try:
            return await served.endpoint.post("/classify", body), served.endpoint
        except EndpointError:
            if served.replica.running:
                raise
        # Once: what kills the server again may be this very conversation.
        served = await self._running()
        return await served.endpoint.post("/classify", body), served.endpoint

    async def _running(self) -> _Served:
        served = await self._served.get()
        if not served.replica.running:
            died = await served.replica.wait_died()
            if await self._served.drop(served):
                _log.warning("%s; restarting it", died)
            served = await self._served.get()
        return served

    async def _serve(self) -> _Served:
        if self._directory is None:
            raise EnvError("reward_model: there is no model_dir to serve")
        logs = tempfile.TemporaryDirectory(prefix="turnwise-reward-")
        replica = RewardReplica(self._directory, self._server, log_file=Path(logs.name) / "server.log")
        try:
            await replica.launch()
        except InferenceError as error:
            logs.cleanup()
            raise EnvError(f"reward_model: {error}") from error
        return _Served(replica, Endpoint(replica.url, self._connection, what="reward_model"), logs)


def _check_classifier(directory: Path) -> None:
    """Check that a server could start, before episodes wait for it."""
    where = f"reward_model: model_dir is {directory}"
    try:
        config = orjson.loads((directory / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{where}, which has no config.json: give a model's directory") from error
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{where}, whose config.json cannot be read: {error}") from error
    named = config.get("architectures") if isinstance(config, dict) else None
    if not any("ForSequenceClassification" in str(architecture) for architecture in named or ()):
        raise ConfigError(f"{where}, which is not a sequence classifier (its architecture: {shown(named)})")
