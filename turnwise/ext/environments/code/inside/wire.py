"""Values and calls between the process of the tests and the process of a solution."""

from __future__ import annotations

import builtins
import collections
import decimal
import fractions
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_EXACT = 2**53


class Remote:
    """Proxy of an object of the other process: supports calls and element access, compares by identity.

    Without ``__contains__``, which would be told the right answer: its elements are compared on this side.
    """

    def __init__(self, peer: Any, number: Any) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def _do(self, op: str, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask(op, {"p": self._number}, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - a call of the remote object
        return self._do("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._do("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("setitem", key, value)

    def __len__(self) -> int:
        return int(self._do("len"))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        iterator = self._do("iter")
        while True:
            try:
                yield iterator._do("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._do("next")

    def __str__(self) -> str:
        return str(self._do("str"))


class RemoteError(Exception):
    """An exception of the other side whose class is no built-in."""


def encode(value: Any, export: Callable[[Any], Any] | None = None) -> Any:
    """Return a value in its plain form.

    Args:
        value: Anything.
        export: Returns the stand-in of a value without plain form; None raises TypeError for it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = int(value)
        return value if -_EXACT < value < _EXACT else {"i": hex(value)}
    if isinstance(value, float):
        value = float(value)
        return value if value - value == 0 else {"f": repr(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(element, export) for element in list.__iter__(value)]
    for tag, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {tag: [encode(element, export) for element in kind.__iter__(value)]}
    if isinstance(value, dict):
        pairs = list(dict.items(value))
        return {"d": [[encode(key, export), encode(element, export)] for key, element in pairs]}
    return _encode_rare(value, export)


def _encode_rare(value: Any, export: Callable[[Any], Any] | None) -> Any:
    for tag, (kind, to_plain, _) in _RARE.items():
        if isinstance(value, kind):
            return {tag: to_plain(value)}
    if type(value).__module__ == "numpy":
        if type(value).__name__ == "ndarray":
            return {"n": [str(value.dtype), encode(value.tolist())]}
        if "item" in dir(value):
            return encode(value.item())
    if export is None:
        raise TypeError(f"a value of type {type(value).__name__} cannot leave its process")
    return export(value)


def decode(form: Any, stand_in: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value of a plain form.

    Args:
        form: Parsed JSON.
        stand_in: Resolves a reference: ``o`` (of the other side) or ``p`` (of this one) and its number; None refuses
            it, and every kind that JSON has no value for: the calling process would compute with what it is sent.

    Raises:
        ValueError: The form is malformed.
    """
    if form is None or isinstance(form, (bool, int, float, str)):
        return form
    if isinstance(form, list):
        return [decode(element, stand_in) for element in form]
    if not isinstance(form, dict) or len(form) != 1:
        raise ValueError("invalid encoded value")
    [(tag, content)] = form.items()
    if tag in ("o", "p"):
        if stand_in is None:
            raise ValueError("a reference to a remote object cannot be decoded here")
        return stand_in(tag, content)
    if stand_in is None and tag not in _PLAIN:
        raise ValueError(f"a value of kind {tag!r} equals none of JSON")
    if tag == "d" and stand_in is None:
        # Names, as in JSON: whole numbers of one hash would take time as the square of their count.
        return {str(decode(key)): decode(element) for key, element in content}
    if tag == "d":
        return {decode(key, stand_in): decode(element, stand_in) for key, element in content}
    if tag == "n":
        return _array(content, stand_in)
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([decode(element, stand_in) for element in content])
    if tag not in _RARE and tag not in ("i", "f"):
        raise ValueError(f"unknown kind of value {tag!r}")
    if tag == "i":
        return int(content, 16)
    return float(content) if tag == "f" else _RARE[tag][2](content)


def _array(content: Any, stand_in: Callable[[str, Any], Any] | None) -> Any:
    """Return an array for a peer; a comparison of plain values takes the list."""
    try:
        import numpy
    except ImportError:
        return decode(content[1], stand_in)
    elements = decode(content[1], stand_in)
    return elements if stand_in is None else numpy.array(elements, dtype=str(content[0]))


_PLAIN = ("t", "d", "n", "i", "f")
_CONTAINERS: dict[str, Any] = {"t": tuple, "s": set, "z": frozenset, "q": collections.deque}
_RARE: dict[str, Any] = {
    "c": (complex, lambda value: [encode(value.real), encode(value.imag)], lambda parts: complex(*map(decode, parts))),
    "b": (bytes, bytes.hex, bytes.fromhex),
    "B": (bytearray, bytearray.hex, bytearray.fromhex),
    "D": (decimal.Decimal, str, decimal.Decimal),
    "F": (
        fractions.Fraction,
        lambda value: [encode(value.numerator), encode(value.denominator)],
        lambda parts: fractions.Fraction(*map(decode, parts)),
    ),
    "r": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
}
"""Kinds of values by the tags of their plain forms; of rare ones the functions to the plain form and back."""


class Peer:
    """One of two processes that call each other, one call at a time; a call may call back.

    Args:
        receive: Returns the next message of the other side; raises EOFError at the end.
        send: Sends a message.
        guard: Raises PermissionError for what the other side may not do to an object of this side.
    """

    def __init__(
        self, receive: Callable[[], Any], send: Callable[[Any], None], guard: Callable[[str, Any, Any], None]
    ) -> None:
        self._receive = receive
        self._send = send
        self._guard = guard
        self._exported: list[Any] = []
        self.names: dict[str, Any] = {}

    def ask(self, op: str, target: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform an operation on the other side and return its result; raises what it raises."""
        args = list(args)
        sent = [self._encode(argument) for argument in args]
        named = {key: self._encode(argument) for key, argument in (kwargs or {}).items()}
        self._send({"do": op, "on": target, "args": sent, "kwargs": named})
        answer = self.serve(until_reply=True)
        if "err" in answer:
            error = _exception_of(answer["err"])
            if op != "next" and isinstance(error, (StopIteration, StopAsyncIteration)):
                # Raised by anything but an iterator it would end a loop of the tests: all(map(f, values)) is then true.
                raise RuntimeError(f"{op} raised {type(error).__name__}")
            raise error
        changed = answer.get("args")
        for number, form in enumerate(changed if isinstance(changed, list) else []):
            if form is not None and number < len(args):
                _update_in_place(args[number], self._decode(form))
        return self._decode(answer.get("ok"))

    def serve(self, *, until_reply: bool = False) -> Any:
        """Answer requests until the other side ends or, with ``until_reply``, until a reply arrives."""
        while True:
            message = self._receive()
            if isinstance(message, dict) and "do" in message:
                self._send(self._answer(message))
            elif until_reply and isinstance(message, dict):
                return message

    def _answer(self, message: Any) -> Any:
        try:
            args = [self._decode(argument) for argument in message["args"]]
            kwargs = {str(key): self._decode(argument) for key, argument in message["kwargs"].items()}
            old_forms = [_mutable_form(argument, self._encode) for argument in args]
            result = self._encode(self._perform(str(message["do"]), message["on"], args, kwargs))
            new_forms = [_mutable_form(argument, self._encode) for argument in args]
            changed = [new if new != old_forms[number] else None for number, new in enumerate(new_forms)]
            return {"ok": result, "args": changed if any(form is not None for form in changed) else None}
        except BaseException as error:  # noqa: BLE001 - whatever is raised is sent to the other side
            return {"err": [type(error).__name__, _exception_text(error)]}

    def _perform(self, op: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        owner = self._resolve(target["name"]) if "name" in target else self._exported[target["p"]]
        self._guard(op, owner, args)
        ops: dict[str, Callable[..., Any]] = {
            "call": lambda: owner(*args, **kwargs),
            "getattr": lambda: getattr(owner, str(args[0])),
            "setattr": lambda: setattr(owner, str(args[0]), args[1]),
            "getitem": lambda: owner[args[0]],
            "setitem": lambda: owner.__setitem__(args[0], args[1]),
            "len": lambda: len(owner),
            "iter": lambda: iter(owner),
            "next": lambda: next(owner),
            "str": lambda: str(owner),
        }
        return ops[op]()

    def _resolve(self, name: str) -> Any:
        owner, _, member = name.rpartition(".")
        if (owner or member) not in self.names:
            raise NameError(f"name {owner or member!r} is not defined")
        return getattr(self.names[owner](), member) if owner else self.names[member]

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"p": value._number}
        return encode(value, self._export)

    def _export(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"p": value._number}
        if isinstance(value, types.ModuleType):
            raise TypeError("a module cannot leave its process")
        self._exported.append(value)
        return {"o": len(self._exported) - 1}

    def _decode(self, form: Any) -> Any:
        return decode(form, self._stand_in)

    def _stand_in(self, tag: str, number: Any) -> Any:
        if tag == "o":
            return Remote(self, number)
        return self._resolve(number) if isinstance(number, str) else self._exported[number]


def _mutable_form(value: Any, plain: Callable[[Any], Any]) -> Any:
    """Return the plain form of what can be changed in place; None of what cannot."""
    changeable = isinstance(value, (list, dict, set, bytearray, collections.deque))
    return plain(value) if changeable else None


def _update_in_place(value: Any, new: Any) -> None:
    if isinstance(value, (list, bytearray)) and isinstance(new, (list, bytearray)):
        value[:] = new
    elif isinstance(value, (dict, set, collections.deque)) and isinstance(new, (dict, set, collections.deque)):
        value.clear()
        fill: Any = value.extend if isinstance(value, collections.deque) else value.update
        fill(new)


def _exception_of(details: Any) -> BaseException:
    name, text = (str(part) for part in details)
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            return RemoteError(f"{name}: {text}")
    # SystemExit and the like would end this process as well.
    return RemoteError(f"{name}: {text}")


def _exception_text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # noqa: BLE001 - a solution's exception may raise in its ``__str__``
        return ""


def take_pipes() -> tuple[Callable[[], bytes], int]:
    """Return a line reader of standard input and a descriptor of standard output, and redirect all three streams."""
    read = os.fdopen(os.dup(0), "rb").readline
    write = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    return read, write


def lines_of(read: Callable[[], bytes]) -> Callable[[], Any]:
    """Return a function that reads the next JSON message; it raises EOFError at the end."""

    def receive() -> Any:
        line = read()
        if not line:
            raise EOFError
        return json.loads(line)

    return receive


def raise_limits() -> None:
    """Allow integers of any length and deep recursion, which competition programs expect."""
    unlimited: Any = vars(sys).get("set_int_max_str_digits")  # not in every Python that a sandbox may have
    if unlimited is not None:
        unlimited(0)
    sys.setrecursionlimit(20_000)
