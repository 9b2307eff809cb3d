"""Runs this interpreter as another user, with only this project visible of the folders closed to that user.

Run by root: ``python other_user.py UID HOME ARGUMENT...``; the arguments are the interpreter's. The folder HOME is made
that user's own. What has to be shown is shown in a mount namespace that ends with the program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main() -> None:
    from turnwise.sandboxes.local.boot import prepare
    from turnwise.sandboxes.local.host_python import host_python

    uid, home = int(sys.argv[1]), sys.argv[2]
    mounts, _ = host_python()
    os.makedirs(home, exist_ok=True)
    os.chown(home, uid, uid)
    prepare.reveal(
        [str(ROOT), *(str(mount.source) for mount in mounts if not mount.source.is_relative_to(ROOT))], uid, False
    )
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    path = f"{os.path.dirname(sys.executable)}:{os.defpath}"
    env = {"HOME": home, "PATH": path, "USER": "other", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(home)
    os.execve(sys.executable, [sys.executable, *sys.argv[3:]], env)


if __name__ == "__main__":
    main()
