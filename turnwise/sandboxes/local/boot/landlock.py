"""Landlock: access rights that an unprivileged process drops for itself and its children."""

from __future__ import annotations

import ctypes
import os
import struct

from .syscalls import checked, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_READING = _EXECUTE | _READ_FILE | _READ_DIR


def version() -> int:
    """Return the version of the kernel's Landlock interface; 0 without Landlock."""
    number: int = libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    return max(number, 0)


def restrict(plan: dict[str, Any]) -> None:
    """Allow the files of a plan and nothing else.

    Raises:
        OSError: The kernel refuses.
    """
    abi = version()
    all_rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        all_rights |= (1 << bit) if abi >= since else 0
    attributes = [all_rights, 0b11 if abi >= 4 and not plan["network"] else 0, 0b11 if abi >= 6 else 0]
    # The structure must not be longer than the kernel's version of it.
    attributes = attributes[: 1 if abi < 4 else 2 if abi < 6 else 3]
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    rules = checked(libc.syscall(_CREATE, packed, ctypes.c_size_t(len(packed)), 0), "landlock_create_ruleset")
    for path, writes in plan["paths"]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = all_rights if writes else _READING
        if writes == "device":
            allowed = _READ_FILE | _WRITE_FILE | (1 << 15 if abi >= 5 else 0)
        if not os.path.isdir(path):
            allowed &= _OF_FILES
        rule = struct.pack("=Qi", allowed & all_rights, fd)
        checked(libc.syscall(_ADD, rules, 1, rule, 0), f"landlock_add_rule: {path}")
        os.close(fd)
    checked(libc.syscall(_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)
