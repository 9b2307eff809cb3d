"""A training run whose weights reach the servers by a transport of another package."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.lookup_run import lines, silent, train_config
from turnwise.plugins import load_object
from turnwise.rollout.audit import audit_files
from turnwise.trainer.train import run_train

EXAMPLE = Path(__file__).parents[2] / "examples" / "extensions" / "weight_transport.py"
FolderTransport = load_object(f"{EXAMPLE}:FolderTransport", "weight transport")


class Listed(FolderTransport):  # type: ignore[misc, valid-type]
    """The folder's transport, which says when it is closed what it held."""

    def close(self) -> None:
        names = sorted(file.name for file in self.directory.iterdir()) if self.directory.exists() else []
        super().close()
        with (self.directory.parent / "held").open("a") as file:
            file.write(f"{len(names)} {self.sent_bytes}\n")


@pytest.mark.long
def test_a_run_trains_by_a_transport_of_another_package(lookup_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    transport = {"name": f"{__name__}:Listed", "config": {"directory": str(folder)}}
    config = train_config(lookup_model, tmp_path, policies={"main": {"weight_transport": transport}})
    run = run_train(config, console=silent()).directory
    steps = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert len(steps) == 2
    # Servers had the weights that the trainer had: its forward gives the log-probabilities that they reported.
    assert all(step["gap/max"] < 1e-3 for step in steps), steps[-1]
    [line] = (folder / "held").read_text().splitlines()
    versions, written = map(int, line.split())
    assert versions >= 1
    assert written > 0
    assert [file.name for file in folder.iterdir()] == ["held"]
    assert audit_files(run).sound
