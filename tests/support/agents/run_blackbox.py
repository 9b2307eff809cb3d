"""Runs a real program as a black-box agent over a small dataset, where there is no network but loopback.

A script of its own: ``unshare --net python run_blackbox.py RUN_DIR CONFIG``, CONFIG being JSON: ``agent`` (of
BlackBoxAgent), ``env`` (``repair`` or ``lookup``), ``tool`` (the program's own shell: name and argument). It writes
trajectories and the ledger to RUN_DIR and prints one line of JSON: what became of each episode.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.chat.model_dirs import renderer_for
from turnwise.envs.basic.lookup import table
from turnwise.envs.core import ResetResult
from turnwise.envs.tool_env import ToolEnv
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import Message, ToolCall

CONTEXT = 400_000
EPISODES = 6
AT_ONCE = 4
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {}"


class Repair(ToolEnv):
    """A file that prints the wrong number, in a folder of the environment's own; what it prints then is the score."""

    blocking = True

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        assert task is not None
        self.folder = Path(tempfile.mkdtemp(prefix="repair-"))
        self.wanted = task.data["number"] + 3
        (self.folder / "calc.py").write_text(f"print({task.data['number']} - 3)\n")
        prompt = f"Make calc.py print {self.wanted}, then say what it prints."
        return prompt, {"workspace": str(self.folder)}

    def score(self, final: Message | None) -> dict[str, float]:
        ran = subprocess.run([sys.executable, "calc.py"], cwd=self.folder, capture_output=True, text=True, check=False)
        answer = "" if final is None else str(final.get("content"))
        return {"fixed": float(ran.stdout.strip() == str(self.wanted)), "said": 0.5 * (str(self.wanted) in answer)}

    def close(self) -> None:
        shutil.rmtree(self.folder)


def repair(tool: dict[str, Any], member: int, turn: int, text: str) -> Message:
    """Fix the file with the program's own shell, then say so; every third episode does not fix it."""
    del text
    number = 10 * member
    command = "true" if member % 3 == 2 else "sed -i 's/ - / + /' calc.py"
    lines = [f"cat calc.py && {command}", "python3 calc.py"]
    return ran(tool, lines, turn, f"It prints {number + 3}.")


def ran(tool: dict[str, Any], lines: list[str], turn: int, answer: str) -> Message:
    if tool.get("submit"):
        lines = [*lines, FINISH.format(answer)]
    if turn >= len(lines):
        return {"role": "assistant", "content": answer}
    call = ToolCall("", tool["name"], {**tool.get("more", {}), tool["argument"]: lines[turn]})
    return {"role": "assistant", "content": "", "reasoning_content": "So.\n", "tool_calls": [call]}


def lookup(tool: dict[str, Any], member: int, turn: int, text: str) -> Message:
    """Ask the environment's tools, as the program names them, or through its shell."""
    lookup_table = table(member)
    team = lookup_table.teams[lookup_table.person]
    calls = [("team_of", {"person": lookup_table.person}), ("manager_of", {"team": team})]
    answer = "nobody" if member % 3 == 2 else lookup_table.answer
    if tool.get("submit"):
        lines = [f"tool {name} '{json.dumps(arguments)}'" for name, arguments in calls]
        return ran(tool, lines, turn, answer)
    if turn >= 2:
        return {"role": "assistant", "content": answer}
    name, arguments = calls[turn]
    offered = re.search(rf'"name": "([\w-]*{name})"', text)
    call = ToolCall("", offered[1] if offered else name, arguments)
    return {"role": "assistant", "content": "", "tool_calls": [call]}


PLAYS: dict[str, Callable[..., Message]] = {"repair": repair, "lookup": lookup}


async def main(run_dir: Path, config: dict[str, Any]) -> None:
    """Play the episodes."""
    play, tool = PLAYS[config["env"]], config["tool"]

    def script(request: ScriptedRequest) -> Message:
        # Some ask for a title first, without tools.
        if '"name":' not in request.text:
            return {"role": "assistant", "content": "A title"}
        member = int(request.session_id.split("/")[1].split(".")[0])
        return play(tool, member, request.text.count("<|im_start|>assistant") - 1, request.text)

    renderer = renderer_for("qwen3")
    ledger = LedgerClient(ScriptedClient(renderer, script, context_length=CONTEXT), run_dir / "ledger.jsonl")
    env = "lookup" if config["env"] == "lookup" else f"{Path(__file__)}:Repair"
    rollout = RolloutConfig(
        env=SpecConfig(name=env),
        agent=NamedConfig(name="blackbox", config={**config["agent"], "max_concurrent": AT_ONCE}),
        max_turns=8,
        episode_timeout=200,
    )
    writer = TrajectoryWriter(run_dir / "trajectories.twz")
    runner = EpisodeRunner(rollout, ledger, renderer, context_length=CONTEXT, write=writer.write)
    specs = [
        EpisodeSpec(Task(f"t{member}", "go", {"number": 10 * member}), "g", member=member, env_seed=member)
        for member in range(EPISODES)
    ]
    try:
        outcomes = await asyncio.gather(*(runner.run(spec) for spec in specs))
    finally:
        await runner.close()
        await ledger.close()
        writer.close()
    summaries = [
        {
            "error": None if outcome.error is None else str(outcome.error),
            "rewards": {name: value for _, name, value in outcome.trajectories[0].rewards},
            "stop_reason": outcome.trajectories[0].stop_reason.value,
            "leaves": len(outcome.trajectories[0].leaves()),
            "metrics": outcome.trajectories[0].metrics,
        }
        for outcome in outcomes
    ]
    print(json.dumps(summaries))


def only_loopback() -> None:
    """Raise the loopback of this namespace; it must have no other interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    interfaces = [name for _, name in socket.if_nameindex()]
    assert interfaces == ["lo"], f"this is no namespace of its own: {interfaces}"


if __name__ == "__main__":
    only_loopback()
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
