"""Turnwise: Gym-style environments and agents, recorded token by token, trained with PPO/GRPO.

Owns: the public names. They are lazy: importing this package imports none of its parts, hence neither torch nor
transformers; a name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.agents import Agent, Episode, ReActAgent, SingleTurnAgent, make_agent, register_agent
    from turnwise.config import dump_config, load_config
    from turnwise.envs import Env, EnvSpec, SingleTurnEnv, StepResult, ToolEnv, check_env, make, register
    from turnwise.errors import (
        AgentError,
        BudgetSpent,
        ConfigError,
        EnvError,
        InferenceError,
        RenderError,
        ToolError,
        TurnwiseError,
    )
    from turnwise.evaluation import EvalConfig, EvalResult, evaluate
    from turnwise.evaluation.standalone import run_eval
    from turnwise.inference.core import LLMClient, Renderer
    from turnwise.inference.scripted import ScriptedClient
    from turnwise.inference.session import Session
    from turnwise.rollout import ReplayBuffer, RolloutConfig, RolloutManager, RolloutProducer, RolloutRequest
    from turnwise.tasks import Task, load_tasks
    from turnwise.tools import BaseTool, ToolResponse, function_tool
    from turnwise.trainer.config import SFTConfig, TrainConfig
    from turnwise.trainer.sft import run_sft
    from turnwise.trainer.train import run_train
    from turnwise.trajectory import Segment, TrainSample, Trajectory, TrajectoryGroup, to_samples
    from turnwise.types import Completion, Message, SamplingParams, StopReason, TokenPrompt, ToolCall, ToolSchema

__version__ = "0.1.0"

_HOMES = {
    "agents": ("Agent", "Episode", "ReActAgent", "SingleTurnAgent", "make_agent", "register_agent"),
    "config": ("dump_config", "load_config"),
    "envs": ("Env", "EnvSpec", "SingleTurnEnv", "StepResult", "ToolEnv", "check_env", "make", "register"),
    "errors": (
        "AgentError", "BudgetSpent", "ConfigError", "EnvError", "InferenceError", "RenderError", "ToolError",
        "TurnwiseError",
    ),
    "evaluation": ("EvalConfig", "EvalResult", "evaluate"),
    "evaluation.standalone": ("run_eval",),
    "inference.core": ("LLMClient", "Renderer"),
    "inference.scripted": ("ScriptedClient",),
    "inference.session": ("Session",),
    "rollout": ("ReplayBuffer", "RolloutConfig", "RolloutManager", "RolloutProducer", "RolloutRequest"),
    "tasks": ("Task", "load_tasks"),
    "tools": ("BaseTool", "ToolResponse", "function_tool"),
    "trainer.config": ("SFTConfig", "TrainConfig"),
    "trainer.train": ("run_train",),
    "trainer.sft": ("run_sft",),
    "trajectory": ("Segment", "TrainSample", "Trajectory", "TrajectoryGroup", "to_samples"),
    "types": ("Completion", "Message", "SamplingParams", "StopReason", "TokenPrompt", "ToolCall", "ToolSchema"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Agent",
    "AgentError",
    "BaseTool",
    "BudgetSpent",
    "Completion",
    "ConfigError",
    "Env",
    "EnvError",
    "EnvSpec",
    "Episode",
    "EvalConfig",
    "EvalResult",
    "InferenceError",
    "LLMClient",
    "Message",
    "ReActAgent",
    "RenderError",
    "Renderer",
    "ReplayBuffer",
    "RolloutConfig",
    "RolloutManager",
    "RolloutProducer",
    "RolloutRequest",
    "SFTConfig",
    "SamplingParams",
    "ScriptedClient",
    "Segment",
    "Session",
    "SingleTurnAgent",
    "SingleTurnEnv",
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
    "Trajectory",
    "TrajectoryGroup",
    "TurnwiseError",
    "check_env",
    "dump_config",
    "evaluate",
    "function_tool",
    "load_config",
    "load_tasks",
    "make",
    "make_agent",
    "register",
    "register_agent",
    "run_eval",
    "run_sft",
    "run_train",
    "to_samples",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"turnwise.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
