"""The options of Agent-Lightning's trainer: those of verl, and the section ``agentlightning``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from turnwise.errors import ConfigError, shown
from turnwise.ext.frameworks.convert.options import Options
from turnwise.ext.frameworks.convert.translation import Translation
from turnwise.ext.frameworks.convert.verl_running import translate_verl

_SECTION: Final = "agentlightning"
_TIMEOUT: Final = "rollout_timeout_seconds"
_LOSS: Final = "actor.policy_loss.loss_mode"
_EACH_ROLLOUT: Final = "per_rollout_mean"
"""The default of Agent-Lightning: a mean over the tokens of a rollout, then over rollouts."""


def translate_agent_lightning(options: Options) -> Translation:
    """Translate all options of Agent-Lightning's trainer.

    Raises:
        ConfigError: No class of an agent is named.
    """
    section = {
        name.removeprefix(f"{_SECTION}."): value for name, value in options.unread() if name.startswith(_SECTION)
    }
    for name in section:
        if name.startswith(("local.", _TIMEOUT)):
            options.read(f"{_SECTION}.{name}")
    mode = options.read(_LOSS, _EACH_ROLLOUT)
    if mode == _EACH_ROLLOUT:
        options.replace(_LOSS, "vanilla")
    translation = translate_verl(options)
    if mode == _EACH_ROLLOUT:
        translation.set("algorithm.loss_aggregation", "trajectory_mean", _LOSS)
    translation.config["rollout"]["env"] = {"name": "task"}
    translation.remedies.pop("reward.custom_reward_function.path", None)
    translation.set("rollout.agent", {"name": "blackbox", "config": _program(translation, section)})
    return translation


def _program(translation: Translation, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the program that runs the agent's class, with the variables of ``env_map``."""
    agent_class = section.get("local.agent_class")
    if not isinstance(agent_class, str):
        raise ConfigError(
            f"{_SECTION}.local.agent_class is {shown(agent_class)}: name the class of the agent, as pkg.module.Class"
        )
    prefix = "local.env_map."
    paths = {name.removeprefix(prefix): value for name, value in section.items() if name.startswith(prefix)}
    variables = {name: f"{{{path}}}" if _is_input(path) else str(path) for name, path in paths.items()}
    options = [f"{_SECTION}.{name}" for name in section if name.startswith("local.")]
    translation.translated |= dict.fromkeys(options, "rollout.agent.config")
    program: dict[str, Any] = {
        "recipe": "agent_lightning",
        "arguments": [agent_class],
        # Its class is imported from where the run starts.
        "env": {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])), **variables},
        "nonzero_exit": "error",
    }
    if (seconds := section.get(_TIMEOUT)) is not None:
        program["timeout"] = float(seconds)
        translation.translated[f"{_SECTION}.{_TIMEOUT}"] = "rollout.agent.config.timeout"
    return program


def _is_input(path: Any) -> bool:
    return isinstance(path, str) and (path == "input" or path.startswith("input."))
