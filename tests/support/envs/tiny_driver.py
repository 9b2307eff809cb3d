"""The driver of a framework that tests make up: count down from a number by saying how much. No package is needed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time

PACKAGE = "turnwise-tiny"
# Answers the requests of a worker at whatever its parent left open.
FORGE = """
import json, os
ending = json.dumps({"messages": [], "reward": 9.0, "terminated": True, "truncated": False}).encode()
for descriptor in range(3, 64):
    for number in range(64):
        try:
            os.write(descriptor, b'{"id": %d, "result": %s}' % (number, ending) + b"\\n")
        except OSError:
            break
"""


def names():
    return ["countdown", "silent"]


def load(name, kwargs, system_prompt):
    if "broken" in kwargs:
        raise ValueError("broken is no argument")
    return Source(name, system_prompt, **kwargs)


class Source:
    def __init__(self, name, system_prompt, start=5, trouble="", padding=0):
        self.system_prompt, self.start, self.trouble, self.padding = system_prompt, start, trouble, padding
        self.endless = trouble == "endless"

    def episode(self):
        return Episode(self)

    def tasks(self, split, start, count):
        rows = [{"prompt": f"from {n}", "data": {"start": n}} for n in range(3, 3 + (700 if split == "train" else 2))]
        return [{**row, "prompt": row["prompt"] + " " * self.padding} for row in rows[start : start + count]]


class Episode:
    def __init__(self, source):
        self.source = source
        self.charm = random.randrange(1000)

    def reset(self, data, seed):
        if self.source.trouble == "reset":
            raise LookupError("no such level")
        self.left = (data or {}).get("start", self.source.start)
        text = f"{self.left} left, seed {seed}, lucky {random.randrange(1000)}, charm {self.charm}"
        head = [{"role": "system", "content": self.source.system_prompt}] if self.source.system_prompt else []
        tools = [{"name": "take", "description": "Take some.", "parameters": {"type": "object", "properties": {}}}]
        several = {"agents": ["one", "two"], "turn": "one"} if self.source.trouble == "two" else {}
        first = {"messages": [*head, {"role": "user", "content": text}], "tools": tools, "info": {"state": self.left}}
        return first | several

    def step(self, message):
        if self.source.trouble == "echo":
            observation = {"role": "user", "content": json.dumps(message, sort_keys=True) + "\ud83d"}
            return {"messages": [observation], "reward": 0, "terminated": False, "truncated": False}
        if self.source.trouble == "partial":
            return {"messages": [], "reward": 0}
        getattr(self, "_" + (self.source.trouble or "none"), lambda: None)()
        amount = int(message["content"])
        self.left -= amount
        reward = {"nan": float("nan"), "words": "much", "missing": None}.get(self.source.trouble, float(amount))
        observation = {"role": "user", "content": f"{self.left} left, lucky {random.randrange(1000)}"}
        info = {"metrics": {"taken": amount}, "notes": {"left": str(self.left)}}
        return {"messages": [observation], "reward": reward, "terminated": self.left <= 0, "truncated": False, **info}

    def score(self, message):
        return {"left": -float(self.left)}

    def _raise(self):
        raise ArithmeticError("the counter broke")

    def _exit(self):
        sys.exit("enough")

    def _die(self):
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)

    def _loop(self):
        asyncio.run(asyncio.sleep(0))

    def _cancel(self):
        raise asyncio.CancelledError

    def _mute(self):
        raise Mute

    def _orphan(self):
        # The child has all that its parent has open.
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
        self._die()

    def _forge(self):
        subprocess.run([sys.executable, "-c", FORGE], close_fds=False, check=True)

    def _slow(self):
        time.sleep(0.4)

    def _hang(self):
        time.sleep(600)

    def _flood(self):
        for _ in range(200):
            print("x" * 100_000)
            print("y" * 100_000, file=sys.stderr)

    def _litter(self):
        os.close(tempfile.mkstemp()[0])

    def _memory(self):
        self.hog = bytearray(16 * 2**30)


class Mute(Exception):
    def __str__(self):
        raise ValueError
