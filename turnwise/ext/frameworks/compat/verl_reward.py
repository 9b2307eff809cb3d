"""Reward functions written for verl, called with what verl's reward manager gives them."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from turnwise.chat.renderer import TEMPLATES
from turnwise.chat.template import ChatTemplate
from turnwise.envs.core import Env
from turnwise.envs.rewards.core import RewardFunction
from turnwise.envs.rewards.registry import describe, load_function
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, shown
from turnwise.ext.frameworks.compat.verl_agent_loop import LAST_OUTPUTS, LoopTokenizer
from turnwise.model.canonical import canonical_messages
from turnwise.recorder.session import Session
from turnwise.tasks.core import Task
from turnwise.types import Message

_TOOLS = ("tools_kwargs", "tool_selection")


class VerlScore(RewardFunction):
    """Calls ``compute_score(data_source, solution_str, ground_truth, extra_info)``, plain or async.

    ``solution_str`` is all that followed the first prompt, results of tools included, without special tokens;
    ``extra_info`` that of the row, with ``num_turns``, ``rollout_reward_scores`` and the output's extra fields. The
    result is a number, or a dict whose ``score`` is the value; its other numbers become metrics, the rest is ignored.
    """

    exclusive: ClassVar[bool] = True

    def __init__(self, compute_score: Callable[..., Any] | str, **arguments: Any) -> None:
        """Set the function.

        Args:
            compute_score: The function, or ``pkg.module:function``.
            **arguments: Further keyword arguments of every call: verl's ``reward_kwargs``.
        """
        self._function = load_function(compute_score, arguments, "verl: compute_score")

    def __call__(self, env: Env, task: Task, messages: Sequence[Message]) -> Any:
        """Call it with verl's columns: ``data_source``, ``extra_info``, and ``ground_truth`` or ``reward_model``'s."""
        data = task.data
        model = data.get("reward_model")
        truth = data.get("ground_truth", model.get("ground_truth") if isinstance(model, Mapping) else None)
        if truth is None:
            raise EnvError(
                "verl: task.data has neither 'ground_truth' nor 'reward_model' with 'ground_truth'; it has "
                f"{', '.join(map(repr, data)) or 'no entries'}"
            )
        text, turns, fields = _response(env, messages)
        extra = {**(data.get("extra_info") or {}), **{key: data[key] for key in _TOOLS if key in data}, **fields}
        extra |= {"raw_prompt": task.messages(), "num_turns": turns, "rollout_reward_scores": {}}
        source = data.get("data_source")
        result = self._function(data_source=source, solution_str=text, ground_truth=truth, extra_info=extra)
        return self._awaited(result) if inspect.isawaitable(result) else self._read(result)

    async def _awaited(self, result: Any) -> Any:
        return self._read(await result)

    def _read(self, result: Any) -> Any:
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            raise EnvError(f"verl: {describe(self._function)} returned {shown(dict(result))}: the dict has no 'score'")
        numbers = {str(key): value for key, value in result.items() if isinstance(value, (bool, int, float))}
        return result["score"], {key: float(value) for key, value in numbers.items() if key != "score"}


def _response(env: Env, messages: Sequence[Message]) -> tuple[str, int, Mapping[str, Any]]:
    """Return text, number of turns and extra fields of what followed the first prompt of an episode."""
    session = None if env.main_session is None else env.main_session()
    data = env.agent_data if isinstance(env, ToolEnv) else None
    own_fields = {} if data is None else data.extra_fields
    fields = {"turn_scores": [], "tool_rewards": [] if data is None else data.tool_rewards, **own_fields}
    if session is None or session.recorded_as != "tokens":
        return *_written_response(messages), fields
    output = LAST_OUTPUTS.get(session)
    response, turns = _last_branch(session) if output is None else (output.response_ids, output.num_turns)
    text = LoopTokenizer(session.renderer).decode(response, skip_special_tokens=True)
    return text, turns, fields if output is None else {**fields, **output.extra_fields}


def _last_branch(session: Session) -> tuple[list[int], int]:
    """Return the ids behind the first prompt, and the number of turns, of the branch of the turn sampled last."""
    segments = session.segments(messages=False)
    last_turn = None if session.last is None else session.last["turn_id"]
    sampled = [segment for segment in segments if segment.sampled]
    path = [segment for segment in sampled if segment.turn_id == last_turn][-1:] or sampled[-1:]
    while path and path[0].parent >= 0:
        path.insert(0, segments[path[0].parent])
    return [number for segment in path[1:] for number in segment.token_ids.tolist()], len(path) or 1


def _written_response(messages: Sequence[Message]) -> tuple[str, int]:
    """Return the text and number of turns of a conversation without ids, as the template of Hermes writes it."""
    forms = [{**message.to_template(), "content": message.text} for message in canonical_messages(messages)]
    start = next((number for number, form in enumerate(forms) if form["role"] == "assistant"), len(forms))
    turns = list(itertools.groupby(forms[start:], lambda form: form["role"] == "assistant"))
    template = ChatTemplate((TEMPLATES / "hermes.jinja").read_text())
    prompt = template.render(forms[:start], None, generate=True)
    text = template.render(forms, None, generate=False).removeprefix(prompt)
    return re.sub(r"<\|im_(start|end)\|>", "", text.removesuffix("\n")), 1 + len(turns)
