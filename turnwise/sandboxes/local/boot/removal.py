"""The removal of folders that sandboxes wrote to."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess


def remove(path: str) -> None:
    """Remove a folder with all below it, however deep that is and whatever its owner may do with it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", path], capture_output=True, check=False)
