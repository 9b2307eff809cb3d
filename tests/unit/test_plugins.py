"""Modules from outside are imported once, before a configuration is checked, and what is wrong with one is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from turnwise import plugins as extensions
from turnwise.cli import main
from turnwise.config import load_config
from turnwise.errors import ConfigError, RegistryError
from turnwise.plugins import CHOSEN, MODULES, load_extensions, load_object
from turnwise.trainer.algorithms.advantages import ADVANTAGES, register_advantage
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.losses import LOSSES, Loss, LossSums, find_loss, ppo_clip_loss, register_loss


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was loaded before, and what a test registers or imports is gone after it."""
    monkeypatch.setattr(extensions, "_loaded", set())
    monkeypatch.setattr(extensions, "_done", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules, losses, advantages = set(sys.modules), dict(LOSSES), dict(ADVANTAGES)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("ext_", "turnwise_file_")):
            del sys.modules[name]
    for registry, entries in ((LOSSES, losses), (ADVANTAGES, advantages)):
        registry.clear()
        registry.update(entries)


def package(folder: Path, name: str, code: str, *, entry: str | None = None) -> None:
    """A module, and what pip leaves beside it where it is a package with an entry point."""
    (folder / f"{name}.py").write_text(code)
    if entry is not None:
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[turnwise.extensions]\n{name} = {entry}\n")
    sys.path.insert(0, str(folder))


LOSS = """
from turnwise.trainer.algorithms.losses import register_loss, LossSums

@register_loss({name!r})
def negative(logprobs, old_logprobs, advantages, weights, *, scale: float = 1.0):
    return LossSums(-(scale * weights * advantages * logprobs).sum())
"""


def test_modules_and_files_of_the_variable_are_imported_once(tmp_path, monkeypatch):
    package(tmp_path, "ext_a", LOSS.format(name="ext_a_loss") + "print('imported')\n")
    (tmp_path / "b.py").write_text(LOSS.format(name="ext_b_loss"))
    monkeypatch.setenv(MODULES, f"ext_a, {tmp_path / 'b.py'},")
    # The name is in a registry when the configuration that says it is checked.
    config = load_config(AlgorithmConfig, None, ["loss=ext_a_loss", "loss_options.scale=2.0"])
    assert config.loss == "ext_a_loss"
    assert load_config(AlgorithmConfig, None, ["loss=ext_b_loss"]).loss == "ext_b_loss"
    assert load_extensions() == []
    # Of a name that is added later only the module of that name is imported.
    package(tmp_path, "ext_c", "")
    monkeypatch.setenv(MODULES, "ext_a,ext_c")
    assert load_extensions() == ["ext_c"]


def test_entry_points_are_loaded_chosen_or_left_out(tmp_path, monkeypatch):
    package(tmp_path, "ext_d", "called = []\ndef start(): called.append(1)\n", entry="ext_d:start")
    package(tmp_path, "ext_e", "", entry="ext_e")
    monkeypatch.setenv(CHOSEN, "none")
    assert load_extensions() == []
    monkeypatch.setenv(CHOSEN, "ext_e")
    assert load_extensions() == ["ext_e"]
    assert "ext_d" not in sys.modules
    monkeypatch.setenv(CHOSEN, "all")
    assert "ext_d" in load_extensions()
    assert sys.modules["ext_d"].called == [1]
    monkeypatch.setenv(CHOSEN, "ext_d,ext_z")
    with pytest.raises(ConfigError, match=r"names 'ext_z', but no installed package .*there are: .*ext_d, ext_e"):
        load_extensions()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", r"TURNWISE_EXTERNAL_MODULES names 'ext_f': importing it failed: ZeroDivisionError: .*; fix it, or"),
        ("import ext_f_needs", r"names 'ext_f': No module named 'ext_f_needs'; fix it, or remove it from TURNWISE"),
        (LOSS.format(name="ppo_clip"), r"RegistryError: the loss name 'ppo_clip' is taken by .*ppo_clip_loss; ext_f:"),
    ],
)
def test_a_broken_module_is_named_with_cause_and_remedy(tmp_path, monkeypatch, code, message):
    package(tmp_path, "ext_f", code)
    monkeypatch.setenv(MODULES, "ext_f")
    for _ in range(2):  # not only the first time
        with pytest.raises(ConfigError, match=message):
            load_config(AlgorithmConfig)


def test_missing_extensions_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(MODULES, "ext_nowhere.at_all")
    with pytest.raises(ConfigError, match=r"No module named 'ext_nowhere'; install its package, put its folder on"):
        load_extensions()
    monkeypatch.setenv(MODULES, str(tmp_path / "none.py"))
    with pytest.raises(ConfigError, match=r"no such file: .*none\.py; fix it"):
        load_extensions()
    # To a person at the command line it is one sentence; the version is told all the same.
    with pytest.raises(SystemExit) as exited:
        main(["view", str(tmp_path)])
    assert exited.value.code == 1
    assert "none.py" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exited:
        main(["version"])
    assert exited.value.code == 0


@pytest.mark.parametrize(("code", "message"), [("raise OSError('disk')", "OSError: disk"), ("start = 3", "is a int")])
def test_a_broken_entry_point_names_its_package(tmp_path, monkeypatch, code, message):
    package(tmp_path, "ext_g", code, entry="ext_g:start")
    monkeypatch.setenv(CHOSEN, "ext_g")
    with pytest.raises(ConfigError, match=rf"the extension 'ext_g' \(ext_g:start, of the package ext_g\) .*{message}"):
        load_extensions()


def test_modules_beside_a_file_are_imported_and_never_those_of_another_file(tmp_path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ext_helper.py").write_text(f"def owner():\n    return {name!r}\n")
        (tmp_path / name / "ext_env.py").write_text("from ext_helper import owner\n")
    assert load_object(f"{tmp_path}/one/ext_env.py:owner", "function")() == "one"
    with pytest.raises(
        ConfigError, match=r"two/ext_env\.py failed: .*two/ext_helper\.py, but .*one/ext_helper\.py was"
    ):
        load_object(f"{tmp_path}/two/ext_env.py:owner", "function")


def test_registering_a_name() -> None:
    def mine(logprobs, old_logprobs, advantages, weights):
        return LossSums(-(weights * advantages * logprobs).sum())

    assert register_loss("ext_mine", aggregation="seq_mean_token_mean")(mine) is mine
    assert find_loss("ext_mine") == Loss(mine, "seq_mean_token_mean", idle_at_zero=False)
    register_loss("ext_mine")(mine)
    with pytest.raises(RegistryError, match=r"the loss name 'ext_mine' is taken by .*mine.*; .*ppo_clip_loss needs"):
        register_loss("ext_mine")(ppo_clip_loss)
    with pytest.raises(RegistryError, match=r"taken by"):
        register_loss("ext_mine")(lambda *arguments: mine(*arguments, 1))
    with pytest.raises(RegistryError, match=r"'a\.b' cannot be the name of the loss"):
        register_loss("a.b")(mine)

    @register_advantage("ext_centred")
    def centred(rewards: torch.Tensor, groups: torch.Tensor) -> object:
        raise NotImplementedError

    assert ADVANTAGES["ext_centred"] is centred
    with pytest.raises(RegistryError, match="the estimator name 'grpo' is taken by"):
        register_advantage("grpo")(centred)
