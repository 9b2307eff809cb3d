"""``turnwise export``: which model, and that transformers and peft load what was written."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from support.engine.tiny_lm import make_model, save_model
from support.processes.warm import run_command
from support.trainer.lookup_run import environment
from turnwise.cli.app import app
from turnwise.errors import CheckpointError, ConfigError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.config.train import BestConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.learner import open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState
from turnwise.trainer.run.export import export_model

COMPANIONS = {
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "generation_config.json": '{"top_k": 7}',
}
IDS = torch.tensor([[1, 5, 9, 2, 7, 30]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(make_model("qwen3", initializer_range=0.1), tmp_path_factory.mktemp("base"))
    for name, text in COMPANIONS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def a_run(home: Path, base: Path, row: Callable[..., TrainRow], lora: dict[str, Any] | None) -> list[torch.Tensor]:
    """Train two steps with a checkpoint after each, the first rated as the better one; return the logits of both."""
    config = PolicyConfig.model_validate(
        {"model": {"path": base, "device": "cpu", "lora": lora}, "optim": {"lr": 2e-2}}
    )
    learner: Any = open_learner(config, 10)
    store = CheckpointStore(home / "checkpoints", best=BestConfig())
    logits = []
    for step in (1, 2):
        learner.forward_backward(pack([row(12, 8, seed=step, name="t")], 40), CrossEntropyObjective(), 8.0)
        learner.optim_step()
        store.save(TrainerState(step), learner.save, {"eval/sampled": 1 / step})
        learner.save_model(home / f"plain-{step}")
        logits.append(logits_of(home / f"plain-{step}"))
    assert not torch.allclose(*logits)
    return logits


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
def test_transformers_loads_the_exported_model(tmp_path: Path, base: Path, row: Any, lora: Any) -> None:
    if lora is not None:
        pytest.importorskip("peft", reason="needs turnwise-rl[lora]")
    first, second = a_run(tmp_path / "run", base, row, lora)
    command = ["export", str(tmp_path / "run"), str(tmp_path / "newest")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "run" / "checkpoints" / "step_000002") in done.output.replace("\n", "")
    assert torch.equal(logits_of(tmp_path / "newest"), second)
    for name, text in COMPANIONS.items():
        written = (tmp_path / "newest" / name).read_text()
        assert written == text or '"top_k": 7' in written
    assert not list((tmp_path / "newest").glob("optim*")) + list((tmp_path / "newest").glob("adapter*"))
    for which in ({"best": True}, {"step": 1}):
        folder = export_model(tmp_path / "run", tmp_path / f"first-{len(which)}-{next(iter(which))}", **which)
        assert folder.name == "step_000001"
        assert torch.equal(logits_of(tmp_path / f"first-1-{next(iter(which))}"), first)
    assert not list(tmp_path.glob(".draft-*"))
    if lora is None:
        with pytest.raises(ConfigError, match=r"holds no adapter .*: export it without --adapter"):
            export_model(tmp_path / "run", tmp_path / "adapter", adapter=True)
        return
    from peft import PeftModel

    export_model(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        with_adapter = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))(IDS).logits
    assert torch.allclose(with_adapter, second, atol=1e-5)


def test_invalid_export_raises_config_error(tmp_path: Path, base: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    occupied = tmp_path / "taken"
    occupied.mkdir()
    (occupied / "x").touch()
    with pytest.raises(ConfigError, match="taken already exists: name another folder, or remove it"):
        export_model(base, occupied)
    with pytest.raises(CheckpointError, match="has no checkpoint: nothing to export"):
        export_model(run, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--step is 3, but .* has the checkpoints \(none\)"):
        export_model(run, tmp_path / "out", step=3)
    with pytest.raises(ConfigError, match=r"has no best checkpoint: the run was trained without checkpoint\.best"):
        export_model(run, tmp_path / "out", best=True)
    with pytest.raises(ConfigError, match="two checkpoints"):
        export_model(run, tmp_path / "out", best=True, step=1)
    with pytest.raises(ConfigError, match="is not a run"):
        export_model(base, tmp_path / "out", best=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "taken"]


_FULL_DISK = """
    import resource, sys
    from pathlib import Path
    from turnwise.errors import CheckpointError
    from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState, load_state
    from turnwise.trainer.config.train import PolicyConfig
    from turnwise.trainer.learn.learner import open_learner

    home = Path(sys.argv[2])
    learner = open_learner(PolicyConfig.model_validate({"model": {"path": sys.argv[1], "device": "cpu"}}), 10)
    store = CheckpointStore(home, keep=1)
    store.save(TrainerState(1), learner.save)
    for parameter in learner.policy.model.parameters():
        parameter.grad = parameter.detach().clone()
    learner.optim_step()
    largest = (home / "step_000001" / "model.safetensors").stat().st_size
    # No file of this process may grow beyond what the weights need, or beyond what the optimizer's state does.
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (largest // 2, largest + 4096):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            store.save(TrainerState(2), learner.save)
        except CheckpointError as error:
            print(error)
        assert [each.name for each in home.iterdir()] == ["step_000001"], list(home.iterdir())
        load_state(home / "step_000001")
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    learner.load(store.save(TrainerState(2), learner.save))
    assert [each.name for each in home.iterdir()] == ["step_000002"], list(home.iterdir())
"""


def test_a_full_disk_is_one_error_and_leaves_the_checkpoint_before(tmp_path: Path, base: Path) -> None:
    """The process really cannot write further; each library that writes has another error for it."""
    program = [sys.executable, "-c", textwrap.dedent(_FULL_DISK), str(base), str(tmp_path / "checkpoints")]
    done = run_command(program, capture_output=True, text=True, env={**os.environ, **environment()}, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step_000002 cannot be written: ") == 2
    assert done.stdout.count("earlier ones are intact: make room on its file system") == 2
