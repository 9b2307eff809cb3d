"""Sums for verifiers: one turn, after an example, with two reward functions and a metric."""

import random
import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf

__all__ = ["Sums"]

SEEDS = {"train": 1, "test": 2}


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def correct(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(bool(numbers) and int(numbers[-1]) == self.data.answer)

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / max(1, len(trace.last_reply.split()))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    size: int = 40
    most: int = 50


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        draw = random.Random(SEEDS[self.config.split])
        for number in range(self.config.size):
            one, two = draw.randint(0, self.config.most), draw.randint(0, self.config.most)
            prompt = [
                vf.UserMessage(content="2 + 2 = ?"),
                vf.AssistantMessage(content="4"),
                vf.UserMessage(content=f"{one} + {two} = ?"),
            ]
            data = SumData(name=f"sum-{number}", prompt=prompt, system_prompt="Add.", answer=one + two)
            yield SumTask(data, self.config.task)
