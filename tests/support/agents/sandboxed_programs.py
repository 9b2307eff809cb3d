"""Environments with a sandbox for agent programs, and a sandbox backend that needs nothing installed."""

from __future__ import annotations

import socket
from typing import Any, ClassVar

from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.core import ResetResult
from turnwise.sandboxes.config import SandboxConfig
from turnwise.sandboxes.core import Sandbox, SandboxSpec
from turnwise.sandboxes.local import LocalBackend
from turnwise.tasks import Task
from turnwise.types import Message, text_of

PLAIN = SandboxConfig(name=f"{__name__}:OnLoopback", config={"isolation": "plain", "unsafe": True})
"""Holds nothing back: for what a program in any sandbox does, not for what it cannot do."""


class OnLoopback(LocalBackend):
    """Sandboxes without a network of their own: what listens inside listens on this machine's loopback."""

    def make(self, spec: SandboxSpec) -> Sandbox:
        sandbox = super().make(spec)
        sandbox.listen = _listen  # type: ignore[method-assign]
        return sandbox


async def _listen(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


class BoxedLookup(LookupEnv):
    """Has a sandbox, in which a file says how many processes of a program are left when it is scored.

    Attributes:
        specs: What was asked for, of every sandbox that any of these opened.
        answers: What programs answered, of all of these.
    """

    specs: ClassVar[list[SandboxSpec]] = []
    answers: ClassVar[list[str]] = []

    def __init__(self, second: bool = False, **config: Any) -> None:
        super().__init__(**config)
        self._second = second

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # type: ignore[override]
        observation, info = super().reset(task, seed=seed)  # type: ignore[misc]
        for _ in range(1 + self._second):
            self.specs.append((await self.open_sandbox()).spec)
        return observation, {
            **info,
            "files": {"given.txt": "from the environment"} | ({} if task is None else task.data),
        }

    async def score(self, final: Message | None) -> dict[str, float]:  # type: ignore[override]
        assert self.sandbox is not None
        self.answers.append("" if final is None else text_of(final))
        process_check = await self.sandbox.exec("grep -q '^State:.[^ZX]' /proc/$(cat left.pid)/status && echo alive")
        return {"score": super().score(final), "left": float(b"alive" in process_check.stdout)}  # type: ignore[dict-item]


def rollout(**sandbox: Any) -> dict[str, Any]:
    """Keyword arguments of ``running``: an environment with a sandbox that needs nothing installed."""
    return {"env": f"{__name__}:BoxedLookup", "sandbox": PLAIN.model_copy(update=sandbox)}
