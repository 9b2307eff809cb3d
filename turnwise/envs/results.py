"""Results of environment methods, and their validation against the contract."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast, get_args

from turnwise.errors import EnvError, shown
from turnwise.images import readable_text
from turnwise.tools.response import finite
from turnwise.types import Message, Role, StopReason

Observation: TypeAlias = str | list[Message]
"""Messages to append to the conversation; a text is one user message."""
ResetResult: TypeAlias = tuple[Observation, dict[str, Any]]
Score: TypeAlias = float | dict[str, float]
AgentRewards: TypeAlias = Mapping[str, "float | Mapping[str, float]"]
"""Rewards by agent: a number, or named parts."""

_ROLES = frozenset(get_args(Role))
_HEADING = re.compile(rf"(?<=[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])(?=\s*\[(?:{'|'.join(_ROLES)})\])", re.IGNORECASE)

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
SANDBOX_VARIES: Final[Mapping[str, str]] = {
    "time": rf"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? {_MONTH} +\d+ \d\d:\d\d:\d\d (?:[A-Z]+ )?\d{{4}}(?: [+-]\d{{4}})?"
    rf"|\b{_MONTH} [ \d]\d (?:\d\d:\d\d| \d{{4}})(?= )"
    r"|\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?"
    r"|\b1[7-9]\d{8}(?:\.\d+)?\b",
    "duration": r"(?<=\bin )\d+\.\d+ ?s\b|(?m:^(?:real|user|sys)\t\d+m\d+\.\d+s$)"
    r"|(?m:^\d+\.\d\ds (?=call|setup|teardown))",
    "folder": r"(?:/[\w.-]+)*/turnwise-\d+-\d+-\d+-\d+\b",
    "temporary name": r"\btmp(?:\.[A-Za-z0-9]{10}|[a-z0-9_]{8})(?![A-Za-z0-9])",
    "address": r"(?<=\bat )0x[0-9a-f]{6,16}\b",
    "process": r"(?m:^\[\d+\] \d+$)",
    "commit": r"(?m:^commit [0-9a-f]{40}\b|^[0-9a-f]{7,40}(?= )|(?<= )[0-9a-f]{7,40}(?=\] )"
    r"|(?<=HEAD is now at )[0-9a-f]{7,40})",
}
"""What commands in a sandbox print that no seed decides, for :attr:`turnwise.Env.varies`: the clock, durations of test
runners and of ``time``, the folder of a sandbox without namespaces, names of temporary files, addresses of objects,
processes in the background, ids of new commits."""


class Remark(str):
    """What ``check_task`` says of a task that can be used as it is: a warning, where a plain text is an error."""

    __slots__ = ()


class StepResult(NamedTuple):
    """Result of a step. Unpacks as Gymnasium's five values.

    Attributes:
        observation: Messages to append.
        reward: Reward of this step; the sum of ``info["rewards"]``, if given.
        terminated: The message ended the episode and was scored: the reward holds the score.
        truncated: The episode ends for another reason, unscored.
        info: Keys read: ``rewards`` (named parts of the reward: ``dict[str, float]``), ``metrics`` (numbers to log:
            ``dict[str, float]``), ``notes`` (texts that the trajectory keeps: ``dict[str, str]``), ``stop_reason`` (a
            StopReason, where truncated for another reason than ``env_truncated``). With several agents, ``reward`` and
            ``rewards`` are the acting agent's, ``agent_rewards`` further ones by agent (a number, or named parts), and
            ``turn`` the next agent. ``state`` (a text or an integer, also from ``reset``) names the state of the next
            move, for credit assignment across equal states. Further keys are yours.
    """

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class ScoreParts(dict[str, float]):
    """Named parts of a score, whose sum counts; ``score`` may return one instead of a plain dict.

    Attributes:
        metrics: Numbers to log; they count for nothing.
        agents: Scores by agent: a number, or named parts.
        notes: Texts by name that the trajectory keeps (``turn_notes``), such as why a solution counts for nothing.
    """

    __slots__ = ("agents", "metrics", "notes")

    def __init__(
        self,
        parts: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        agents: AgentRewards | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(parts or {})
        self.metrics: dict[str, float] = dict(metrics or {})
        self.agents: dict[str, float | Mapping[str, float]] = dict(agents or {})
        self.notes: dict[str, str] = dict(notes or {})

    def info(self) -> dict[str, Any]:
        """Return the info of a step that ended the episode with this score."""
        return {
            "rewards": dict(self),
            "metrics": self.metrics,
            **({"agent_rewards": self.agents} if self.agents else {}),
            **({"notes": self.notes} if self.notes else {}),
        }


def named_numbers(value: Any, where: str) -> Mapping[str, Any]:
    """Return a dict with text keys; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise EnvError(f"{where} is {shown(value)}: it must be a dict from names to numbers")
    return value


def agent_parts(value: Any, name: str, where: str = "rewards of agents") -> dict[str, dict[str, float]]:
    """Return rewards by agent as named parts.

    Args:
        value: The environment's value; None is nothing.
        name: Name of a plain number.
        where: Beginning of the error message.
    """
    if value is not None and not isinstance(value, Mapping):
        raise EnvError(f"{where} is {shown(value)}: it must be a dict from agents to numbers or named parts")
    return {
        agent: {part: finite(number, f"{where}[{agent!r}][{part!r}]") for part, number in named_numbers(
            rewards if isinstance(rewards, Mapping) else {name: rewards}, f"{where}[{agent!r}]"
        ).items()}
        for agent, rewards in named_numbers(value, where).items()
    }  # fmt: skip


def as_messages(observation: Any) -> list[Message]:
    """Return an observation as a new list of messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, Mapping):
        observation = [observation]
    if not isinstance(observation, (list, tuple)):
        raise EnvError(f"an observation is a string or a list of messages, not {shown(observation)}")
    for index, message in enumerate(observation):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise EnvError(
                f"observation[{index}] is {shown(message)}: a message is a dict whose 'role' is one of "
                f"{', '.join(sorted(_ROLES))}"
            )
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise EnvError(
                f"observation[{index}]['content'] is {shown(content)}: it must be a string or a list of parts"
            )
    return cast("list[Message]", list(observation))


def transcript(messages: Sequence[Message]) -> str:
    """Format a conversation as text: roles, contents and calls."""
    lines = []
    for message in messages:
        calls = [f"{call.name}({call.raw or call.arguments})" for call in message.get("tool_calls") or ()]
        text = "\n".join(filter(None, [readable_text(message), *calls]))
        # Indented, so that no message holds the heading of another one.
        lines.append(f"[{message['role']}] {_HEADING.sub(' ', text)}")
    return "\n".join(lines)


def check_reset(result: Any, env: object) -> tuple[list[Message], dict[str, Any]]:
    """Validate the result of ``reset`` and normalise its observation. Raises EnvError."""
    name = type(env).__qualname__
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"{name}.reset returned {shown(result)}: it must return (observation, info)")
    observation, info = result
    if not isinstance(info, dict):
        raise EnvError(f"{name}.reset returned the info {shown(info)}: it must be a dict")
    check_turn(info, f"{name}.reset")
    return _named_messages(observation, f"{name}.reset"), info


def check_turn(info: Mapping[str, Any], where: str) -> None:
    """Validate ``info["turn"]`` and ``info["agents"]`` of a multi-agent environment. Raises EnvError."""
    turn, agents = info.get("turn"), info.get("agents")
    if turn is not None and not isinstance(turn, str):
        raise EnvError(f"{where}: info['turn'] is {shown(turn)}: it must be the name of the agent that acts next")
    if agents is None:
        return
    if not isinstance(agents, (list, tuple)) or not agents or len({*map(str, agents)}) < len(agents):
        raise EnvError(f"{where}: info['agents'] is {shown(agents)}: it must be a list of unique names")
    if turn is not None and turn not in agents:
        raise EnvError(
            f"{where}: info['turn'] is {turn!r}, which is not in info['agents']: {', '.join(map(str, agents))}"
        )


def check_step(result: Any, env: object) -> StepResult:
    """Validate the result of ``step`` and normalise its observation. Raises EnvError."""
    where = f"{type(env).__qualname__}.step"
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(
            f"{where} returned {shown(result)}: it must return StepResult(observation, reward, terminated, truncated, "
            "info)"
        )
    observation, reward, terminated, truncated, info = result
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        # numpy's bools are fine, 0.0 or {} instead of a flag is a result in the wrong order.
        if flag is None or (isinstance(flag, (int, float, str, Mapping)) and not isinstance(flag, bool)):
            raise EnvError(f"{where} returned {name}={flag!r}: it must be True or False")
    if not isinstance(info, dict):
        raise EnvError(f"{where} returned the info {shown(info)}: it must be a dict")
    value = finite(reward, f"{where} returned the reward")
    for key in ("rewards", "metrics"):
        for name, part in named_numbers(info.get(key), f"{where}: info[{key!r}]").items():
            finite(part, f"{where}: info[{key!r}][{name!r}]")
    agent_parts(info.get("agent_rewards"), "step", f"{where}: info['agent_rewards']")
    check_turn(info, where)
    reason = info.get("stop_reason")
    if reason is not None and reason not in tuple(StopReason):
        raise EnvError(f"{where}: info['stop_reason'] is {reason!r}: allowed are {', '.join(StopReason)}")
    messages = _named_messages(observation, where)
    return StepResult(messages, value, bool(terminated), bool(truncated), info)


def check_one_agent(info: Mapping[str, Any], env: object, player: str) -> None:
    """Refuse an episode of several agents to a player who would play, and win, for all of them. Raises EnvError."""
    if len(info.get("agents") or ()) > 1:
        raise EnvError(
            f"{type(env).__qualname__} has the agents {', '.join(info['agents'])}, and {player} is one: configure it "
            "for one agent (nim: opponent), or play it with the agent 'turns'"
        )


def check_score(result: Any, env: object) -> ScoreParts:
    """Return the result of ``score`` as named parts. Raises EnvError."""
    where = f"{type(env).__qualname__}.score returned"
    if not isinstance(result, Mapping):
        return ScoreParts({"score": finite(result, where)})
    parts = {name: finite(part, f"{where} {name!r}:") for name, part in named_numbers(result, where).items()}
    if not isinstance(result, ScoreParts):
        return ScoreParts(parts)
    metrics = {name: finite(value, f"{where} the metric {name!r}:") for name, value in result.metrics.items()}
    notes = {str(name): str(text) for name, text in result.notes.items()}
    return ScoreParts(parts, metrics, agent_parts(result.agents, "score", f"{where} agents"), notes)


def _named_messages(observation: Any, where: str) -> list[Message]:
    try:
        return as_messages(observation)
    except EnvError as error:
        raise EnvError(f"{where}: {error}") from error
