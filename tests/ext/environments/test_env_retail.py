"""The retail environment: its shop, its tools, its tasks, and that only the right end is worth anything."""

from __future__ import annotations

import gc
import json
import sqlite3
import time
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.toy_renderer import ToyRenderer
from support.property_tests import examples
from turnwise.envs import close_env, make, play_solution, reset_env, schemas, score_env, step_env
from turnwise.errors import EnvError, TaskError, ToolError
from turnwise.ext.checks.environment import check_env
from turnwise.ext.environments.retail.changes import CHANGES
from turnwise.ext.environments.retail.desk import Desk, dollars
from turnwise.ext.environments.retail.goal import LONGEST_ANSWER, goal_of, states_facts
from turnwise.ext.environments.retail.store import COMPARED, Store
from turnwise.ext.environments.retail.tasks import KINDS, compose, task_from_seed, tasks
from turnwise.ext.environments.retail.world import RETURN_DAYS, draw, world_seed
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task, load_tasks
from turnwise.types import ToolCall


def calls(*pairs):
    tool_calls = [ToolCall(f"c{number}", name, arguments) for number, (name, arguments) in enumerate(pairs)]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def says(text):
    return {"role": "assistant", "content": text}


async def started_env(task, **config):
    env = make("retail", **config)
    await reset_env(env, task, seed=0)
    return env


def of_kind(kind, n=8, **arguments):
    return list(tasks(n, split="test", kind=kind, **arguments))


# The shop.


def test_the_seed_decides_the_shop():
    world = draw(5)
    draw.cache_clear()
    assert draw(5) == world
    assert draw(6) != world
    assert (len(world.users), len(world.products)) == (20, 14)
    assert {order.status for order in world.orders.values()} == {"pending", "shipped", "delivered"}
    assert all(
        len({world.variants[item].product for item in order.items}) == len(order.items)
        for order in world.orders.values()
    )


def test_a_shop_belongs_to_one_split_by_its_customers():
    shops = {split: [draw(world_seed(split, 0, index)) for index in range(12)] for split in ("train", "test")}
    for split, worlds in shops.items():
        assert {world.split for world in worlds} == {split}
    people = {split: {email for world in worlds for email in _emails(world)} for split, worlds in shops.items()}
    assert not people["train"] & people["test"]
    assert Counter(draw(seed).split for seed in range(60))["test"] < 30


def _emails(world):
    return [user.email for user in world.users.values()]


# Tasks.


def test_tasks_are_stable_and_of_every_kind():
    first = list(tasks(60, split="test"))
    assert first == list(tasks(60, split="test"))
    assert first[:7] == list(tasks(7, split="test"))
    assert first[3].id == "retail-test-0-3"
    assert Counter(task.data["kind"] for task in first) == dict.fromkeys(KINDS, 6)
    assert load_tasks("turnwise.ext.environments.retail:tasks?n=3&split=test&kind=refuse") == of_kind("refuse", 3)
    assert [task.prompt for task in first] != [task.prompt for task in tasks(60, split="train")]


def test_prompts_hold_no_ids_and_facts_of_the_solution():
    for task in tasks(200):
        for fact in task.data["facts"]:
            assert fact not in task.prompt
        for action in task.data["actions"]:
            hidden = [*action["arguments"].get("item_ids", ()), *action["arguments"].get("new_item_ids", ())]
            hidden += [value for key, value in action["arguments"].items() if key in ("payment_id", "user_id")]
            assert not [value for value in hidden if value in task.prompt]
            if action["name"] == "decline_request":
                assert action["arguments"]["reason"] not in task.prompt


def test_refusals_have_every_reason_and_multi_has_several_actions():
    reasons = Counter(task.data["actions"][0]["arguments"]["reason"] for task in tasks(400, kind="refuse"))
    assert len(reasons) == 8, reasons
    action_counts = [len(task.data["actions"]) for task in of_kind("multi", 40)]
    assert min(action_counts) >= 2
    last_tools = [task.data["actions"][-1]["name"] for task in of_kind("multi", 40)]
    assert "transfer_to_human" in last_tools


@pytest.mark.parametrize("kind", KINDS)
async def test_the_solution_scores_1_and_without_its_last_step_0(kind):
    for task in of_kind(kind, 6):
        env = await started_env(task)
        played = await play_solution(env)
        assert (played[-1][1].reward, env.differences()) == (1.0, [])
        # The same end without the last change, or without the answer.
        moves = [message for message, _ in played]
        await reset_env(env, task, seed=0)
        for message in moves[:-2]:
            await step_env(env, message)
        assert (await step_env(env, says("Done."))).reward == 0.0
        await close_env(env)


async def test_doing_nothing_and_superfluous_changes_score_0():
    for kind in KINDS:
        (task,) = of_kind(kind, 1)
        env = await started_env(task)
        for text in ("", task.prompt, "Done.", "$1.00 " * 50):
            assert await score_env(env, says(text)) == {"score": 0.0}
        assert await score_env(env, None) == {"score": 0.0}
        played = await play_solution(env)
        if kind == "transfer":
            continue
        await reset_env(env, task, seed=0)
        for message, _ in played[:-1]:
            await step_env(env, message)
        order = next(order.id for order in draw(env.goal.world).orders.values() if order.user == env.goal.customer)
        extra = [
            ("decline_request", {"order_id": order, "reason": reason}) for reason in ("final_sale", "out_of_stock")
        ]
        await step_env(env, calls(*extra))
        assert (await step_env(env, played[-1][0])).reward == 0.0
        assert env.differences() == ["declined"]


async def test_white_space_and_case_of_an_address_do_not_count():
    (task,) = of_kind("address", 1)
    env = await started_env(task)
    await step_env(env, calls(("find_user_by_email", {"email": _email(env)})))
    for action in task.data["actions"]:
        arguments = {
            key: value if key.endswith("_id") else f" {value.upper()} " for key, value in action["arguments"].items()
        }
        await step_env(env, calls((action["name"], arguments)))
    assert (await step_env(env, says("Done."))).reward == 1.0


def _email(env):
    return draw(env.goal.world).users[env.goal.customer].email


def test_facts_are_amounts_by_value_and_words_by_boundary():
    assert states_facts("You get $1,250.5 back.", ["$1250.50"])
    assert states_facts("1250.50 dollars", ["$1250.50"])
    assert not states_facts("You get $1,250.51 back.", ["$1250.50"])
    assert not states_facts("$11250.50", ["$1250.50"])
    assert states_facts("Order w123, as you said", ["W123"])
    assert not states_facts("Order W1234", ["W123"])
    assert states_facts("$3 of $4", ["$3"])
    assert not states_facts("$2, $3 or $4", ["$3"])
    assert states_facts("$1 and $2 and $3", ["$1", "$2.00"])
    assert states_facts("W123: $2, $3 or $4", ["W123"])
    assert not states_facts("$3" + "." * LONGEST_ANSWER, ["$3"])
    assert states_facts("anything", [])
    assert not states_facts("", ["$3"])


def test_a_long_answer_is_not_searched():
    # What looks for amounts takes time in the square of such a text: 20 s of processor time for this one.
    started = time.process_time()
    assert not states_facts("1," * 20_000, ["$3"])
    assert time.process_time() - started < 2


async def test_an_answer_that_lists_all_prices_scores_0():
    scored = 0
    for task in tasks(20, split="test", kind="question"):
        if "cheapest" not in task.prompt:
            continue
        env = await started_env(task)
        prices = [row["price"] for row in env.desk.store.rows("SELECT DISTINCT price FROM variants ORDER BY price")]
        nearest = [price for price in prices if price >= round(100 * float(task.data["facts"][0][1:]))][:6]
        assert env.score(says(f"It is one of {', '.join(map(dollars, nearest))}.")) == 0.0
        assert env.score(says(f"It is {dollars(nearest[0])}.")) == 1.0
        await close_env(env)
        scored += 1
    assert scored >= 5


# Tools.


async def test_the_desk_serves_one_customer_who_was_identified():
    task = task_from_seed(3)
    env = await started_env(task)
    world = draw(env.goal.world)
    customer = world.users[env.goal.customer]
    other = next(user for user in world.users.values() if user.id != customer.id)
    other_order = next(order.id for order in world.orders.values() if order.user == other.id)

    async def answer(name, **arguments):
        (message,) = (await step_env(env, calls((name, arguments)))).observation
        return message["content"]

    assert "no customer has been identified" in await answer("get_user", user_id=customer.id)
    assert "no customer has been identified" in await answer("transfer_to_human", topic="courier")
    assert "there is no customer" in await answer("find_user_by_email", email="nobody@example.com")
    wrong = {"first_name": customer.first_name, "last_name": customer.last_name, "zip_code": "00000"}
    assert "there is no customer" in await answer("find_user_by_name", **wrong)
    right = {**wrong, "zip_code": customer.address.zip, "first_name": customer.first_name.upper()}
    assert await answer("find_user_by_name", **right) == customer.id
    assert "another customer" in await answer("find_user_by_email", email=other.email)
    assert "not the customer" in await answer("get_user", user_id=other.id)
    assert "belongs to another customer" in await answer("get_order", order_id=other_order)
    assert "belongs to another customer" in await answer("decline_request", order_id=other_order, reason="final_sale")
    assert "there is no order" in await answer("get_order", order_id="W1")
    view = json.loads(await answer("get_user", user_id=customer.id))
    assert view["orders"] == sorted(order.id for order in world.orders.values() if order.user == customer.id)
    order = json.loads(await answer("get_order", order_id=f"#{view['orders'][0]}"))
    prices = [world.variants[item_id].price for item_id in world.orders[order["order_id"]].items]
    assert order["payments"][0]["amount"] == dollars(sum(prices))
    products = json.loads(await answer("list_products"))
    kettle = json.loads(await answer("get_product", product_id=products["kettle"]))
    assert len(kettle["variants"]) == 6
    assert "not text that can be stored" in await answer("get_order", order_id="\ud800")
    await close_env(env)


async def test_fifteen_tools_whose_reasons_and_topics_are_in_the_policy():
    tools = {schema.name: schema for schema in schemas(make("retail"))}
    assert len(tools) == 15
    assert set(CHANGES) < set(tools)
    reasons = tools["decline_request"].parameters["properties"]["reason"]["enum"]
    env = make("retail")
    (system, _user), _ = await reset_env(env, None, seed=1)
    words = (*reasons, *tools["transfer_to_human"].parameters["properties"]["topic"]["enum"])
    assert [word for word in words if word not in system["content"]] == []
    assert f"within {RETURN_DAYS} days" in system["content"]
    assert draw(env.goal.world).today in system["content"]


async def test_after_a_transfer_nothing_can_be_changed():
    (task,) = of_kind("transfer", 1)
    env = await started_env(task)
    await step_env(env, calls(("find_user_by_email", {"email": _email(env)})))
    await step_env(env, calls(("transfer_to_human", task.data["actions"][0]["arguments"])))
    digest = env.desk.store.digest()
    order = next(order.id for order in draw(env.goal.world).orders.values() if order.user == env.goal.customer)
    for call in (
        ("decline_request", {"order_id": order, "reason": "final_sale"}),
        ("cancel_order", {"order_id": order, "reason": "no longer needed"}),
        ("transfer_to_human", {"topic": "courier"}),
    ):
        (message,) = (await step_env(env, calls(call))).observation
        assert "was transferred" in message["content"]
    assert env.desk.store.digest() == digest


def test_reading_cannot_change_the_shop():
    store = Store(draw(1))
    for sql in ("DELETE FROM orders", "UPDATE variants SET stock = 0", "DROP TABLE users", "CREATE TABLE t (x)"):
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.rows(sql)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.write(sql)
    store.close()
    store.close()


def test_a_failed_change_is_rolled_back():
    store = Store(draw(1))
    digest = store.digest()

    def half():
        store.write("UPDATE variants SET stock = stock + 1")
        raise ToolError("enough")

    for change in (half, lambda: store.write("UPDATE variants SET stock = -1")):
        with pytest.raises((ToolError, sqlite3.IntegrityError)), store.transaction():
            change()
        assert store.digest() == digest
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store.rows("DELETE FROM orders")
    store.close()


# What no sequence of calls can break.

_WORLD = draw(11)
_CUSTOMER = max(_WORLD.users, key=lambda user: sum(order.user == user for order in _WORLD.orders.values()))
_OWN = [order for order in _WORLD.orders.values() if order.user == _CUSTOMER]
_ORDER_IDS = [
    *(order.id for order in _OWN),
    next(order.id for order in _WORLD.orders.values() if order.user != _CUSTOMER),
]
_ITEMS = [item for order in _OWN for item in order.items]
_PAYMENTS = [method.id for method in _WORLD.payments.values() if method.user == _CUSTOMER] + ["card_0"]


# Items are changed most often, and a transfer, after which nothing can be done, comes seldom.
_NAMES = [*sorted(set(CHANGES) - {"transfer_to_human"}), "cancel_order"]
_NAMES += ["change_order_items", "exchange_items", "return_items"] * 4 + ["transfer_to_human"]


@st.composite
def some_calls(draw_from):
    """Calls that concern mostly one order, so that they meet each other."""
    usual = draw_from(st.sampled_from(_ORDER_IDS))
    return [_call(draw_from, usual) for _ in range(draw_from(st.integers(2, 12)))]


def _call(draw_from, usual):
    name = draw_from(st.sampled_from(_NAMES))
    order = draw_from(st.sampled_from([usual] * 5 + _ORDER_IDS))
    payment = draw_from(st.sampled_from(_PAYMENTS))
    products = [_WORLD.variants[item].product for item in _WORLD.orders[order].items]
    near = {product: [variant.id for variant in _WORLD.variants_of(product)] for product in products}
    # What an order held at first, mostly; it may hold another variant of the product by now.
    picked = draw_from(st.lists(st.sampled_from(products), min_size=1, max_size=2))
    item_of = dict(zip(products, _WORLD.orders[order].items, strict=True))
    items = [draw_from(st.sampled_from([item_of[product]] * 4 + near[product])) for product in picked]
    new = [draw_from(st.sampled_from(near[product])) for product in picked]
    zip_code = draw_from(st.sampled_from(["18510", " "]))
    address = {"street": "1 Elm Street", "city": "Dunmore", "state": "PA", "zip_code": zip_code}
    reason = draw_from(st.sampled_from(["final_sale", "out_of_stock"]))
    arguments = {
        "cancel_order": {"order_id": order, "reason": "no longer needed"},
        "change_order_address": {"order_id": order, **address},
        "change_user_address": {"user_id": _CUSTOMER, **address},
        "change_order_payment": {"order_id": order, "payment_id": payment},
        "change_order_items": {"order_id": order, "item_ids": items, "new_item_ids": new, "payment_id": payment},
        "return_items": {"order_id": order, "item_ids": items, "payment_id": payment},
        "exchange_items": {"order_id": order, "item_ids": items, "new_item_ids": new, "payment_id": payment},
        "decline_request": {"order_id": order, "reason": reason},
        "transfer_to_human": {"topic": "courier"},
    }
    return name, arguments[name]


@settings(max_examples=examples(80), deadline=None)
@given(some_calls())
def test_call_sequences_preserve_money_stock_and_history(sequence):
    store = Store(_WORLD)
    try:
        desk = Desk(store, _CUSTOMER)
        holdings, lines, statuses = _holdings(store), _lines(store), _statuses(store)
        for name, arguments in sequence:
            digest = store.digest()
            try:
                CHANGES[name](desk, **arguments)
            except ToolError:
                assert store.digest() == digest
            else:
                assert store.digest() != digest or name in ("change_order_address", "change_user_address")
            _check_money(store)
            assert _holdings(store) == holdings
            later_lines, later = _lines(store), _statuses(store)
            # A line that was cancelled, sent back or exchanged stays so; no line comes or goes.
            assert Counter(order for order, _ in later_lines) == Counter(order for order, _ in lines)
            done = [(key, state) for key, state in lines.items() if state != "ordered"]
            assert all(later_lines[key] == state for key, state in done)
            moved = {(statuses[order], later[order]) for order in later if statuses[order] != later[order]}
            assert moved <= {("pending", "cancelled")}
            lines, statuses = later_lines, later
    finally:
        store.close()


def _check_money(store):
    """What an order cost is the price of what of it is kept; what a gift card paid is gone from it."""
    kept_prices = {row["order_id"]: 0 for row in store.rows("SELECT order_id FROM orders")}
    for row in store.rows("SELECT * FROM order_items"):
        kept_prices[row["order_id"]] += {"ordered": row["price"], "exchanged": row["new_price"]}.get(row["state"], 0)
    sql = "SELECT order_id, payment_id, kind, amount FROM payments"
    paid, by_card = Counter(), Counter()
    for row in store.rows(sql):
        signed = row["amount"] if row["kind"] == "payment" else -row["amount"]
        paid[row["order_id"]] += signed
        by_card[row["payment_id"]] += signed
    assert {order: paid[order] for order in kept_prices} == kept_prices
    for row in store.rows("SELECT * FROM payment_methods WHERE balance IS NOT NULL"):
        assert row["balance"] == _WORLD.payments[row["payment_id"]].balance - by_card[row["payment_id"]]


def _holdings(store):
    """What there is of each variant: in stock, in pending orders, and set aside for exchanges."""
    stock = Counter({row["item_id"]: row["stock"] for row in store.rows("SELECT item_id, stock FROM variants")})
    sql = (
        "SELECT item_id FROM order_items i JOIN orders o USING (order_id) WHERE o.status || i.state = 'pendingordered'"
    )
    stock.update(row["item_id"] for row in store.rows(sql))
    stock.update(row[0] for row in store.rows("SELECT new_item_id FROM order_items WHERE new_item_id IS NOT NULL"))
    return stock


def _lines(store):
    return {(row["order_id"], row["item_id"]): row["state"] for row in store.rows("SELECT * FROM order_items")}


def _statuses(store):
    return {row["order_id"]: row["status"] for row in store.rows("SELECT order_id, status FROM orders")}


def test_money_that_went_to_another_method_is_given_back_once():
    """A cheaper variant paid back to a gift card, then a cancellation: in all, what was paid and no more."""
    store = Store(_WORLD)
    desk = Desk(store, _CUSTOMER)
    card = next(
        method for method in _WORLD.payments.values() if method.user == _CUSTOMER and method.kind == "gift_card"
    )
    order, old, new = next(
        (order, _WORLD.variants[item], other)
        for order in _OWN
        if order.status == "pending"
        for item in order.items
        for other in _WORLD.variants_of(_WORLD.variants[item].product)
        if other.stock > 0 and other.price < _WORLD.variants[item].price
    )
    CHANGES["change_order_items"](desk, order.id, [old.id], [new.id], card.id)
    with pytest.raises(ToolError, match="only once"):
        CHANGES["change_order_items"](desk, order.id, [new.id], [old.id], card.id)
    total = sum(_WORLD.variants[item].price for item in order.items)
    back = CHANGES["cancel_order"](desk, order.id, "no longer needed")["refunded"]
    assert back == {order.payment: dollars(total - old.price + new.price)}
    _check_money(store)
    with pytest.raises(ToolError, match="is cancelled"):
        CHANGES["cancel_order"](desk, order.id, "no longer needed")
    store.close()


def test_a_gift_card_settles_several_items_exactly_where_it_holds_their_sum():
    seen = Counter()
    for seed in range(12):
        world = draw(seed)
        for card in (method for method in world.payments.values() if method.kind == "gift_card"):
            for order in world.orders.values():
                if order.user != card.user or order.status != "delivered" or len(order.items) < 2:
                    continue
                old = [world.variants[item] for item in order.items[:2]]
                new = [
                    max(
                        (v for v in world.variants_of(variant.product) if v.id != variant.id and v.stock),
                        key=lambda v: v.price,
                    )
                    for variant in old
                ]
                due = sum(variant.price for variant in new) - sum(variant.price for variant in old)
                store = Store(world)
                try:
                    ids = [variant.id for variant in old], [variant.id for variant in new]
                    CHANGES["exchange_items"](Desk(store, card.user), order.id, *ids, card.id)
                    paid = True
                except ToolError:
                    paid = False
                row = store.row("SELECT balance FROM payment_methods WHERE payment_id = ?", card.id)
                assert row is not None
                assert paid == (due <= card.balance)
                assert row["balance"] == card.balance - (due if paid else 0)
                seen[paid] += 1
                store.close()
    assert min(seen[True], seen[False]) >= 3, seen


def test_items_are_exchanged_for_others_and_sent_back_once():
    store = Store(_WORLD)
    desk = Desk(store, _CUSTOMER)
    order = next(candidate for candidate in _OWN if candidate.status == "delivered")
    item = _WORLD.variants[order.items[0]]
    for items, new, words in (
        ([item.id], [item.id], "already"),
        ([item.id], [], "they form pairs"),
        ([], [], "item_ids is empty"),
        ([item.id, item.id], [item.id, item.id], "twice"),
        ([item.id], ["i1"], "there is no item 'i1'"),
        (
            [item.id],
            [next(variant.id for variant in _WORLD.variants.values() if variant.product != item.product)],
            "exchanged for",
        ),
        (["i1"], ["i1"], "has no item 'i1'"),
    ):
        with pytest.raises(ToolError, match=words):
            CHANGES["exchange_items"](desk, order.id, items, new, order.payment)
    sold_out = [variant for variant in _WORLD.variants.values() if variant.stock == 0]
    combinations = [(o, i, v) for o in _OWN if o.status == "delivered" for i in o.items for v in sold_out]
    for each, held, variant in combinations:
        if _WORLD.variants[held].product == variant.product and held != variant.id:
            with pytest.raises(ToolError, match="out of stock"):
                CHANGES["exchange_items"](desk, each.id, [held], [variant.id], each.payment)
    CHANGES["return_items"](desk, order.id, [item.id], order.payment)
    with pytest.raises(ToolError, match="is returned already"):
        CHANGES["return_items"](desk, order.id, [item.id], order.payment)
    _check_money(store)
    store.close()


def test_every_change_is_asked_for_by_some_task():
    done = set()
    for seed in range(40):
        for kind in KINDS:
            done |= {name for name, _ in compose(draw(seed), kind, Random(seed)).actions}
    assert done == set(CHANGES)


def test_the_order_of_independent_changes_does_not_count():
    seen = set()
    for turn in (1, -1):
        store = Store(_WORLD)
        desk = Desk(store, _CUSTOMER)
        for order in [candidate for candidate in _OWN if candidate.status == "pending"][::turn]:
            CHANGES["cancel_order"](desk, order.id, "no longer needed")
            CHANGES["decline_request"](desk, order.id, "final_sale")
        seen.add(json.dumps(store.digest()))
        store.close()
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["return", "exchange"])
async def test_items_may_be_handled_in_one_call_or_one_by_one(kind):
    split = 0
    for task in of_kind(kind, 16):
        env = await started_env(task)
        await step_env(env, calls(("find_user_by_email", {"email": _email(env)})))
        ((name, arguments),) = env.goal.actions
        split += len(arguments["item_ids"]) > 1
        for number, item in enumerate(arguments["item_ids"]):
            one = {**arguments, "item_ids": [item]}
            if "new_item_ids" in arguments:
                one["new_item_ids"] = [arguments["new_item_ids"][number]]
            await step_env(env, calls((name, one)))
        assert env.differences() == []
        await close_env(env)
    assert split >= 3


# Bad tasks.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world": "x"}, r"data\['world'\] is 'x'.*seed"),
        ({"world": True}, r"data\['world'\]"),
        ({"customer": "nobody"}, r"data\['customer'\] is 'nobody'"),
        ({"facts": "$3"}, r"data\['facts'\]"),
        ({"actions": "cancel"}, r"data\['actions'\]"),
        ({"actions": [{"name": "fly", "arguments": {}}]}, r"\['actions'\]\[0\].*cancel_order"),
        ({"actions": [{"name": "cancel_order", "arguments": {"order_id": "W1"}}]}, "cannot be executed.*reason"),
        ({"actions": [{"name": "cancel_order", "arguments": {"order_id": "W1", "reason": "x"}}]}, "no order 'W1'"),
        ({"actions": [], "facts": []}, "an empty episode would solve it"),
    ],
)
async def test_a_task_that_cannot_be_reached_is_named(change, words):
    (task,) = of_kind("cancel", 1)
    env = make("retail")
    with pytest.raises(TaskError, match=words):
        await reset_env(env, Task("t", "p", {**task.data, **change}), seed=0)
    await close_env(env)


def test_unknown_splits_and_kinds_are_named():
    with pytest.raises(TaskError, match="split 'dev'"):
        next(tasks(split="dev"))
    with pytest.raises(TaskError, match=r"kind of task 'steal'.*cancel"):
        next(tasks(kind="steal"))


def test_goals_are_computed_once_for_a_group():
    (task,) = of_kind("return", 1)
    assert goal_of(task).digest is goal_of(task).digest
    assert set(goal_of(task).digest) == set(COMPARED)


# Dialogue.


async def test_in_a_dialogue_the_customer_is_asked_who_they_are():
    (task,) = of_kind("cancel", 1)
    env = make("retail", dialogue=True)
    messages, _ = await reset_env(env, task, seed=0)
    assert messages[-1] == {"role": "user", "content": task.data["request"]}
    assert task.data["identity"] not in messages[-1]["content"]
    first = await step_env(env, says("Gladly. What is your e-mail address, please?"))
    assert first.observation == [{"role": "user", "content": task.data["identity"]}]
    assert (first.reward, first.terminated, first.truncated) == (0.0, False, False)
    answer = await step_env(env, says("Shall I go on?"))
    assert task.data["request"] in answer.observation[0]["content"]
    await step_env(env, calls(("find_user_by_email", {"email": _email(env)})))
    for action in task.data["actions"]:
        await step_env(env, calls((action["name"], action["arguments"])))
    end = await step_env(env, says(f"It is done. {' '.join(task.data['facts'])}"))
    assert (end.reward, end.terminated) == (1.0, True)
    with pytest.raises(EnvError, match="is over: call reset"):
        await step_env(env, says("Anything else?"))
    await close_env(env)


async def test_a_customer_who_is_asked_again_and_again_goes():
    env = make("retail", dialogue=True)
    await reset_env(env, None, seed=0)
    ends = [(await step_env(env, says("What?"))).terminated for _ in range(5)]
    assert ends == [False, False, False, False, True]
    with pytest.raises(TaskError, match=r"data\['identity'\].*dialogue"):
        await reset_env(env, Task("t", "p", {**task_from_seed(1).data, "identity": None}), seed=0)
    await close_env(env)


# The environment as such.


async def test_equal_seeds_give_equal_episodes_and_shops_do_not_leak_into_each_other():
    one, other = make("retail"), make("retail")
    assert await reset_env(one, None, seed=4) == await reset_env(other, None, seed=4)
    assert one.desk.store.digest() == other.desk.store.digest()
    await play_solution(one)
    await reset_env(one, None, seed=4)
    assert one.desk.store.digest() == other.desk.store.digest()
    for env in (one, other):
        await close_env(env)


async def test_episodes_leave_no_connection_behind():
    def connections():
        gc.collect()
        return sum(type(tracked) is sqlite3.Connection for tracked in gc.get_objects())

    task = task_from_seed(9)
    open_before = connections()
    env = make("retail")
    for _ in range(20):
        await reset_env(env, task, seed=0)
    last_store = env.desk.store
    await close_env(env)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        last_store.rows("SELECT 1")
    for _ in range(20):
        env = make("retail")
        await reset_env(env, task, seed=0)
        await close_env(env)
    del env, last_store
    assert connections() == open_before


async def test_it_passes_the_doctor_as_a_dialogue_too():
    report = await check_env(lambda: make("retail", dialogue=True), tasks=of_kind("multi", 1) + of_kind("question", 1))
    assert report.ok, str(report)


async def test_a_dialogue_is_one_conversation_of_the_recorder():
    (task,) = of_kind("return", 1)
    env = make("retail", dialogue=True)
    await reset_env(env, task, seed=0)
    solution = [message for message, _ in await play_solution(env)]
    await close_env(env)
    script = ["Who are you? Please tell me your e-mail address.", *solution]
    renderer = ToyRenderer()
    config = RolloutConfig(env=SpecConfig(name="retail", config={"dialogue": True}))
    runner = EpisodeRunner(config, ScriptedClient(renderer, script), renderer, context_length=100_000)
    outcome = await runner.run(EpisodeSpec(task, "g"))
    (trajectory,) = outcome.trajectories
    assert (outcome.error, trajectory.reward, trajectory.stop_reason) == (None, 1.0, "completed")
    assert [segment.kind for segment in trajectory.segments] == ["context", "sampled"] * len(script)
    (answer,) = trajectory.segments[2].messages
    assert answer == {"role": "user", "content": task.data["identity"]}
    assert trajectory.metrics["tool_errors"] == 0
