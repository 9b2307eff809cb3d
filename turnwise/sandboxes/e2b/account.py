"""The account that sandboxes in E2B's cloud belong to: its options, its key, and what it creates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import e2b
from pydantic import BaseModel, ConfigDict, Field

from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.core import Capabilities


class E2BOptions(BaseModel):
    """The keys of ``sandbox.config`` of the E2B backend.

    Attributes:
        template: Default template; None: E2B's.
        api_key_env: The environment variable that holds the API key.
        user: Default user of commands, existing in the template.
        lifetime: Seconds until E2B kills a sandbox that its host stopped refreshing.
        api_url: URL of the API, instead of E2B's.
        sandbox_url: URL of sandboxes, instead of E2B's.
        http_version: ``1.1`` or ``2``; None: the SDK's choice.
        request_timeout: Seconds per request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    template: str | None = None
    api_key_env: str = "E2B_API_KEY"
    user: str = "user"
    lifetime: Annotated[int, Field(ge=15)] = 300
    api_url: str | None = None
    sandbox_url: str | None = None
    http_version: Literal["1.1", "2"] | None = None
    request_timeout: Annotated[float, Field(gt=0)] = 60.0


class E2BAccount:
    """An account of E2B with the options of one backend, the metadata of what it creates, and its snapshots."""

    def __init__(self, options: E2BOptions, capabilities: Capabilities, metadata: Mapping[str, str]) -> None:
        self.options = options
        self.capabilities = capabilities
        self.metadata = metadata
        self.snapshots: set[str] = set()

    @property
    def access(self) -> dict[str, Any]:
        """Common arguments of the SDK's calls; SandboxUnavailable without an API key."""
        options = self.options
        key = os.environ.get(options.api_key_env)
        if not key:
            raise SandboxUnavailable(
                f"the environment variable {options.api_key_env} holds no E2B API key: set it, or name another "
                "variable in sandbox.config.api_key_env"
            )
        common = {"api_key": key, "request_timeout": options.request_timeout, "http_version": options.http_version}
        urls = {"api_url": options.api_url, "sandbox_url": options.sandbox_url}
        return {name: value for name, value in (common | urls).items() if value is not None}

    async def create(self, template: str | None, *, labels: Mapping[str, str], network: bool) -> e2b.AsyncSandbox:
        """Create a sandbox of a template or a snapshot; None is E2B's default."""
        return await e2b.AsyncSandbox.create(
            template=template,
            timeout=self.options.lifetime,
            metadata={**labels, **self.metadata},
            allow_internet_access=network,
            **self.access,
        )
