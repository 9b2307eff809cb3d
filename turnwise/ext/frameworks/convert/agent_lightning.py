"""The options of Agent-Lightning's trainer: those of verl, and the section ``agentlightning``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from turnwise.errors import ConfigError, shown
from turnwise.ext.frameworks.convert.options import Options
from turnwise.ext.frameworks.convert.translation import Translation, is_off
from turnwise.ext.frameworks.convert.verl_running import translate_verl

_SECTION: Final = "agentlightning"
_LOSS: Final = "actor.policy_loss.loss_mode"
_EACH_ROLLOUT: Final = "per_rollout_mean"
"""The default of Agent-Lightning: a mean over the tokens of a rollout, then over rollouts."""
_HARMLESS: Final = {
    "agl_base_url": "each episode has an address of its own",
    "agl_key": "the address itself authorises",
    "trace_aggregator": "the ids of a conversation are trained as they were sampled, each once",
}
_REMEDIES: Final = {
    "hooks": "write them as hooks of the run",
    "k8s": "programs run here, or in a sandbox: rollout.agent.config.sandbox",
    "async_rollout": "set mode: separate_async",
    "max_ppo_update_times": "set algorithm.minibatches and algorithm.epochs",
    "reward_fillna_value": "a rollout without a reward is worth 0: post one in any case",
}


def translate_agent_lightning(options: Options) -> Translation:
    """Translate all options of Agent-Lightning's trainer.

    Raises:
        ConfigError: No class of an agent is named.
    """
    section = {
        name.removeprefix(f"{_SECTION}."): value for name, value in options.unread() if name.startswith(_SECTION)
    }
    for name in section:
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
    for name, value in section.items():
        _classify(translation, name, value)
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
    if (seconds := section.get("rollout_timeout_seconds")) is not None:
        program["timeout"] = float(seconds)
        translation.translated[f"{_SECTION}.rollout_timeout_seconds"] = "rollout.agent.config.timeout"
    return program


def _is_input(path: Any) -> bool:
    return isinstance(path, str) and (path == "input" or path.startswith("input."))


def _classify(translation: Translation, name: str, value: Any) -> None:
    option = f"{_SECTION}.{name}"
    if option in translation.translated:
        return
    reason = next((reason for start, reason in _HARMLESS.items() if name.startswith(start)), None)
    remedy = next((remedy for start, remedy in _REMEDIES.items() if name.startswith(start)), None)
    if reason is not None or (remedy is not None and is_off(value)):
        translation.harmless[option] = reason or f"{shown(value)} switches it off"
    else:
        translation.remedies[option] = remedy or f"no rule for it, and so {shown(value)} is not in the configuration"
