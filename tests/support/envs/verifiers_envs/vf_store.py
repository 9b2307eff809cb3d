"""A store for verifiers: two tools with a basket that they share with the rewards, and an end when it is paid."""

import os
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["Store"]

PRICES = {"apple": 2, "bread": 5, "cheese": 9}


class Basket(vf.State):
    goods: list[str] = Field(default_factory=list)
    paid: int = 0


class StoreData(vf.TaskData):
    wanted: list[str]


class StoreTask(vf.Task[StoreData, Basket]):
    @vf.reward
    async def wanted(self, trace: vf.Trace) -> dict[str, float]:
        return {f"has_{name}": float(name in trace.state.goods) for name in self.data.wanted}

    @vf.reward(weight=2.0)
    async def paid(self, trace: vf.Trace) -> float:
        return float(trace.state.paid > 0 and trace.state.paid == sum(PRICES[article] for article in self.data.wanted))

    @vf.stop
    async def left(self, trace: vf.Trace) -> bool:
        return trace.state.paid > 0


class Shelf(vf.Toolset[vf.SharedToolsetConfig, Basket]):
    TOOL_PREFIX = "shelf"

    @vf.tool
    async def take(self, name: str, count: int = 1) -> str:
        """Take goods from the shelf."""
        if name == "shelf":
            os._exit(3)
        if name not in PRICES:
            raise ValueError(f"there is no {name}")
        self.state.goods += [name] * count
        return f"{len(self.state.goods)} in the basket"

    @vf.tool
    async def pay(self) -> int:
        """Pay for what is in the basket, and leave."""
        self.state.paid = sum(PRICES[article] for article in self.state.goods)
        return self.state.paid


class StoreConfig(vf.TasksetConfig):
    pass


class Store(vf.Taskset[StoreTask, StoreConfig]):
    def load(self) -> Iterator[StoreTask]:
        for shopping_list in (["apple"], ["apple", "bread"], ["cheese"]):
            data = StoreData(prompt=f"Buy: {', '.join(shopping_list)}.", wanted=shopping_list)
            yield StoreTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: StoreConfig) -> list[vf.Toolset]:
        return [Shelf(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Shelf.run()
