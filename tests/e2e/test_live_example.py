"""The example of a policy that its users train: they call ever fewer answers wrong, and weights are promoted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command
from support.trainer.lookup_run import Turnwise, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "live"


@pytest.mark.long
def test_users_correct_ever_less_and_the_canary_is_promoted(tmp_path: Path) -> None:
    make = [sys.executable, str(EXAMPLE / "make_model.py"), "--directory", str(tmp_path / "model")]
    assert run_command(make, capture_output=True, check=False).returncode == 0
    changes = [f"policies.main.model.path={tmp_path / 'model' / 'model'}", f"runs={tmp_path}", "custom.live.port=0"]
    service = Turnwise(tmp_path / "live.log", "live", EXAMPLE / "live.yaml", *changes)
    with service:
        wait_until(lambda: "serving users at" in service.output(), "the service", service)
        address = re.search(r"serving users at (http://[\w.:]+)", service.output())
        assert address is not None
        picture = tmp_path / "curve.svg"
        play = [sys.executable, str(EXAMPLE / "users.py"), "--url", address[1], "--picture", str(picture)]
        users = subprocess.run([*play, "--scripted", "300"], capture_output=True, text=True, check=True)
    report = json.loads(users.stdout.splitlines()[-1])
    assert sum(report["wrong"][-3:]) < sum(report["wrong"][:3]) / 2
    assert report["promoted_after"]
    assert picture.read_text().count("promoted") == len(report["promoted_after"])
