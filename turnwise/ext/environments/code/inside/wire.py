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
    """Something of the other side. It can be called and looked into; it equals nothing but itself."""

    def __init__(self, peer: Any, number: Any) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def _do(self, op: str, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask(op, {"p": self._number}, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - it is called over there
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

    def __contains__(self, item: Any) -> bool:
        return bool(self._do("contains", item))

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
    """What the other side raised and Python has no exception for."""


def encode(value: Any, export: Callable[[Any], Any] | None = None) -> Any:
    """Return a value in its plain form.

    Args:
        value: Anything.
        export: Takes what has no plain form and returns its stand-in; None refuses it with TypeError.
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
    several: list[Any] = [
        (list, None), (tuple, "t"), (set, "s"), (frozenset, "z"), (collections.deque, "q"),
    ]  # fmt: skip
    for kind, tag in several:
        if isinstance(value, kind):
            items = [encode(each, export) for each in kind.__iter__(value)]
            return items if tag is None else {tag: items}
    if isinstance(value, dict):
        pairs = list(dict.items(value))
        return {"d": [[encode(key, export), encode(each, export)] for key, each in pairs]}
    return _encode_rare(value, export)


def _encode_rare(value: Any, export: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, complex):
        return {"c": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b" if isinstance(value, bytes) else "B": bytes(value).hex()}
    if isinstance(value, decimal.Decimal):
        return {"D": str(value)}
    if isinstance(value, fractions.Fraction):
        return {"F": [encode(value.numerator), encode(value.denominator)]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
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
        form: What JSON gave.
        stand_in: Takes ``o`` (of the other side) or ``p`` (of this one) and its number; None refuses them.

    Raises:
        ValueError: It is not such a form.
    """
    if form is None or isinstance(form, (bool, int, float, str)):
        return form
    if isinstance(form, list):
        return [decode(each, stand_in) for each in form]
    if not isinstance(form, dict) or len(form) != 1:
        raise ValueError("invalid encoded value")
    [(tag, held)] = form.items()
    if tag in ("o", "p"):
        if stand_in is None:
            raise ValueError("a reference to a remote object cannot be decoded here")
        return stand_in(tag, held)
    if tag == "d":
        return {decode(key, stand_in): decode(each, stand_in) for key, each in held}
    if tag == "n":
        return _array(held, stand_in)
    if tag in ("t", "s", "z", "q"):
        kinds: dict[str, Any] = {"t": tuple, "s": set, "z": frozenset, "q": collections.deque}
        return kinds[tag]([decode(each, stand_in) for each in held])
    return _decode_rare(tag, held)


def _array(held: Any, stand_in: Callable[[str, Any], Any] | None) -> Any:
    """Return an array where it is used; what only compares plain values takes the list."""
    try:
        import numpy
    except ImportError:
        return decode(held[1])
    return decode(held[1]) if stand_in is None else numpy.array(decode(held[1]), dtype=str(held[0]))


def _decode_rare(tag: str, held: Any) -> Any:
    if tag == "i":
        return int(held, 16)
    if tag == "f":
        return float(held)
    if tag == "c":
        return complex(decode(held[0]), decode(held[1]))
    if tag in ("b", "B"):
        return bytes.fromhex(held) if tag == "b" else bytearray.fromhex(held)
    if tag == "D":
        return decimal.Decimal(held)
    if tag == "F":
        return fractions.Fraction(decode(held[0]), decode(held[1]))
    if tag == "r":
        return range(*held)
    raise ValueError(f"unknown kind of value {tag!r}")


class Peer:
    """One of two sides that call each other, one call at a time, also from within an answer.

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
        """Have the other side do something, and return what comes of it; raises what it raises."""
        args = list(args)
        sent = [self._plain(each) for each in args]
        named = {key: self._plain(each) for key, each in (kwargs or {}).items()}
        self._send({"do": op, "on": target, "args": sent, "kwargs": named})
        reply = self.serve(until_reply=True)
        if "err" in reply:
            raise _error(reply["err"])
        changed = reply.get("args")
        for number, form in enumerate(changed if isinstance(changed, list) else []):
            if form is not None and number < len(args):
                _update(args[number], self._value(form))
        return self._value(reply.get("ok"))

    def serve(self, *, until_reply: bool = False) -> Any:
        """Answer what is asked, until the other side ends, or (where asked so) until a reply comes."""
        while True:
            message = self._receive()
            if isinstance(message, dict) and "do" in message:
                self._send(self._answer(message))
            elif until_reply and isinstance(message, dict):
                return message

    def _answer(self, message: Any) -> Any:
        try:
            args = [self._value(each) for each in message["args"]]
            kwargs = {str(key): self._value(each) for key, each in message["kwargs"].items()}
            before = [_state(each, self._plain) for each in args]
            result = self._plain(self._do(str(message["do"]), message["on"], args, kwargs))
            after = [_state(each, self._plain) for each in args]
            changed = [new if new != before[number] else None for number, new in enumerate(after)]
            return {"ok": result, "args": changed if any(each is not None for each in changed) else None}
        except BaseException as error:  # noqa: BLE001 - whatever is raised is sent to the other side
            return {"err": [type(error).__name__, _said(error)]}

    def _do(self, op: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        found = self._named(target["name"]) if "name" in target else self._exported[target["p"]]
        self._guard(op, found, args)
        ops: dict[str, Callable[..., Any]] = {
            "call": lambda: found(*args, **kwargs),
            "getattr": lambda: getattr(found, str(args[0])),
            "setattr": lambda: setattr(found, str(args[0]), args[1]),
            "getitem": lambda: found[args[0]],
            "setitem": lambda: found.__setitem__(args[0], args[1]),
            "len": lambda: len(found),
            "contains": lambda: args[0] in found,
            "iter": lambda: iter(found),
            "next": lambda: next(found),
            "str": lambda: str(found),
        }
        return ops[op]()

    def _named(self, name: str) -> Any:
        owner, _, member = name.rpartition(".")
        if (owner or member) not in self.names:
            raise NameError(f"name {owner or member!r} is not defined")
        return getattr(self.names[owner](), member) if owner else self.names[member]

    def _plain(self, value: Any) -> Any:
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

    def _value(self, form: Any) -> Any:
        return decode(form, self._stand_in)

    def _stand_in(self, tag: str, number: Any) -> Any:
        if tag == "o":
            return Remote(self, number)
        return self._named(number) if isinstance(number, str) else self._exported[number]


def _state(value: Any, plain: Callable[[Any], Any]) -> Any:
    """Return the plain form of what can be changed in place; None of what cannot."""
    changeable = isinstance(value, (list, dict, set, bytearray, collections.deque))
    return plain(value) if changeable else None


def _update(value: Any, new: Any) -> None:
    if isinstance(value, (list, bytearray)) and isinstance(new, (list, bytearray)):
        value[:] = new
    elif isinstance(value, (dict, set, collections.deque)) and isinstance(new, (dict, set, collections.deque)):
        value.clear()
        fill: Any = value.extend if isinstance(value, collections.deque) else value.update
        fill(new)


def _error(told: Any) -> BaseException:
    name, text = (str(each) for each in told)
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            return RemoteError(f"{name}: {text}")
    # Not SystemExit and the like: what ends the one side must not end the other.
    return RemoteError(f"{name}: {text}")


def _said(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # noqa: BLE001 - an exception of the solution's, whose text it may refuse to give
        return ""


def take_pipes() -> tuple[Callable[[], bytes], int]:
    """Return what reads a line of standard input, and the descriptor of standard output, and take both away."""
    read = os.fdopen(os.dup(0), "rb").readline
    write = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    return read, write


def lines_of(read: Callable[[], bytes]) -> Callable[[], Any]:
    """Return what returns one message of JSON after the other; it raises EOFError at the end."""

    def receive() -> Any:
        line = read()
        if not line:
            raise EOFError
        return json.loads(line)

    return receive


def raise_limits() -> None:
    """Let numbers of any length and deep recursion through, as programs of competitions expect."""
    unlimited: Any = vars(sys).get("set_int_max_str_digits")  # not in every Python that a sandbox may have
    if unlimited is not None:
        unlimited(0)
    sys.setrecursionlimit(20_000)
