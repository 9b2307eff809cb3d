"""The simulation of the training modes (benchmarks/simulate.py), held against cases by hand and the rules of replay."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def simulate() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("simulate")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def engine(simulate: ModuleType) -> ModuleType:
    return sys.modules["harness.simulation"]


def small(engine: ModuleType, **changes: Any) -> Any:
    shape = engine.ModelShape(36, 4096, 32, 8, 128, 12_288, 151_936, dtype="bfloat16")
    lengths = engine.Lengths(600, 3, 200, 2048, sigma=1.0, observation=50, tool_s=0.2, tool_most_s=20)
    setting = engine.Setting(shape, engine.Accelerators(), 1, 4, 4, 8, 4, lengths)
    return replace(setting, **changes)


def test_time_of_one_episode_is_the_sum_of_its_parts(engine: ModuleType) -> None:
    lengths = engine.Lengths(600, 1, 500, 4096, sigma=1e-6)
    setting = small(engine, lengths=lengths, rollout_gpus=1, train_gpus=1, groups=1, members=1)
    costs = engine.Costs(setting)
    # Bound by reading: 7.5683 B elements of matrices and 600 x 73,728 of keys and values, in two bytes, at 60 % of
    # 3.35 TB/s, and 3 ms of overhead.
    read = 2 * (7.5683e9 + 600 * 73_728)
    assert costs.decode(1, 600) == pytest.approx(read / (0.6 * 3.35e12) + 3e-3, rel=1e-3)
    parts = costs.prefill(600) + 500 * costs.decode(1, 600) + costs.train(1100) + setting.sync_s
    assert engine.Simulation(setting, "sync").run(3).step_s == pytest.approx(parts, rel=0.01)


def test_lengths_have_their_mean_after_the_cut(engine: ModuleType) -> None:
    lengths = engine.Lengths(0, 1, 12_720, 32_768, sigma=0.8)
    setting = small(engine, lengths=lengths, groups=16, members=8, train_gpus=8, rollout_gpus=8)
    result = engine.Simulation(setting, "sync").run(20)
    mean = result.tokens_per_s * result.step_s / (16 * 8)
    # 2,560 draws, half of whose variance is in common in a group.
    assert mean == pytest.approx(12_720, rel=0.06)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_group_is_staler_than_the_bound(engine: ModuleType, mode: Any, bound: int) -> None:
    setting = small(engine, ahead=3, staleness=bound)
    assert engine.Simulation(setting, mode).run(30).staleness <= bound


def test_overlap_gains_and_the_same_seed_gives_the_same(engine: ModuleType) -> None:
    setting = small(engine, ahead=2, staleness=2)
    results = {mode: engine.Simulation(setting, mode, seed=3).run(30) for mode in engine.MODES}
    assert results["sync"].step_s > results["colocate_async"].step_s > 0
    assert results["sync"].staleness == 0
    assert engine.Simulation(setting, "sync", seed=3).run(30) == results["sync"]
    assert engine.Simulation(setting, "sync", seed=4).run(30) != results["sync"]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_failures_cost_time_and_nothing_else(engine: ModuleType, mode: Any) -> None:
    calm = small(engine, checkpoint_every=5)
    rough = replace(calm, hours_between_failures=4 * 150 / 3600, restart_s=30)
    without, with_ = (engine.Simulation(setting, mode).run(40) for setting in (calm, rough))
    assert with_.failures > 3
    assert with_.step_s > 1.1 * without.step_s
    # Every step was trained on as many tokens, within what draws differ by.
    tokens = [result.tokens_per_s * result.step_s for result in (without, with_)]
    assert tokens[1] == pytest.approx(tokens[0], rel=0.2)


def test_published_hours_are_predicted_within_the_bar(simulate: ModuleType) -> None:
    prediction = simulate.predicted(10)
    assert max(map(abs, prediction["errors"].values())) < simulate.BAR
    # The speed comes from the other run, whose time it reproduces by definition.
    assert 1 < prediction["slower"] < 2
