"""Agent-Lightning 1.0: its training entry point, for agents that are classes with ``run()``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError
from turnwise.ext.frameworks.convert.agent_lightning import translate_agent_lightning
from turnwise.ext.frameworks.convert.options import options_of
from turnwise.plugins import load_object

if TYPE_CHECKING:
    from turnwise.trainer.train import TrainSummary

__all__ = ["run_ppo"]

_log = logging.getLogger(__name__)


def run_ppo(
    config: Mapping[str, Any], train_dataset: Sequence[Mapping[str, Any]], val_dataset: Sequence[Mapping[str, Any]]
) -> TrainSummary:
    """Train as ``agentlightning.verl.entrypoint.run_ppo`` does, without a server or a controller beside it.

    Options without a counterpart that matter are logged as warnings, with what to do.

    Args:
        config: Options of verl and the section ``agentlightning``, as nested mappings or of OmegaConf.
        train_dataset: Rows; ``env_map`` names what the agent reads of them.
        val_dataset: Held-out rows.

    Raises:
        ConfigError: A dataset is empty, the agent's class is not named, or an option has a value that is invalid here.
    """
    from turnwise import Trainer

    for name, rows in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
        if not len(rows):
            raise ConfigError(f"{name} holds no row: give at least one")
    if type(config).__module__.startswith("omegaconf"):
        # Of OmegaConf, which raises where an option that a configuration only declares is read.
        config = load_object("omegaconf:OmegaConf", "class").to_container(config, resolve=True)
    options = options_of(config)
    translation = translate_agent_lightning(options)
    translation.remedies.pop("trainer.total_epochs", None)
    if "steps" not in translation.config:
        batches = len(train_dataset) // translation.config["batch"]["groups"]
        if not batches:
            raise ConfigError(
                f"data.train_batch_size is {translation.config['batch']['groups']}, and train_dataset has "
                f"{len(train_dataset)} rows: give more rows, or a smaller batch"
            )
        translation.set("steps", batches * options.read("trainer.total_epochs", 30), "trainer.total_epochs")
    every = options.read("trainer.test_freq", -1)
    translation.config.setdefault("eval", {"every": every if every > 0 else None})
    for option, remedy in translation.remedies.items():
        _log.warning("%s: %s", translation.options.spelling(option), remedy)
    return Trainer(translation.config).fit(
        None, [dict(row) for row in train_dataset], [dict(row) for row in val_dataset]
    )
