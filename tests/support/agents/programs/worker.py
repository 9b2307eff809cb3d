"""A worker: plays one episode after the other.

``FAIL`` says how the second ends: ``die``, ``hang``, ``error``, ``flood``. ``NOISE``: bytes that it writes beside
each answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Serve until there is nothing more to read."""
    print("not for anybody", flush=True)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        fail = os.environ.get("FAIL") if number == 1 else None
        if fail == "die":
            os._exit(5)
        if fail == "hang":
            time.sleep(1000)
        while fail == "flood":
            os.write(1, b"y\n" * 10_000)
        os.write(1, b"y" * int(os.environ.get("NOISE", "0")) + b"\n")
        env = {"OPENAI_BASE_URL": job["openai_base_url"], "TURNWISE_TOOLS_URL": job["tools_url"]}
        command = [sys.executable, "-I", "-S", str(HERE / "chat_loop.py"), job["prompt"]]
        answer = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        # A line of another episode, and one that is none, change nothing.
        print(json.dumps({"id": "another", "answer": "wrong"}), "[1]", json.dumps([job["id"]]), sep="\n", flush=True)
        outcome = {"error": "it broke"} if fail == "error" else {"answer": f"{answer.strip()} "}
        print(json.dumps({"id": job["id"], **outcome, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    main()
