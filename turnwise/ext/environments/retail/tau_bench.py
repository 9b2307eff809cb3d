"""The retail domain of tau-bench: its shop, and its tasks as requests to this environment's desk."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from turnwise.errors import TaskError, shown
from turnwise.ext.environments.retail.store import Shop

_IN_STOCK: Final = 100
"""Stock of an available variant, whose number tau-bench does not state."""
_STATUS: Final = {"processed": "shipped"}
_READS: Final = frozenset(
    (
        "calculate",
        "find_user_id_by_email",
        "find_user_id_by_name_zip",
        "get_order_details",
        "get_product_details",
        "get_user_details",
        "list_all_product_types",
        "think",
    )
)
_PAYMENT: Final = {"payment_method_id": "payment_id"}
_ADDRESS: Final = {"address1": "street", "zip": "zip_code", "address2": None, "country": None}
_CHANGES: Final[dict[str, tuple[str, Mapping[str, str | None]]]] = {
    "cancel_pending_order": ("cancel_order", {}),
    "exchange_delivered_order_items": ("exchange_items", _PAYMENT),
    "modify_pending_order_address": ("change_order_address", _ADDRESS),
    "modify_pending_order_items": ("change_order_items", _PAYMENT),
    "modify_pending_order_payment": ("change_order_payment", _PAYMENT),
    "modify_user_address": ("change_user_address", _ADDRESS),
    "return_delivered_order_items": ("return_items", _PAYMENT),
}
"""Tools of tau-bench: their names here, and renamed arguments (None: dropped)."""


def rows(path: str) -> Iterator[dict[str, Any] | None]:
    """Yield the tasks of ``tau_bench/envs/retail``, None for one without a counterpart here.

    Left out: tasks that end with a transfer to a human (its summary has no counterpart here), and tasks without
    changes and outputs.

    Args:
        path: That folder, with ``:train``, ``:dev`` or ``:test`` (the default): the list in ``tasks_test.py``; its
            shop is in ``data/``.

    Raises:
        TaskError: A file is missing or malformed.
    """
    folder, _, split = path.partition(":") if not Path(path).is_dir() else (path, "", "")
    retail_folder = Path(folder).expanduser().absolute()
    file = retail_folder / f"tasks_{split or 'test'}.py"
    for number, task in enumerate(_task_literals(file)):
        changes = [action for action in task.get("actions") or () if action.get("name") not in _READS]
        playable = all(action.get("name") in _CHANGES for action in changes) and (changes or task.get("outputs"))
        record = {"id": f"tau-retail-{split or 'test'}-{number}", "world": str(retail_folder / "data"), **task}
        yield record if playable else None


def row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task columns of a row: the target of ``format: tau-retail``.

    Args:
        record: ``user_id``, ``instruction`` (what the customer knows and wants), ``actions`` (``name`` and ``kwargs``),
            ``outputs`` (texts to be said) and ``world``, the folder of the shop.
    """
    world, user = record.get("world"), record["user_id"]
    if not isinstance(world, str):
        raise TaskError(f"column 'world' is {shown(world)}: it must be tau-bench's folder retail/data, with the shop")
    customer = next((row for row in read_shop(world)["users"] if row[0] == user), None)
    if customer is None:
        raise TaskError(f"column 'user_id' is {shown(user)}, whom the shop {world} does not know")
    request = f"What I know and want, as it was told to me:\n\n{record['instruction']}"
    _, first_name, last_name, *_, zip_code = customer
    identity = f"My name is {first_name} {last_name}, zip code {zip_code}."
    actions = [_action(action) for action in record["actions"] if action.get("name") not in _READS]
    return {
        "id": record.get("id"),
        "prompt": f"{identity} {request}",
        "data": {
            "world": world,
            "customer": user,
            "identity": identity,
            "request": request,
            "actions": actions,
            "facts": [str(text) for text in record["outputs"]],
        },
    }


def _action(value: Any) -> dict[str, Any]:
    name = value.get("name") if isinstance(value, Mapping) else None
    arguments = (value.get("kwargs") or value.get("arguments") or {}) if isinstance(value, Mapping) else None
    if name not in _CHANGES or not isinstance(arguments, Mapping):
        raise TaskError(f"column 'actions' has {shown(value)}: it must be a tool of tau-bench's, with name and kwargs")
    ours, renamed = _CHANGES[name]
    renamed_arguments = {renamed.get(key, key): argument for key, argument in arguments.items()}
    if "street" in renamed_arguments and arguments.get("address2"):
        renamed_arguments["street"] = f"{arguments['address1']}, {arguments['address2']}"
    return {
        "name": ours,
        "arguments": {key: argument for key, argument in renamed_arguments.items() if key is not None},
    }


def _task_literals(file: Path) -> list[dict[str, Any]]:
    """Return the list of tasks of a Python file, which is parsed and not run."""
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise TaskError(f"{file}: cannot be read as a list of tau-bench's tasks: {error}") from error
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)]
    if len(lists) != 1:
        raise TaskError(f"{file}: there are {len(lists)} lists of tasks; tau-bench has one, of Task(...)")
    return [_literal(element, file) for element in lists[0].elts]


def _literal(node: ast.expr, file: Path) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Task", "Action"):
        return {keyword.arg: _literal(keyword.value, file) for keyword in node.keywords if keyword.arg is not None}
    if isinstance(node, ast.List):
        return [_literal(element, file) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise TaskError(f"{file}:{node.lineno}: {ast.unparse(node)[:80]} is no literal") from error


@functools.lru_cache(maxsize=4)
def read_shop(folder: str) -> Shop:
    """Return the shop in a folder with ``users.json``, ``products.json`` and ``orders.json``. Raises TaskError."""
    tables = ("users", "payment_methods", "products", "variants", "orders", "order_items", "payments")
    shop: dict[str, list[tuple[Any, ...]]] = {table: [] for table in tables}
    for name, rows_of in (("users", _user_rows), ("products", _product_rows), ("orders", _order_rows)):
        file = Path(folder) / f"{name}.json"
        for key, record in _json(file).items():
            try:
                for table, row in rows_of(key, record):
                    shop[table].append(row)
            except (KeyError, TypeError) as error:
                raise TaskError(f"{file}: {key} has no {error}") from error
    return shop


def _json(file: Path) -> dict[str, Any]:
    try:
        records = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise TaskError(f"{file}: cannot be read as a part of tau-bench's shop: {error}") from error
    if not isinstance(records, dict):
        raise TaskError(f"{file}: it holds {shown(records)}: tau-bench has an object by ids there")
    return records


_TableRows = Iterator[tuple[str, tuple[Any, ...]]]


def _user_rows(user: str, record: Any) -> _TableRows:
    name = record["name"]
    address = _address(record["address"])
    yield "users", (user, name["first_name"], name["last_name"], record["email"].lower(), *address)
    for payment, method in record["payment_methods"].items():
        balance = _cents(method.get("balance", 0)) if method["source"] == "gift_card" else None
        yield "payment_methods", (payment, user, method["source"], method.get("last_four"), balance)


def _product_rows(product: str, record: Any) -> _TableRows:
    yield "products", (product, record["name"])
    for item, variant in record["variants"].items():
        options = {str(key): str(value) for key, value in variant["options"].items()}
        stock = _IN_STOCK if variant["available"] else 0
        yield "variants", (item, product, json.dumps(options), _cents(variant["price"]), stock)


def _order_rows(name: str, record: Any) -> _TableRows:
    paid = [payment for payment in record["payment_history"] if payment["transaction_type"] == "payment"]
    if not paid:
        return
    order = name.removeprefix("#")
    status = str(record["status"]).partition(" ")[0]
    address = _address(record["address"])
    yield "orders", (order, record["user_id"], _STATUS.get(status, status), *address, None, 0)
    prices = [_cents(item["price"]) for item in record["items"]]
    for item, price in zip(record["items"], prices, strict=True):
        yield "order_items", (order, item["item_id"], price, "ordered", None, None)
    yield "payments", (order, paid[0]["payment_method_id"], "payment", sum(prices))


def _address(record: Mapping[str, Any]) -> tuple[str, str, str, str]:
    street = ", ".join(part for part in (record["address1"], record.get("address2")) if part)
    return street, record["city"], record["state"], record["zip"]


def _cents(amount: float) -> int:
    return round(100 * amount)
