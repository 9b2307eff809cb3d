"""Turnwise: Gym-style environments and agents, recorded token by token, trained with PPO/GRPO."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.agents import Agent, Episode, ReActAgent, SingleTurnAgent, TurnsAgent, make_agent, register_agent
    from turnwise.agents.langgraph import ChatTurnwise, LangGraphAgent
    from turnwise.cli.env_file import main
    from turnwise.config import dump_config, load_config
    from turnwise.envs import Env, EnvSpec, MultiAgentEnv, SingleTurnEnv, StepResult, ToolEnv, make, register, tool_call
    from turnwise.envs.gym.to_gymnasium import from_gymnasium, to_gymnasium
    from turnwise.envs.rewards import Rubric
    from turnwise.errors import (
        AgentError,
        BudgetExceeded,
        ConfigError,
        EnvError,
        InferenceError,
        RenderError,
        ToolError,
        TurnwiseError,
    )
    from turnwise.evaluation import EvalConfig, EvalResult, evaluate
    from turnwise.evaluation.runner import run_eval
    from turnwise.evaluation.tables import RunTables, read_run
    from turnwise.ext.checks.environment import check_env
    from turnwise.ext.programs import BlackBoxAgent
    from turnwise.images import image_part
    from turnwise.inference.scripted import ScriptedClient
    from turnwise.model.core import LLMClient, Renderer
    from turnwise.plugins import load_extensions
    from turnwise.recorder.session import Session
    from turnwise.rollout import (
        LocalReplayBuffer,
        ReplayBuffer,
        RolloutConfig,
        RolloutManager,
        RolloutProducer,
        RolloutRequest,
    )
    from turnwise.tasks import SourceConfig, Task, iter_tasks, load_tasks
    from turnwise.tools import BaseTool, OutputLimit, ToolResponse, function_tool
    from turnwise.trainer.algorithms.advantages import register_advantage
    from turnwise.trainer.algorithms.config import AlgorithmConfig
    from turnwise.trainer.algorithms.losses import register_loss
    from turnwise.trainer.api import Trainer
    from turnwise.trainer.batch.collate import collate_padded
    from turnwise.trainer.config.offline import DPOConfig, RewardModelConfig, SFTConfig
    from turnwise.trainer.config.train import TrainConfig
    from turnwise.trainer.learn.learner import register_engine
    from turnwise.trainer.offline.dpo import run_dpo
    from turnwise.trainer.offline.reward_model import run_reward_model
    from turnwise.trainer.offline.sft import run_sft
    from turnwise.trainer.run.hooks import Hooks
    from turnwise.trainer.train import run_train
    from turnwise.trajectory import Segment, TrainSample, Trajectory, TrajectoryGroup, to_samples
    from turnwise.types import Completion, Message, SamplingParams, StopReason, TokenPrompt, ToolCall, ToolSchema

from turnwise.version import __version__ as __version__

_HOMES = {
    "agents": ("Agent", "Episode", "ReActAgent", "SingleTurnAgent", "TurnsAgent", "make_agent", "register_agent"),
    "agents.langgraph": ("ChatTurnwise", "LangGraphAgent"),
    "cli.env_file": ("main",),
    "config": ("dump_config", "load_config"),
    "envs": (
        "Env", "EnvSpec", "MultiAgentEnv", "SingleTurnEnv", "StepResult", "ToolEnv", "make", "register", "tool_call",
    ),
    "envs.gym.to_gymnasium": ("from_gymnasium", "to_gymnasium"),
    "envs.rewards": ("Rubric",),
    "errors": (
        "AgentError", "BudgetExceeded", "ConfigError", "EnvError", "InferenceError", "RenderError",
        "ToolError", "TurnwiseError",
    ),
    "evaluation": ("EvalConfig", "EvalResult", "evaluate"),
    "evaluation.runner": ("run_eval",),
    "evaluation.tables": ("RunTables", "read_run"),
    "ext.checks.environment": ("check_env",),
    "ext.programs": ("BlackBoxAgent",),
    "images": ("image_part",),
    "inference.scripted": ("ScriptedClient",),
    "model.core": ("LLMClient", "Renderer"),
    "plugins": ("load_extensions",),
    "recorder.session": ("Session",),
    "rollout": (
        "LocalReplayBuffer", "ReplayBuffer", "RolloutConfig", "RolloutManager", "RolloutProducer",
        "RolloutRequest",
    ),
    "tasks": ("SourceConfig", "Task", "iter_tasks", "load_tasks"),
    "tools": ("BaseTool", "OutputLimit", "ToolResponse", "function_tool"),
    "trainer.algorithms.advantages": ("register_advantage",),
    "trainer.algorithms.config": ("AlgorithmConfig",),
    "trainer.algorithms.losses": ("register_loss",),
    "trainer.api": ("Trainer",),
    "trainer.batch.collate": ("collate_padded",),
    "trainer.config.offline": ("DPOConfig", "RewardModelConfig", "SFTConfig"),
    "trainer.config.train": ("TrainConfig",),
    "trainer.learn.learner": ("register_engine",),
    "trainer.offline.dpo": ("run_dpo",),
    "trainer.offline.reward_model": ("run_reward_model",),
    "trainer.offline.sft": ("run_sft",),
    "trainer.run.hooks": ("Hooks",),
    "trainer.train": ("run_train",),
    "trajectory": ("Segment", "TrainSample", "Trajectory", "TrajectoryGroup", "to_samples"),
    "types": ("Completion", "Message", "SamplingParams", "StopReason", "TokenPrompt", "ToolCall", "ToolSchema"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Agent",
    "AgentError",
    "AlgorithmConfig",
    "BaseTool",
    "BlackBoxAgent",
    "BudgetExceeded",
    "ChatTurnwise",
    "Completion",
    "ConfigError",
    "DPOConfig",
    "Env",
    "EnvError",
    "EnvSpec",
    "Episode",
    "EvalConfig",
    "EvalResult",
    "Hooks",
    "InferenceError",
    "LLMClient",
    "LangGraphAgent",
    "LocalReplayBuffer",
    "Message",
    "MultiAgentEnv",
    "OutputLimit",
    "ReActAgent",
    "RenderError",
    "Renderer",
    "ReplayBuffer",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutManager",
    "RolloutProducer",
    "RolloutRequest",
    "Rubric",
    "RunTables",
    "SFTConfig",
    "SamplingParams",
    "ScriptedClient",
    "Segment",
    "Session",
    "SingleTurnAgent",
    "SingleTurnEnv",
    "SourceConfig",
    "StepResult",
    "StopReason",
    "Task",
    "TokenPrompt",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolResponse",
    "ToolSchema",
    "TrainConfig",
    "TrainSample",
    "Trainer",
    "Trajectory",
    "TrajectoryGroup",
    "TurnsAgent",
    "TurnwiseError",
    "check_env",
    "collate_padded",
    "dump_config",
    "evaluate",
    "from_gymnasium",
    "function_tool",
    "image_part",
    "iter_tasks",
    "load_config",
    "load_extensions",
    "load_tasks",
    "main",
    "make",
    "make_agent",
    "read_run",
    "register",
    "register_advantage",
    "register_agent",
    "register_engine",
    "register_loss",
    "run_dpo",
    "run_eval",
    "run_reward_model",
    "run_sft",
    "run_train",
    "to_gymnasium",
    "to_samples",
    "tool_call",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"turnwise.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _GymnasiumIds:
    """Register ``turnwise/<name>-v0`` when Gymnasium is imported after this package.

    ``gymnasium.register_envs(module)`` relies on ids that importing the module registered. Importing Gymnasium here
    would dominate the import time, so an import finder waits for it and then removes itself.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find Gymnasium's spec and register the ids after its module was executed."""
        if name != "gymnasium":
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found_spec for found_spec in specs if found_spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            del vars(loader)["exec_module"]
            sys.meta_path.remove(self)
            execute(module)
            _register_gymnasium_ids()

        vars(loader)["exec_module"] = execute_and_register
        return spec


def _register_gymnasium_ids() -> None:
    importlib.import_module("turnwise.envs.registration").register_with_gymnasium()


if "gymnasium" in sys.modules:
    _register_gymnasium_ids()
else:
    sys.meta_path.insert(0, _GymnasiumIds())
