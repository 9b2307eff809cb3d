"""Frozen matrices in four bits, in a process that has torchao: where it is installed every process would import it."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / ".cache" / "torchao"
TESTS = ("tests/unit/trainer/test_trainer_nf4.py", "tests/e2e/test_e2e_lora.py")


@pytest.mark.real
def test_matrices_of_four_bits_by_torchao_itself(tmp_path: Path) -> None:
    if not (PACKAGE / ".turnwise-installed").exists():
        pytest.skip("torchao is not installed: make test-real installs it into .cache/torchao")
    report = tmp_path / "report.xml"
    paths = [str(ROOT), str(ROOT / "tests"), str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", *(str(ROOT / file) for file in TESTS), "-k", "nf4 or quantized"]
    ran = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "-n", "0", f"--junit-xml={report}", "--timeout", "900"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TURNWISE_TESTS_PART": ""},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert [case.get("name") for case in cases if case.find("skipped") is not None] == []
    assert len(cases) >= 10
