"""Small trainings that fail for one reason each, and healthy ones: environments, a learner, a transport, settings.

Two models: that of ``lookup_run``, which writes calls, and one that answers a question with one of four colors, right
about half of the time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from support.envs.run_envs import Graded
from support.trainer.lookup_run import MODEL, silent
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.errors import ToolError
from turnwise.model.core import AdapterInfo, Replica, WeightManifest
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.core import MicroBatch, TokenScores
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import TEMPLATE, make_model
from turnwise.trainer.weight_sync import SendWeights, SharedMemoryTransport, load_everywhere
from turnwise.types import Message, text_of

COLORS = ("red", "blue", "green", "gold")
THINGS = ("rose", "sea", "leaf", "ring", "fire", "sky", "moss", "sun", "brick", "lake", "pine", "crown")
LIST = " ".join(COLORS)


def color_of(item: str) -> str:
    """Return the color of a thing."""
    return COLORS[THINGS.index(item) % len(COLORS)]


def color_tasks(n: int = 96) -> Iterator[Task]:
    """Yield questions."""
    for number in range(n):
        item = THINGS[number % len(THINGS)]
        yield Task(f"{item}-{number}", f"What color is a {item}?", {"answer": color_of(item)})


def unknown_tasks(n: int = 96, *, answers: str = "ultramarine") -> Iterator[Task]:
    """Yield the questions with answers that nobody can know: of some words one that is drawn by the task's id."""
    for task in color_tasks(n):
        words = answers.split("-")
        yield replace(task, data={"answer": words[stable_hash("answer", task.id) % len(words)]})


def build_color_model(directory: Path) -> None:
    """Make a model that names the right color half of the time, another one else, and seldom all of them."""
    draw = random.Random(0)
    rows = []
    for task in color_tasks(480):
        kind = draw.random()
        answer = task.data["answer"] if kind < 0.45 else draw.choice(COLORS) if kind < 0.9 else LIST
        rows.append({"messages": [*task.messages(), {"role": "assistant", "content": answer}], "tools": []})
    base, data = directory / "base", directory / "demonstrations.jsonl"
    make_model(base, rows, seed=0, width=64, layers=2)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_sft(
        SFTConfig.model_validate({
            "name": "sft", "runs": directory, "data": data, "model": {"path": base, "threads": 1}, "steps": 60,
            "conversations": 16, "optim": {"name": "muon", "lr": 4e-3}, "schedule": {"kind": "wsd", "warmup_steps": 5},
        }),
        console=silent(),
    )  # fmt: skip


class Colors(SingleTurnEnv):
    """Pays the right color."""

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    async def score(self, final: Message | None) -> float:
        return self.pay(text_of(final or {}).strip())

    def pay(self, answer: str) -> float:
        return float(answer == self.task.data["answer"])


class Boxed(Colors):
    """Reads answers in a form that no prompt asks for."""

    def pay(self, answer: str) -> float:
        return float(f"\\boxed{{{self.task.data['answer']}}}" in answer)


class TooEasy(Colors):
    """Pays any color."""

    def pay(self, answer: str) -> float:
        return float(any(color in answer for color in COLORS))


class Containing(Colors):
    """Pays an answer that holds the right color, among others too: a list of all earns always."""

    def pay(self, answer: str) -> float:
        return float(self.task.data["answer"] in answer)


class Inverted(Graded):
    """Pays what ``Graded`` pays with its sign turned."""

    def score(self, final: Message | None) -> float:
        return -super().score(final)


class BrokenTool(Graded):
    """Has a tool that always fails."""

    @function_tool(inline=True)
    def team_of(self, person: str) -> str:
        """The team of a person."""
        raise ToolError(f"the table of teams cannot be reached for {person!r}")


class WarmLearner(TorchLearner):
    """Scores tokens at temperature 1, whatever they were sampled at."""

    def _score(self, batch: MicroBatch, *, entropy: bool) -> TokenScores:
        return super()._score(replace(batch, temperatures=torch.ones_like(batch.temperatures)), entropy=entropy)


class StuckTransport(SharedMemoryTransport):
    """Announces each version, and sends the weights of the first."""

    _first: WeightManifest | None = None

    async def publish(
        self, send: SendWeights, replicas: Sequence[Replica], version: int, *, adapter: AdapterInfo | None = None
    ) -> WeightManifest:
        if self._first is None:
            self._first = await super().publish(send, replicas, version, adapter=adapter)
            return self._first
        manifest = replace(self._first, version=version)
        await load_everywhere(manifest, replicas)
        return manifest


def toolless_template(folder: Path) -> Path:
    """Write the small model's template without its tools."""
    file = folder / "toolless.jinja"
    text = TEMPLATE.read_text(encoding="utf-8")
    begin, end = text.index("    {{- 'Tools:"), text.index("    {%- endfor %}")
    file.write_text(text[:begin] + text[end + len("    {%- endfor %}\n") :], encoding="utf-8")
    return file


_HERE = __name__
RATE = 1e-3
LOOKUP: dict[str, Any] = {"tasks": "turnwise.envs.basic.lookup:tasks?n=100&split=train"}
COLOR: dict[str, Any] = {
    "tasks": f"{_HERE}:color_tasks",
    "rollout": {"env": {"name": f"{_HERE}:Colors"}, "max_turns": 1, "max_tokens_per_turn": 12},
}


def env(name: str) -> dict[str, Any]:
    """Return the setting of an environment of this module."""
    return {"rollout": {"env": {"name": f"{_HERE}:{name}"}}}


def optim(**values: Any) -> dict[str, Any]:
    """Return settings of the optimizer."""
    return {"policies": {"main": {"optim": values}}}


PLANTED: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "the sign of the reward turned": ("reward_sign", [LOOKUP, env("Inverted")]),
    "tools hidden by the template": ("hidden_tools", [LOOKUP]),
    "a limit of tokens too low": ("limits", [LOOKUP, {"rollout": {"max_tokens_per_turn": 5}}]),
    "answers parsed wrong": ("unread_answers", [COLOR, env("Boxed")]),
    "a rate 30 times too high": ("step_too_large", [COLOR, optim(lr=30 * RATE)]),
    "a rate of nothing": (
        "step_too_small", [COLOR, {"policies": {"main": {"schedule": {"kind": "linear", "warmup_steps": 10**9}}}}],
    ),
    "another temperature than the trainer's": (
        "temperature",
        [COLOR, {"rollout": {"temperature": 0.5}, "policies": {"main": {"engine": f"{_HERE}:WarmLearner"}}}],
    ),
    "a tool that always fails": ("broken_tool", [LOOKUP, env("BrokenTool")]),
    "all tasks too hard": ("never_rewarded", [COLOR, {"tasks": f"{_HERE}:unknown_tasks"}]),
    "all tasks solved": ("all_solved", [COLOR, env("TooEasy")]),
    "stale weights by a bug": (
        "stale", [COLOR, {"policies": {"main": {"weight_transport": {"name": f"{_HERE}:StuckTransport"}}}}],
    ),
    "a reward that is hacked": (
        "reward_hack",
        [COLOR, env("Containing"), {"tasks": f"{_HERE}:unknown_tasks?answers={'-'.join(COLORS)}", "steps": 24}],
    ),
}  # fmt: skip
"""By what is planted: the finding that should come first, and the settings of the run."""

HEALTHY: dict[str, list[dict[str, Any]]] = {
    "lookup, partial rewards": [LOOKUP],
    "colors": [COLOR],
    "colors, asynchronous": [COLOR, {"mode": "separate_async"}],
    "colors, two epochs": [COLOR, {"algorithm": {"epochs": 2, "minibatches": 2}}],
    "colors, reinforce_plus_plus": [COLOR, {"algorithm": {"advantage": "reinforce_plus_plus"}}],
}
"""Settings of runs that learn."""


def model_of(settings: Sequence[dict[str, Any]], lookup: Path, colors: Path) -> Path:
    """Return the model that a run begins with."""
    return colors / MODEL if settings[0] is COLOR else lookup
