"""Environments: what an agent acts in, under Gymnasium's names, at the level of messages."""

from turnwise.envs.checker import CheckReport, Finding, check_env
from turnwise.envs.core import Env, StepResult, as_messages, invoke, schemas
from turnwise.envs.registration import EnvSpec, env_names, make, register
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.envs.tool_env import ToolEnv

__all__ = [
    "CheckReport",
    "Env",
    "EnvSpec",
    "Finding",
    "SingleTurnEnv",
    "StepResult",
    "ToolEnv",
    "as_messages",
    "check_env",
    "env_names",
    "invoke",
    "make",
    "register",
    "schemas",
]
