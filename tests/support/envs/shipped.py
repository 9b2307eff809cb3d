"""The names of the environments that the package registers."""

import subprocess
import sys

# In a process of its own: tests register theirs.
SHIPPED = subprocess.run(
    [sys.executable, "-c", "from turnwise.envs import env_names; print(*env_names())"],
    capture_output=True,
    text=True,
    check=True,
).stdout.split()
