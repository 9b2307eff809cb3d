"""One vLLM server and one checkpoint for all tests against the real thing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from support.engine.vllm_server import members, train_checkpoint, vllm_config
from support.trainer.lookup_run import MODEL, gone, shared, wait_until
from turnwise.inference.client import HTTPClient
from turnwise.inference.vllm import VLLMReplica


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker, and all that ask the one vLLM server; before xdist reads the marks."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            vllm = isinstance(item, pytest.Function) and {"vllm", "client", "checkpoint"} & set(item.fixturenames)
            item.add_marker(pytest.mark.xdist_group("vllm" if vllm else item.path.stem))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "vllm-checkpoint", train_checkpoint) / MODEL


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Any:
    """The checkpoint as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()


@pytest.fixture(scope="session")
def vllm_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "server.log"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(checkpoint: Path, vllm_log: Path) -> AsyncIterator[VLLMReplica]:
    replica = VLLMReplica(checkpoint, vllm_config(), name="lookup", weight_version=3, log_file=vllm_log)
    try:
        await replica.launch()
        running = members(replica.pid)
        yield replica
    finally:
        await replica.close()
    assert len(running) > 1
    # They were killed; the kernel takes a moment.
    wait_until(lambda: gone(running), "the end of the server's processes")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(vllm: VLLMReplica) -> AsyncIterator[HTTPClient]:
    http_client = HTTPClient([vllm.url])
    yield http_client
    await http_client.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show the end of the server's log with each failure."""
    report = (yield).get_result()
    log = item.funcargs.get("vllm_log") if isinstance(item, pytest.Function) else None
    if report.failed and log is not None and log.exists():
        report.sections.append(("the end of vLLM's log", log.read_text(errors="replace")[-4000:]))
