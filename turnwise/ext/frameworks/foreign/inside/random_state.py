"""RandomState: the states of ``random`` and ``numpy.random`` that one episode sees.

``numpy.random.get_state`` and ``set_state`` take 0.1 ms each, word by word, which is more than a step of many
environments. So the words of numpy's generator are copied as they lie in memory, where numpy has it so
(``BitGenerator.ctypes``, from 1.24 on).
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_WORDS = 624
_BYTES = 4 * (_WORDS + 1)
"""The words of a Mersenne twister, and the number of those that are used up."""


class RandomState:
    """The state of ``random`` and ``numpy.random`` that one episode sees; frameworks draw from these generators."""

    def __init__(self) -> None:
        self._own: tuple[Any, Any] | None = None

    @contextmanager
    def used(self, seed: int | None = None) -> Iterator[None]:
        """Use it in a block, and restore what was there before; with a seed it begins anew."""
        states = _states()
        if seed is not None:
            _seed(seed)
        else:
            # Also what was there before: to read a state changes it.
            _restore(self._own or states)
        try:
            yield
        finally:
            self._own = _states()
            _restore(states)


class _Twister(NamedTuple):
    """The state of numpy's generator.

    Attributes:
        words: What lies in memory.
        normal: The second number of a pair of normal ones, where it is still to be drawn.
    """

    words: bytes
    normal: float | None


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else _read_state(numpy)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        _write_state(sys.modules["numpy"], states[1])


def _read_state(numpy: Any) -> Any:
    """Return the state of numpy's generator, which is not to be used before one is put into it."""
    address = _address(numpy)
    if address is None:
        return numpy.random.get_state()
    words = ctypes.string_at(address, _BYTES)
    # The one that is left of a pair is drawn without a change of the words.
    normal = numpy.random.standard_normal()
    return _Twister(words, normal if ctypes.string_at(address, _BYTES) == words else None)


def _write_state(numpy: Any, state: Any) -> None:
    if not isinstance(state, _Twister):
        numpy.random.set_state(state)
        return
    address = _address(numpy)
    if state.normal is None and address is not None:
        # Seeded first: what is left of a pair is forgotten.
        numpy.random.seed(0)
        ctypes.memmove(address, state.words, _BYTES)
        return
    *words, used = memoryview(state.words).cast("I")
    cached_normal = (0, 0.0) if state.normal is None else (1, state.normal)
    numpy.random.set_state(("MT19937", numpy.array(words, numpy.uint32), used, *cached_normal))


def _address(numpy: Any) -> int | None:
    """Return where the words of numpy's generator lie, or None where that is unknown."""
    try:
        generator = numpy.random.get_bit_generator()
    except AttributeError:  # numpy before 1.24
        return None
    if type(generator) is not numpy.random.MT19937 or not _readable(numpy):
        return None
    address: int = generator.ctypes.state_address
    return address


@functools.cache
def _readable(numpy: Any) -> bool:
    """Return whether this numpy's generators lie in memory as they are read here."""
    generator = numpy.random.MT19937(1)
    generator.random_raw(1)
    *words, used = memoryview(ctypes.string_at(generator.ctypes.state_address, _BYTES)).cast("I")
    state = generator.state["state"]
    return bool(words == state["key"].tolist() and used == state["pos"])
