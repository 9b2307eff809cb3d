"""The system call filter of everything inside a sandbox, as a BPF program and as a profile of a docker engine."""

from __future__ import annotations

import ctypes
import errno
import json
import struct

from .syscalls import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_NEW = 0x7E020080
"""All flags of clone that ask for a new namespace; CLONE_NEWTIME is only known to clone3 and unshare."""
_REFUSED: dict[str, tuple[int, int]] = {  # numbers on x86_64 and aarch64
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "syslog": (103, 116), "open_by_handle_at": (304, 265), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "vhangup": (153, 58), "move_pages": (279, 239), "migrate_pages": (256, 238), "fanotify_init": (300, 262),
}  # fmt: skip
_ONLY_X86 = {"uselib": 134, "sysfs": 139, "_sysctl": 156, "iopl": 172, "ioperm": 173}
_CLONE, _CLONE3, _SOCKET, _KILL_CALL = (56, 220), 435, (41, 198), (62, 129)
_AF_UNIX, _FAMILIES = 1, (38, 40)
"""AF_ALG (the kernel's ciphers) and AF_VSOCK (the machine's hypervisor), which a network namespace does not divide."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16  # offsets in the kernel's struct seccomp_data


def program(machine: str, shared: bool = False, unix_only: bool = False) -> bytes | None:
    """Return the filter for a machine, or None for an unknown one.

    Args:
        machine: As ``os.uname`` names it.
        shared: Whether processes outside are visible; a signal to all processes is refused then.
        unix_only: Whether sockets of all families but AF_UNIX are refused: nothing else divides the network.
    """
    if machine not in _ARCHITECTURES:
        return None
    at = 0 if machine == "x86_64" else 1
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),  # a 32-bit program: its numbers mean other calls
        (_LOAD, 0, 0, _NUMBER),
    ]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    if at == 0:
        lines += [(_AT_LEAST, 0, 1, 0x40000000), refuse]  # the x32 numbers of the same calls
    for number in (*(numbers[at] for numbers in _REFUSED.values()), *(_ONLY_X86.values() if at == 0 else ())):
        lines += [(_EQUAL, 0, 1, number), refuse]
    # clone3's flags lie in memory, which a filter cannot read: without clone3, libraries use clone.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [(_EQUAL, 0, 3, _CLONE[at]), (_LOAD, 0, 0, _FIRST), (_ANY_BIT, 0, 1, _CLONE_NEW), refuse]
    if shared:
        lines += [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 3, _KILL_CALL[at]), (_LOAD, 0, 0, _FIRST)]
        lines += [(_EQUAL, 0, 1, 0xFFFFFFFF), refuse]
    families = [(_EQUAL, 1, 0, _AF_UNIX)] if unix_only else [(_EQUAL, 0, 1, family) for family in _FAMILIES]
    lines += [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 1 + 2 * len(families), _SOCKET[at]), (_LOAD, 0, 0, _FIRST)]
    for comparison in families:
        lines += [comparison, (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def profile() -> str:
    """Return the filter as a profile of a docker engine; it, too, ends a 32-bit program."""

    def rule(names: list[str], error: int, **argument: Any) -> dict[str, Any]:
        arguments = [{"index": 0, **argument}] if argument else []
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": arguments}

    flags = [1 << bit for bit in range(32) if _CLONE_NEW >> bit & 1]
    rules = [rule([*_REFUSED, *_ONLY_X86], errno.EPERM), rule(["clone3"], errno.ENOSYS)]
    rules += [rule(["clone"], errno.EPERM, op="SCMP_CMP_MASKED_EQ", value=flag, valueTwo=flag) for flag in flags]
    rules += [rule(["socket"], errno.EAFNOSUPPORT, op="SCMP_CMP_EQ", value=family) for family in _FAMILIES]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})


def install(filters: bytes | None) -> None:
    """Install the filter for this process and its children. It must not be able to gain privileges.

    Raises:
        OSError: The kernel refuses.
    """
    if filters is None:
        return
    buffer = ctypes.create_string_buffer(filters, len(filters))
    program_struct = struct.pack("@HP", len(filters) // 8, ctypes.addressof(buffer))
    if libc.prctl(22, 2, program_struct, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "prctl: the kernel rejected the system call filter")
