"""RetailEnv: the desk's tools, a scripted customer, and scoring by the shop's final state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Final

from turnwise.envs.core import ResetResult, Solution, StepResult
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, TaskError, shown
from turnwise.ext.environments.retail.changes import Changes
from turnwise.ext.environments.retail.desk import Desk, Lookups
from turnwise.ext.environments.retail.goal import Goal, goal_of, states_facts
from turnwise.ext.environments.retail.store import Store
from turnwise.ext.environments.retail.tau_bench import read_shop
from turnwise.tasks import Task
from turnwise.types import Message, text_of

_ASKS_WHO: Final = re.compile(r"\b(e-?mail|zip|name|who you are|identif\w*|verif\w*)\b", re.IGNORECASE)
_MOST_REPLIES: Final = 4


class Customer:
    """States the request first, and the identity only when asked.

    A question for e-mail address or name is answered with the identity, any other with the request again. A message
    without a question, or the fifth one, ends the conversation.
    """

    def __init__(self, identity: str, request: str) -> None:
        self.identity, self.request = identity, request
        self._identified = False
        self._replies = 0
        self._gone = False

    def reply(self, message: str) -> str | None:
        """Return the answer to a message without tool calls, or None at the end of the conversation."""
        who = not self._identified and _ASKS_WHO.search(message) is not None
        if self._gone or self._replies >= _MOST_REPLIES or not (who or "?" in message):
            return None
        self._replies += 1
        if who:
            self._identified = True
            return self.identity
        return f"Please do what I asked for: {self.request}"

    def end(self) -> None:
        """Make the next message the last one."""
        self._gone = True


def customer_of(task: Task) -> Customer:
    """Return the customer of a task."""
    parts = []
    for name in ("identity", "request"):
        value = task.data.get(name)
        if not isinstance(value, str) or not value.strip():
            raise TaskError(
                f"task {task.id!r}: data[{name!r}] is {shown(value)}: a dialogue needs 'identity' (the customer) "
                "and 'request' (what is asked)"
            )
        parts.append(value)
    return Customer(*parts)


SYSTEM_PROMPT: Final = Path(__file__).with_name("shipped").joinpath("system_prompt.md").read_text("utf-8")


class RetailEnv(Lookups, Changes, ToolEnv):
    """A customer asks something of a shop; the model answers through the shop's tools.

    The score is 1 where, at the end, the shop is in the state that the task asks for, table by table, and the answer
    states the facts that were asked for; else 0. A superfluous change fails like a missing one, and a request that
    the policy forbids must be declined for the right reason.

    Attributes:
        desk: The shop of this episode, as the tools see it.
        goal: What the episode is scored by.
        dialogue: Whether the customer answers questions instead of telling everything at first.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    desk: Desk
    goal: Goal
    _store: Store | None = None
    _customer: Customer | None = None

    def __init__(self, *, dialogue: bool = False) -> None:
        self.dialogue = dialogue

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Open the shop of the task."""
        self._close_store()
        if task is None:
            raise EnvError("RetailEnv.reset got no task: load tau-bench's retail tasks with format: tau-retail")
        self.goal = goal_of(task)
        self._store = Store(read_shop(self.goal.world))
        self.desk = Desk(self._store)
        opening = task.messages()
        if self.dialogue:
            self._customer = customer_of(task)
            opening = [{"role": "user", "content": self._customer.request}]
        if opening[0]["role"] == "system":
            return opening, {}
        return [{"role": "system", "content": SYSTEM_PROMPT}, *opening], {}

    async def step(self, action: Message) -> StepResult:
        """Answer calls; pass a message without any to the customer."""
        if self._customer is not None and not action.get("tool_calls"):
            answer = self._customer.reply(text_of(action))
            if answer is not None:
                await self._open()
                return StepResult([{"role": "user", "content": answer}], 0.0, False, False, {})
        return await super().step(action)

    def differences(self) -> list[str]:
        """Return the tables that differ from the goal's."""
        digest = self.desk.store.digest()
        return [table for table, expected in self.goal.digest.items() if digest[table] != expected]

    def score(self, final: Message | None) -> float:
        """1 for the right state of the shop and the right facts, else 0."""
        if self.differences():
            return 0.0
        return float(states_facts("" if final is None else text_of(final), self.goal.facts))

    def solve(self) -> Solution:
        """Identify the customer, make the changes of the goal, and state its facts."""
        user = self.desk.store.row("SELECT email FROM users WHERE user_id = ?", self.goal.customer)
        if user is None:
            raise EnvError("the task's customer is not in its shop")
        yield tool_call("find_user_by_email", email=user["email"])
        for name, arguments in self.goal.actions:
            yield tool_call(name, **arguments)
        if self._customer is not None:
            self._customer.end()
        yield "Done. " + " ".join(self.goal.facts)

    async def close(self) -> None:
        """Close the shop."""
        await super().close()
        self._close_store()

    def _close_store(self) -> None:
        self._customer = None
        if self._store is not None:
            self._store.close()
            self._store = None
