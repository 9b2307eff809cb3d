"""LangChain's standard suites for chat models, over ChatTurnwise, in a process that has them."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITES = ROOT / ".cache" / "langchain-tests"

SKIPPED = {
    # The session has the connection: nothing is read from the environment.
    "test_init_from_env": "init_from_env_params not specified",
    # A model without its session is none, and a session is no value.
    "test_serdes": "Model is not serializable",
    # One policy: a session has no other model to switch to.
    "test_invoke_with_model_override": "Model override not supported",
    "test_ainvoke_with_model_override": "Model override not supported",
    "test_stream_with_model_override": "Model override not supported",
    "test_astream_with_model_override": "Model override not supported",
    # Chat formats take text.
    "test_pdf_inputs": "Model does not support PDF inputs",
    "test_audio_inputs": "Model does not support audio inputs",
    "test_image_inputs": "Model does not support image message",
    "test_image_tool_message": "Model does not support image tool message",
    "test_pdf_tool_message": "Model does not support PDF tool message",
    "test_anthropic_inputs": "Model does not explicitly support Anthropic inputs",
    # It times recorded HTTP, and there is none.
    "test_stream_time": "VCR not set up",
}
"""The tests of the suites that do not run, with what they say."""


@pytest.mark.real
def test_the_standard_suites_pass(tmp_path: Path) -> None:
    if not (SUITES / ".turnwise-installed").exists():
        pytest.skip("langchain-tests is not installed: make test-real installs it into .cache/langchain-tests")
    report = tmp_path / "report.xml"
    paths = [str(ROOT), str(ROOT / "tests"), str(SUITES), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/support/agents/langchain_suites.py")]
    ran = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junit-xml={report}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = {case.get("name"): case.find("skipped") for case in cases if case.find("skipped") is not None}
    assert {name: str(skip.get("message")).rstrip(".") for name, skip in skipped.items()} == SKIPPED
    names = {str(case.get("classname")).rpartition(".")[2] for case in cases}
    assert names == {"TestUnit", "TestIntegration"}
    assert len(cases) - len(skipped) >= 47
