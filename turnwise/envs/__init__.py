"""Environments at the level of messages, with Gymnasium's method names."""

from turnwise.envs.core import (
    Env,
    Solution,
    StepResult,
    as_messages,
    call_env,
    close_env,
    fork_env,
    reset_env,
    schemas,
    score_env,
    step_env,
)
from turnwise.envs.demonstrations import conversation, solved_conversation
from turnwise.envs.multi_agent import MultiAgentEnv
from turnwise.envs.registration import EnvSpec, env_names, make, register
from turnwise.envs.results import SANDBOX_VARIES
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.envs.solution import play_solution, tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.envs.wrappers import ShapeReward, TurnLimit, Wrapper, wrap

__all__ = [
    "SANDBOX_VARIES",
    "Env",
    "EnvSpec",
    "MultiAgentEnv",
    "ShapeReward",
    "SingleTurnEnv",
    "Solution",
    "StepResult",
    "ToolEnv",
    "TurnLimit",
    "Wrapper",
    "as_messages",
    "call_env",
    "close_env",
    "conversation",
    "env_names",
    "fork_env",
    "make",
    "play_solution",
    "register",
    "reset_env",
    "schemas",
    "score_env",
    "solved_conversation",
    "step_env",
    "tool_call",
    "wrap",
]
