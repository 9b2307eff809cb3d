"""The retail environment: its shop, its tools, its tasks, and that only the right end is worth anything."""

from __future__ import annotations

import gc
import json
import sqlite3
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.chat.toy_renderer import ToyRenderer
from support.envs.tau_shop import write_tau_shop
from support.property_tests import examples
from turnwise.envs import close_env, make, play_solution, reset_env, schemas, score_env, step_env
from turnwise.errors import EnvError, TaskError, ToolError
from turnwise.ext.checks.environment import check_env
from turnwise.ext.checks.replay import replay
from turnwise.ext.environments.retail.changes import CHANGES, Changes
from turnwise.ext.environments.retail.desk import Desk, dollars
from turnwise.ext.environments.retail.goal import LONGEST_ANSWER, goal_of, states_facts
from turnwise.ext.environments.retail.store import COMPARED, Store
from turnwise.ext.environments.retail.tau_bench import read_shop
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
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


_FILES = TemporaryDirectory()
_SHOP = str(write_tau_shop(Path(_FILES.name)))
_ROWS = read_shop(_SHOP)


def shop_world():
    """The records of the shop by their ids, with the items of an order and how it was paid."""
    store = Store(_ROWS)
    world = SimpleNamespace()
    for table, key in (
        ("users", "user_id"),
        ("payment_methods", "payment_id"),
        ("variants", "item_id"),
        ("orders", "order_id"),
    ):
        rows = store.rows(f"SELECT {key} AS id, * FROM {table} ORDER BY rowid")
        setattr(world, table, {row["id"]: SimpleNamespace(**row) for row in rows})
    for order in world.orders.values():
        items = store.rows("SELECT item_id FROM order_items WHERE order_id = ? ORDER BY rowid", order.id)
        order.items = [row["item_id"] for row in items]
        [order.payment] = store.row("SELECT payment_id FROM payments WHERE order_id = ?", order.id)
    store.close()
    return world


def changes_of(store, customer):
    changes = Changes()
    changes.desk = Desk(store, customer)
    return changes


_WORLD = shop_world()
_CUSTOMER = "customer_1"
_OWN = [order for order in _WORLD.orders.values() if order.user_id == _CUSTOMER]
_PENDING = [order for order in _OWN if order.status == "pending"]
_DELIVERED = [order for order in _OWN if order.status == "delivered"]
_ADDRESS = {"street": "7 Oak Street", "city": "Eastport", "state": "ME", "zip_code": "04631"}


def variants_of(product):
    return [variant for variant in _WORLD.variants.values() if variant.product_id == product]


def dearest_variants(items):
    """The most expensive available variant of each item's product that is not the item."""
    options = [
        [other for other in variants_of(_WORLD.variants[item].product_id) if other.id != item and other.stock]
        for item in items
    ]
    return [max(variants, key=lambda variant: variant.price) for variants in options]


def order_action(name, order, **arguments):
    return {"name": name, "arguments": {"order_id": order.id, **arguments}}


def new_item_ids(order):
    return [variant.id for variant in dearest_variants(order.items)]


_CANCEL = order_action("cancel_order", _PENDING[0], reason="no longer needed")
_RETURN = order_action("return_items", _DELIVERED[0], item_ids=list(_DELIVERED[0].items), payment_id="gift_card_1")
_REFUND = dollars(sum(_WORLD.variants[item].price for item in _PENDING[0].items))
_TRANSFER = {"name": "transfer_to_human", "arguments": {"topic": "courier"}}
_REQUESTS = {
    "cancel": ([_CANCEL], [_REFUND]),
    "return": ([_RETURN], []),
    "exchange": (
        [
            order_action(
                "exchange_items",
                _DELIVERED[1],
                item_ids=list(_DELIVERED[1].items),
                new_item_ids=new_item_ids(_DELIVERED[1]),
                payment_id="paypal_1",
            )
        ],
        [],
    ),
    "items": (
        [
            order_action(
                "change_order_items",
                _PENDING[1],
                item_ids=list(_PENDING[1].items),
                new_item_ids=new_item_ids(_PENDING[1]),
                payment_id="gift_card_1",
            )
        ],
        [],
    ),
    "address": (
        [
            order_action("change_order_address", _PENDING[2], **_ADDRESS),
            {"name": "change_user_address", "arguments": {"user_id": _CUSTOMER, **_ADDRESS}},
        ],
        [],
    ),
    "payment": ([order_action("change_order_payment", _PENDING[1], payment_id="credit_card_1")], []),
    "question": ([], ["$47.00"]),
    "refuse": ([order_action("decline_request", _PENDING[0], reason="reason_not_accepted")], []),
    "transfer": ([_TRANSFER], []),
    "multi": ([_CANCEL, _RETURN, _TRANSFER], [_REFUND]),
}
"""Requests of one customer: the changes that answer each, and the facts to be stated."""


def task_of(kind):
    actions, facts = _REQUESTS[kind]
    identity, request = "My name is Boris Berg, zip code 18501.", f"Please help me with this: {kind}."
    data = {"identity": identity, "request": request, "actions": actions, "facts": facts}
    return Task(f"retail-{kind}", f"{identity} {request}", {"world": _SHOP, "customer": _CUSTOMER, **data})


# Tasks.


@pytest.mark.parametrize("kind", _REQUESTS)
async def test_the_solution_scores_1_and_without_its_last_step_0(kind):
    task = task_of(kind)
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
    for kind in _REQUESTS:
        task = task_of(kind)
        env = await started_env(task)
        for text in ("", task.prompt, "Done.", "$1.00 " * 50):
            assert await score_env(env, says(text)) == {"score": 0.0}
        assert await score_env(env, None) == {"score": 0.0}
        played = await play_solution(env)
        if kind in ("transfer", "multi"):  # nothing can be changed after a transfer
            continue
        await reset_env(env, task, seed=0)
        for message, _ in played[:-1]:
            await step_env(env, message)
        order = _OWN[-1].id
        extra = [
            ("decline_request", {"order_id": order, "reason": reason})
            for reason in ("different_product", "out_of_stock")
        ]
        await step_env(env, calls(*extra))
        assert (await step_env(env, played[-1][0])).reward == 0.0
        assert env.differences() == ["declined"]


async def test_white_space_and_case_of_an_address_do_not_count():
    task = task_of("address")
    env = await started_env(task)
    await step_env(env, calls(("find_user_by_email", {"email": _email(env)})))
    for action in task.data["actions"]:
        arguments = {
            key: value if key.endswith("_id") else f" {value.upper()} " for key, value in action["arguments"].items()
        }
        await step_env(env, calls((action["name"], arguments)))
    assert (await step_env(env, says("Done."))).reward == 1.0


def _email(env):
    return _WORLD.users[env.goal.customer].email


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
    assert states_facts("Of 12 variants 10 are left, from $46.66 on.", ["10"])
    assert not states_facts(" ".join(map(str, range(100))), ["10"])
    assert states_facts("anything", [])
    assert not states_facts("", ["$3"])


def test_a_long_answer_is_not_searched():
    # What looks for amounts takes time in the square of such a text: 20 s of processor time for this one.
    started = time.process_time()
    assert not states_facts("1," * 20_000, ["$3"])
    assert time.process_time() - started < 2


async def test_an_answer_that_lists_all_prices_scores_0():
    env = await started_env(task_of("question"))
    prices = [row["price"] for row in env.desk.store.rows("SELECT DISTINCT price FROM variants ORDER BY price")]
    nearest = [price for price in prices if price >= 47_00][:6]
    assert env.score(says(f"It is one of {', '.join(map(dollars, nearest))}.")) == 0.0
    assert env.score(says(f"It is {dollars(nearest[0])}.")) == 1.0
    await close_env(env)


# Tools.


async def test_tools_serve_only_the_identified_customer():
    env = await started_env(task_of("cancel"))
    world = _WORLD
    customer = world.users[env.goal.customer]
    other = next(user for user in world.users.values() if user.id != customer.id)
    other_order = next(order.id for order in world.orders.values() if order.user_id == other.id)

    async def answer(name, **arguments):
        (message,) = (await step_env(env, calls((name, arguments)))).observation
        return message["content"]

    assert "no customer has been identified" in await answer("get_user", user_id=customer.id)
    assert "no customer has been identified" in await answer("transfer_to_human", topic="courier")
    assert "there is no customer" in await answer("find_user_by_email", email="nobody@example.com")
    wrong = {"first_name": customer.first_name, "last_name": customer.last_name, "zip_code": "00000"}
    assert "there is no customer" in await answer("find_user_by_name", **wrong)
    right = {**wrong, "zip_code": customer.zip, "first_name": customer.first_name.upper()}
    assert await answer("find_user_by_name", **right) == customer.id
    assert "another customer" in await answer("find_user_by_email", email=other.email)
    assert "not the customer" in await answer("get_user", user_id=other.id)
    assert "belongs to another customer" in await answer("get_order", order_id=other_order)
    assert "belongs to another customer" in await answer(
        "decline_request", order_id=other_order, reason="different_product"
    )
    assert "there is no order" in await answer("get_order", order_id="W1")
    view = json.loads(await answer("get_user", user_id=customer.id))
    assert view["orders"] == sorted(order.id for order in world.orders.values() if order.user_id == customer.id)
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
    (system, _user), _ = await reset_env(env, task_of("cancel"), seed=1)
    words = (*reasons, *tools["transfer_to_human"].parameters["properties"]["topic"]["enum"])
    assert [word for word in words if word not in system["content"]] == []


async def test_after_a_transfer_nothing_can_be_changed():
    task = task_of("transfer")
    env = await started_env(task)
    await step_env(env, calls(("find_user_by_email", {"email": _email(env)})))
    await step_env(env, calls(("transfer_to_human", task.data["actions"][0]["arguments"])))
    digest = env.desk.store.digest()
    order = _OWN[-1].id
    for call in (
        ("decline_request", {"order_id": order, "reason": "different_product"}),
        ("cancel_order", {"order_id": order, "reason": "no longer needed"}),
        ("transfer_to_human", {"topic": "courier"}),
    ):
        (message,) = (await step_env(env, calls(call))).observation
        assert "was transferred" in message["content"]
    assert env.desk.store.digest() == digest


def test_reading_cannot_change_the_shop():
    store = Store(_ROWS)
    for sql in ("DELETE FROM orders", "UPDATE variants SET stock = 0", "DROP TABLE users", "CREATE TABLE t (x)"):
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.rows(sql)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.write(sql)
    store.close()
    store.close()


def test_a_failed_change_is_rolled_back():
    store = Store(_ROWS)
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

_ORDER_IDS = [
    *(order.id for order in _OWN),
    next(order.id for order in _WORLD.orders.values() if order.user_id != _CUSTOMER),
]
_ITEMS = [item for order in _OWN for item in order.items]
_PAYMENTS = [method.id for method in _WORLD.payment_methods.values() if method.user_id == _CUSTOMER] + ["card_0"]


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
    products = [_WORLD.variants[item].product_id for item in _WORLD.orders[order].items]
    near = {product: [variant.id for variant in variants_of(product)] for product in products}
    # What an order held at first, mostly; it may hold another variant of the product by now.
    picked = draw_from(st.lists(st.sampled_from(products), min_size=1, max_size=2))
    item_of = dict(zip(products, _WORLD.orders[order].items, strict=True))
    items = [draw_from(st.sampled_from([item_of[product]] * 4 + near[product])) for product in picked]
    new = [draw_from(st.sampled_from(near[product])) for product in picked]
    zip_code = draw_from(st.sampled_from(["18510", " "]))
    address = {"street": "1 Elm Street", "city": "Dunmore", "state": "PA", "zip_code": zip_code}
    reason = draw_from(st.sampled_from(["different_product", "out_of_stock"]))
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
    store = Store(_ROWS)
    try:
        changes = changes_of(store, _CUSTOMER)
        holdings, lines, statuses = _holdings(store), _lines(store), _statuses(store)
        for name, arguments in sequence:
            digest = store.digest()
            try:
                CHANGES[name](changes, **arguments)
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
        assert row["balance"] == _WORLD.payment_methods[row["payment_id"]].balance - by_card[row["payment_id"]]


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
    store = Store(_ROWS)
    changes = changes_of(store, _CUSTOMER)
    card = next(
        method
        for method in _WORLD.payment_methods.values()
        if method.user_id == _CUSTOMER and method.kind == "gift_card"
    )
    order, old, new = next(
        (order, _WORLD.variants[item], other)
        for order in _OWN
        if order.status == "pending"
        for item in order.items
        for other in variants_of(_WORLD.variants[item].product_id)
        if other.stock > 0 and other.price < _WORLD.variants[item].price
    )
    CHANGES["change_order_items"](changes, order.id, [old.id], [new.id], card.id)
    with pytest.raises(ToolError, match="only once"):
        CHANGES["change_order_items"](changes, order.id, [new.id], [old.id], card.id)
    total = sum(_WORLD.variants[item].price for item in order.items)
    back = CHANGES["cancel_order"](changes, order.id, "no longer needed")["refunded"]
    assert back == {order.payment: dollars(total - old.price + new.price)}
    _check_money(store)
    with pytest.raises(ToolError, match="is cancelled"):
        CHANGES["cancel_order"](changes, order.id, "no longer needed")
    store.close()


def test_gift_card_pays_an_exchange_only_if_its_balance_covers_the_sum():
    seen = Counter()
    for card in (method for method in _WORLD.payment_methods.values() if method.kind == "gift_card"):
        for order in _WORLD.orders.values():
            if order.user_id != card.user_id or order.status != "delivered":
                continue
            old = [_WORLD.variants[item] for item in order.items]
            new = dearest_variants(order.items)
            due = sum(variant.price for variant in new) - sum(variant.price for variant in old)
            store = Store(_ROWS)
            try:
                ids = [variant.id for variant in old], [variant.id for variant in new]
                CHANGES["exchange_items"](changes_of(store, card.user_id), order.id, *ids, card.id)
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
    store = Store(_ROWS)
    changes = changes_of(store, _CUSTOMER)
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
            [next(variant.id for variant in _WORLD.variants.values() if variant.product_id != item.product_id)],
            "exchanged for",
        ),
        (["i1"], ["i1"], "has no item 'i1'"),
    ):
        with pytest.raises(ToolError, match=words):
            CHANGES["exchange_items"](changes, order.id, items, new, order.payment)
    sold_out = [variant for variant in _WORLD.variants.values() if variant.stock == 0]
    combinations = [(o, i, v) for o in _OWN if o.status == "delivered" for i in o.items for v in sold_out]
    for delivered, bought, variant in combinations:
        if _WORLD.variants[bought].product_id == variant.product_id and bought != variant.id:
            with pytest.raises(ToolError, match="out of stock"):
                CHANGES["exchange_items"](changes, delivered.id, [bought], [variant.id], delivered.payment)
    CHANGES["return_items"](changes, order.id, [item.id], order.payment)
    with pytest.raises(ToolError, match="is returned already"):
        CHANGES["return_items"](changes, order.id, [item.id], order.payment)
    _check_money(store)
    store.close()


def test_every_change_is_asked_for_by_some_task():
    assert {action["name"] for actions, _ in _REQUESTS.values() for action in actions} == set(CHANGES)


def test_the_order_of_independent_changes_does_not_count():
    seen = set()
    for turn in (1, -1):
        store = Store(_ROWS)
        changes = changes_of(store, _CUSTOMER)
        for order in [candidate for candidate in _OWN if candidate.status == "pending"][::turn]:
            CHANGES["cancel_order"](changes, order.id, "no longer needed")
            CHANGES["decline_request"](changes, order.id, "different_product")
        seen.add(json.dumps(store.digest()))
        store.close()
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["return", "exchange"])
async def test_items_handled_in_separate_calls_reach_the_goal(kind):
    env = await started_env(task_of(kind))
    await step_env(env, calls(("find_user_by_email", {"email": _email(env)})))
    ((name, arguments),) = env.goal.actions
    assert len(arguments["item_ids"]) == 2
    for number, item in enumerate(arguments["item_ids"]):
        one = {**arguments, "item_ids": [item]}
        if "new_item_ids" in arguments:
            one["new_item_ids"] = [arguments["new_item_ids"][number]]
        await step_env(env, calls((name, one)))
    assert env.differences() == []
    await close_env(env)


# Bad tasks.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world": "x"}, r"data\['world'\] is 'x'.*retail/data"),
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
    task = task_of("cancel")
    env = make("retail")
    with pytest.raises(TaskError, match=words):
        await reset_env(env, Task("t", "p", {**task.data, **change}), seed=0)
    await close_env(env)


async def test_reset_without_a_task_names_the_row_format():
    env = make("retail")
    with pytest.raises(EnvError, match=r"got no task.*tau-retail"):
        await reset_env(env, None, seed=0)
    await close_env(env)


def test_goals_are_computed_once_for_a_group():
    task = task_of("return")
    assert goal_of(task).digest is goal_of(task).digest
    assert set(goal_of(task).digest) == set(COMPARED)


# Dialogue.


async def test_in_a_dialogue_the_customer_is_asked_who_they_are():
    task = task_of("cancel")
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
    with pytest.raises(EnvError, match="call reset"):
        await step_env(env, says("Anything else?"))
    await close_env(env)


async def test_a_customer_who_is_asked_again_and_again_goes():
    env = make("retail", dialogue=True)
    await reset_env(env, task_of("cancel"), seed=0)
    ends = [(await step_env(env, says("What?"))).terminated for _ in range(5)]
    assert ends == [False, False, False, False, True]
    with pytest.raises(TaskError, match=r"data\['identity'\].*dialogue"):
        await reset_env(env, Task("t", "p", {**task_of("cancel").data, "identity": None}), seed=0)
    await close_env(env)


# The environment as such.


async def test_equal_tasks_give_equal_episodes_and_shops_do_not_leak_into_each_other():
    one, other = make("retail"), make("retail")
    task = task_of("multi")
    assert await reset_env(one, task, seed=4) == await reset_env(other, task, seed=4)
    assert one.desk.store.digest() == other.desk.store.digest()
    await play_solution(one)
    await reset_env(one, task, seed=4)
    assert one.desk.store.digest() == other.desk.store.digest()
    for env in (one, other):
        await close_env(env)


async def test_episodes_leave_no_connection_behind():
    def connections():
        gc.collect()
        return sum(type(tracked) is sqlite3.Connection for tracked in gc.get_objects())

    task = task_of("cancel")
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


@pytest.mark.usefixtures("settled_objects")
@pytest.mark.parametrize("dialogue", [False, True])
async def test_retail_passes_the_checker(dialogue):
    tasks = [task_of("multi"), task_of("question")]
    report = await check_env(lambda: make("retail", dialogue=dialogue), task=tasks[0], tasks=tasks)
    assert report.ok, str(report)


async def test_a_replay_diverges_nowhere():
    renderer = renderer_for("qwen3")
    config = RolloutConfig(env=SpecConfig(name="retail"), max_turns=8)
    rows = {task.id: task for task in (task_of("multi"), task_of("question"))}
    recorded = []
    for task in rows.values():
        env = await started_env(task)
        script = [message for message, _ in await play_solution(env)]
        client = ScriptedClient(renderer, script, tools=schemas(env))
        await close_env(env)
        runner = EpisodeRunner(config, client, renderer, context_length=100_000)
        outcome = await runner.run(EpisodeSpec(task, f"0-val-{task.id}-e0", partition="val"))
        assert outcome.error is None
        recorded += outcome.trajectories
    report = await replay(recorded, rows, config, renderer)
    assert [str(divergence) for divergence in report.divergences] == []
    assert report.episodes == 2


async def test_dialogue_is_recorded_as_one_branch():
    task = task_of("return")
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
