"""A customer who answers questions: by rules, and the same every time.

Owns: :class:`Customer`. Refuses: judging what the desk does; who is asked nothing goes.
"""

from __future__ import annotations

import re
from typing import Final

from turnwise.errors import TaskError, shown
from turnwise.tasks import Task

_ASKS_WHO: Final = re.compile(r"\b(e-?mail|zip|name|who you are|identif\w*|verif\w*)\b", re.IGNORECASE)
_MOST_REPLIES: Final = 4


class Customer:
    """Says first what is wanted, and who they are only when they are asked.

    A message that asks for the e-mail address or the name is answered with who they are; any other question with the
    request once more. A message that asks nothing ends the conversation, and so does the fifth one.
    """

    def __init__(self, identity: str, request: str) -> None:
        self.identity, self.request = identity, request
        self._identified = False
        self._replies = 0
        self._gone = False

    def reply(self, message: str) -> str | None:
        """Return the answer to a message without tool calls, or None where the conversation is over."""
        who = not self._identified and _ASKS_WHO.search(message) is not None
        if self._gone or self._replies >= _MOST_REPLIES or not (who or "?" in message):
            return None
        self._replies += 1
        if who:
            self._identified = True
            return self.identity
        return f"Please do what I asked for: {self.request}"

    def end(self) -> None:
        """Leave: the next message is the last one."""
        self._gone = True


def customer_of(task: Task) -> Customer:
    """Return the customer of a task.

    Raises:
        TaskError: Its data does not say apart who asks and what is asked.
    """
    parts = []
    for name in ("identity", "request"):
        value = task.data.get(name)
        if not isinstance(value, str) or not value.strip():
            raise TaskError(
                f"task {task.id!r}: data[{name!r}] is {shown(value)}: a dialogue needs the texts 'identity' (who asks) "
                "and 'request' (what is asked)"
            )
        parts.append(value)
    return Customer(*parts)
