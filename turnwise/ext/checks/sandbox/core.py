"""The sandbox checker: runs the checks of the contract and the attacks, and reports their outcomes."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
import tomllib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

from turnwise.errors import ConfigError, SandboxUnavailable
from turnwise.ext.checks.sandbox import attacks, commands, files, lifecycle, link_attacks, processes
from turnwise.ext.checks.sandbox.context import CheckContext
from turnwise.ext.checks.sandbox.fixtures import SECRET, host_fixtures
from turnwise.ext.checks.sandbox.report import CheckFailed, CheckSkipped, Outcome, SandboxReport, Status
from turnwise.sandboxes.config import SandboxConfig, open_backend
from turnwise.sandboxes.core import Sandbox, SandboxBackend, SandboxSpec


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the contract, or one attack on what the capabilities claim to contain.

    Attributes:
        name: ``group: what``; attacks begin with ``attack``.
        run: What it does; it raises CheckFailed for a violation. An attack returns its findings, none if contained.
        containment: Of an attack, the capability that claims to contain it, or ``always``; empty for a check.
        needs: The capability without which it is skipped.
        refused: A call that a backend without that capability must refuse.
    """

    name: str
    run: Callable[[CheckContext], Awaitable[list[str] | None]]
    containment: str = ""
    needs: str = ""
    refused: Callable[[Sandbox], Awaitable[object]] | None = None


_MODULES: Final = {
    module.__name__.rpartition(".")[2]: module
    for module in (attacks, commands, files, lifecycle, link_attacks, processes)
}


def _read_check(row: Mapping[str, Any]) -> Check:
    """Return the check of a row of ``table.toml``."""
    columns = dict(row)
    module, _, function = columns.pop("run").partition(".")
    run = getattr(_MODULES[module], function)
    if arguments := columns.pop("arguments", {}):
        run = run(**arguments)
    refused = columns.pop("refused", None)
    return Check(run=run, refused=None if refused is None else methodcaller(*refused), **columns)


_ROWS: Final = tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))["checks"]
CHECKS: Final[dict[str, Check]] = {row["name"]: _read_check(row) for row in _ROWS}
"""All checks and attacks by name, in the order in which they run; ``check-sandbox --only`` selects by prefix."""


async def check_sandbox(
    backend: SandboxBackend | SandboxConfig | str,
    *,
    spec: SandboxSpec | None = None,
    only: Sequence[str] = (),
    attacks: bool = True,
    timeout: float = 120.0,
    watch: Callable[[Outcome], None] | None = None,
) -> SandboxReport:
    """Check a backend against the contract, and attack the isolation that its capabilities claim.

    The attacks are bounded and harmless, and need a ``python3`` inside. A successful one is a failure if the
    capabilities claim containment, else ``open``.

    Args:
        backend: A backend, its name or its configuration; one that is created here is closed at the end.
        spec: Base spec of the sandboxes; for ``docker`` with the image.
        only: Run only the checks and attacks whose names begin with one of these.
        attacks: Whether to attack.
        timeout: Seconds per check, after which it fails.
        watch: Called with each outcome.

    Raises:
        ConfigError: The backend is unknown or misconfigured, or ``only`` matches no check.
        SandboxUnavailable: The backend is unusable on this machine; the message names the remedy.
    """
    checks = _select(only, attacks)
    source = SandboxConfig(name=backend) if isinstance(backend, str) else backend
    opened = source if isinstance(source, SandboxBackend) else open_backend(source)
    config = None if isinstance(source, SandboxBackend) else source
    spec = spec or SandboxSpec()
    if config is not None:
        spec = config.apply(spec)
    previous = os.environ.get(SECRET)
    os.environ[SECRET] = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="turnwise-check-"))
    try:
        capabilities = await opened.probe()
        report = SandboxReport(opened.name, capabilities)
        context = CheckContext(opened, config, spec, capabilities, folder)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(context.close)
            for check in checks:
                if check.containment and context.fixtures is None:
                    context.fixtures = await stack.enter_async_context(host_fixtures(context.token))
                outcome = await _outcome(check, context, timeout)
                report.outcomes.append(outcome)
                if watch is not None:
                    watch(outcome)
        return report
    finally:
        if previous is None:
            del os.environ[SECRET]
        else:
            os.environ[SECRET] = previous
        shutil.rmtree(folder, ignore_errors=True)
        if opened is not backend:
            await opened.close()


def _select(only: Sequence[str], attacks: bool) -> list[Check]:
    checks = [check for check in CHECKS.values() if attacks or not check.containment]
    for prefix in only:
        if not any(check.name.startswith(prefix) for check in checks):
            groups = ", ".join(sorted({check.name.partition(":")[0] for check in checks}))
            raise ConfigError(f"check_sandbox: only={prefix!r} is not the prefix of a check's name; known: {groups}")
    return [check for check in checks if not only or check.name.startswith(tuple(only))]


async def _outcome(check: Check, context: CheckContext, timeout: float) -> Outcome:
    began = time.monotonic()
    status: Status = "passed"
    message, findings = "", None
    try:
        findings = await asyncio.wait_for(_run(check, context), timeout)
    except CheckSkipped as error:
        status, message = "skipped", str(error)
    except CheckFailed as error:
        status, message = "failed", str(error)
    except TimeoutError:
        status, message = "failed", f"did not finish within {timeout:g} s"
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is a finding about it
        status, message = "failed", f"{type(error).__name__}: {error}"
    if check.containment:
        if status == "passed":
            claimed = context.claims[check.containment]
            status = "held" if not findings else "escaped" if claimed else "open"
            message = "; ".join(findings or []) or context.host.note
        context.host.note = ""
    return Outcome(check.name, status, message, check.containment, time.monotonic() - began)


async def _run(check: Check, context: CheckContext) -> list[str] | None:
    """Run a check, if the backend has the capability that it needs; without it the backend must refuse the call."""
    if not check.needs or context.claims[check.needs]:
        return await check.run(context)
    if check.refused is not None:
        try:
            await check.refused(await context.sandbox())
        except SandboxUnavailable:
            raise CheckSkipped(f"the backend has no {check.needs}, and refuses the call") from None
        raise CheckFailed(f"the capabilities deny {check.needs}, and the call works")
    raise CheckSkipped(f"the backend has no {check.needs}")
