"""The environment: the tools of the desk, and how a conversation is scored.

Owns: :class:`RetailEnv`. Refuses: what a tool does (``desk.py``, ``changes.py``) and what is asked (``requests.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from turnwise.envs.core import ResetResult, Solution, StepResult
from turnwise.envs.retail import changes
from turnwise.envs.retail.changes import CancelReason, DeclineReason, Topic
from turnwise.envs.retail.customer import Customer, customer_of
from turnwise.envs.retail.desk import Desk
from turnwise.envs.retail.goal import Goal, goal_of, states
from turnwise.envs.retail.policy import system_prompt
from turnwise.envs.retail.store import Store
from turnwise.envs.retail.tasks import drawn
from turnwise.envs.retail.world import draw
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of

Items = Annotated[list[str], "item ids of the order"]
NewItems = Annotated[list[str], "as many item ids, each of the same product as its counterpart"]


class _Lookups:
    """The tools that change nothing."""

    desk: Desk

    @function_tool(inline=True)
    def find_user_by_email(self, email: str) -> str:
        """Identify the customer by e-mail address; returns the user id."""
        sql = "SELECT user_id FROM users WHERE email = ?"
        return self.desk.serve(self.desk.store.row(sql, email.strip().lower()), "this e-mail address")

    @function_tool(inline=True)
    def find_user_by_name(self, first_name: str, last_name: str, zip_code: str) -> str:
        """Identify the customer by name and zip code; returns the user id."""
        sql = "SELECT user_id FROM users WHERE lower(first_name) = ? AND lower(last_name) = ? AND zip = ?"
        values = (first_name.strip().lower(), last_name.strip().lower(), zip_code.strip())
        return self.desk.serve(self.desk.store.row(sql, *values), "this name and zip code")

    @function_tool(inline=True)
    def get_user(self, user_id: str) -> dict[str, Any]:
        """Name, address, payment methods and order ids of the customer."""
        return self.desk.user_view(user_id)

    @function_tool(inline=True)
    def get_order(self, order_id: str) -> dict[str, Any]:
        """Status, dates, address, items and payments of an order of the customer."""
        return self.desk.order_view(order_id)

    @function_tool(inline=True)
    def list_products(self) -> dict[str, str]:
        """The names of all products, with their product ids."""
        return {row["name"]: row["product_id"] for row in self.desk.store.rows("SELECT * FROM products ORDER BY name")}

    @function_tool(inline=True)
    def get_product(self, product_id: str) -> dict[str, Any]:
        """All variants of a product: item id, options, price, and whether it is available and on final sale."""
        return self.desk.product_view(product_id)


class _Changes:
    """The tools that change the shop; each one does all that it says, or nothing."""

    desk: Desk

    @function_tool(inline=True)
    def cancel_order(self, order_id: str, reason: CancelReason) -> dict[str, Any]:
        """Cancel a pending order."""
        return changes.cancel_order(self.desk, order_id, reason)

    @function_tool(inline=True)
    def change_order_address(self, order_id: str, street: str, city: str, state: str, zip_code: str) -> dict[str, Any]:
        """Send a pending order to another address."""
        return changes.change_order_address(self.desk, order_id, street, city, state, zip_code)

    @function_tool(inline=True)
    def change_user_address(self, user_id: str, street: str, city: str, state: str, zip_code: str) -> dict[str, Any]:
        """Change the customer's own address. Orders keep theirs."""
        return changes.change_user_address(self.desk, user_id, street, city, state, zip_code)

    @function_tool(inline=True)
    def change_order_payment(self, order_id: str, payment_id: str) -> dict[str, Any]:
        """Pay a pending order with another payment method of the customer."""
        return changes.change_order_payment(self.desk, order_id, payment_id)

    @function_tool(inline=True)
    def change_order_items(
        self, order_id: str, item_ids: Items, new_item_ids: NewItems, payment_id: str
    ) -> dict[str, Any]:
        """Change items of a pending order to other variants of the same products; once per order."""
        return changes.change_order_items(self.desk, order_id, item_ids, new_item_ids, payment_id)

    @function_tool(inline=True)
    def return_items(self, order_id: str, item_ids: Items, payment_id: str) -> dict[str, Any]:
        """Take items of a delivered order back; their price goes to the payment method."""
        return changes.return_items(self.desk, order_id, item_ids, payment_id)

    @function_tool(inline=True)
    def exchange_items(self, order_id: str, item_ids: Items, new_item_ids: NewItems, payment_id: str) -> dict[str, Any]:
        """Exchange items of a delivered order for other variants of the same products."""
        return changes.exchange_items(self.desk, order_id, item_ids, new_item_ids, payment_id)

    @function_tool(inline=True)
    def decline_request(self, order_id: str, reason: DeclineReason) -> dict[str, Any]:
        """Note that a request about an order is refused by the policy, and why."""
        return changes.decline_request(self.desk, order_id, reason)

    @function_tool(inline=True)
    def transfer_to_human(self, topic: Topic) -> dict[str, Any]:
        """Hand the customer over to a human, for what the tools cannot do. Nothing can be changed afterwards."""
        return changes.transfer_to_human(self.desk, topic)


class RetailEnv(_Lookups, _Changes, ToolEnv):
    """A customer asks something of a shop; the model answers through the shop's tools.

    The score is 1 where, at the end, the shop is in the state that the task asks for, table by table, and the answer
    states the facts that were asked for; else 0. So a change too many is as wrong as one too few, and a request that
    the policy forbids is met only by declining it for the right reason.

    Attributes:
        desk: The shop of this episode, as the tools see it.
        goal: What the episode is scored by.
        dialogue: Whether the customer answers questions instead of telling everything at first.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.envs.retail:tasks"

    desk: Desk
    goal: Goal
    _store: Store | None = None
    _customer: Customer | None = None

    def __init__(self, *, dialogue: bool = False) -> None:
        self.dialogue = dialogue

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Open the shop of the task; without a task, one is drawn from the seed.

        Raises:
            TaskError: The task's data does not name a shop and what is to be reached in it.
        """
        self._drop()
        task = drawn(seed) if task is None else task
        self.goal = goal_of(task)
        world = draw(self.goal.world)
        self._store = Store(world)
        self.desk = Desk(self._store)
        opening = task.messages()
        if self.dialogue:
            self._customer = customer_of(task)
            opening = [{"role": "user", "content": self._customer.request}]
        if opening[0]["role"] == "system":
            return opening, {}
        return [{"role": "system", "content": system_prompt(world.today)}, *opening], {}

    async def step(self, action: Message) -> StepResult:
        """Answer calls; a message without any goes to the customer, who may have an answer, and ends it otherwise."""
        if self._customer is not None and not action.get("tool_calls"):
            reply = self._customer.reply(text_of(action))
            if reply is not None:
                await self._open()
                return StepResult([{"role": "user", "content": reply}], 0.0, False, False, {})
        return await super().step(action)

    def differences(self) -> list[str]:
        """Return the tables that are not as the task asks for."""
        found = self.desk.store.digest()
        return [table for table, wanted in self.goal.digest.items() if found[table] != wanted]

    def score(self, final: Message | None) -> float:
        """1 for the right state of the shop and the right facts, else 0."""
        if self.differences():
            return 0.0
        return float(states("" if final is None else text_of(final), self.goal.facts))

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
        """Free the shop."""
        await super().close()
        self._drop()

    def _drop(self) -> None:
        self._customer = None
        if self._store is not None:
            self._store.close()
            self._store = None
