"""What each strategy takes, drops and waits for; how far rollouts may run ahead; the section's errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.config import dump_config, load_config
from turnwise.errors import ConfigError
from turnwise.rollout.core import GroupFacts
from turnwise.rollout.replay.config import (
    STRATEGIES,
    ReplayConfig,
    RunFacts,
    StalenessBound,
    make_admission,
    make_strategy,
)
from turnwise.rollout.replay.strategies import Bounded, Choice, InFlight

EVEN, MIXED_REWARDS = (1.0, 1.0), (1.0, 0.0)


def facts(name: str, version: int | None, rewards: tuple[float, ...] = MIXED_REWARDS) -> GroupFacts:
    return GroupFacts(name, name, name, "train", ord(name[0]), version, rewards)


def flight(version: int) -> InFlight:
    return InFlight("f", "f", "train", version)


def test_on_policy_takes_groups_of_the_current_weights() -> None:
    ready = [facts("b", 4), facts("a", 4), facts("o", 3)]
    on_policy = make_strategy(load_config(ReplayConfig, defaults={"strategy": "on_policy"}), RunFacts(4, sync=False))
    assert on_policy.choose(ready, [], 5, 2) == Choice(("a", "b"), (("o", "stale"),))
    assert on_policy.choose(ready, [], 5, 3) == Choice(None, (("o", "stale"),))


def test_bounded_waits_for_groups_with_the_nearest_deadline() -> None:
    ready = [facts("a", 4), facts("b", 4)]
    # At step 5 a group of version 3 is one step old; at step 6 it would be two.
    assert Bounded(1, "wait").choose(ready, [flight(3)], 5, 1).take is None
    assert Bounded(1, "drop").choose(ready, [flight(3)], 5, 1).take == ("a",)
    assert Bounded(2, "wait").choose(ready, [flight(3)], 5, 1).take == ("a",)
    # Two of them, and one place in each of the steps 5 and 6: one of them must be in this one.
    assert Bounded(2, "wait").choose(ready, [flight(3), flight(3)], 5, 1).take is None
    # What is too old already is waited for by nobody.
    assert Bounded(1, "wait").choose(ready, [flight(2)], 5, 1).take == ("a",)
    # Of a batch of two the first half is asked for: the second half is still to come.
    assert Bounded(1, "wait", step_groups=2).choose(ready, [flight(3)], 5, 1).take == ("a",)
    assert Bounded(1, "wait", step_groups=2).choose(ready, [flight(3)], 5, 1, taken=1).take is None


def test_oldest_groups_are_taken_first_and_versionless_last() -> None:
    ready = [facts("n", None), facts("b", 4), facts("a", 3)]
    assert Bounded(3).choose(ready, [], 5, 3).take == ("a", "b", "n")


def test_room_is_the_number_of_groups_trained_in_time() -> None:
    admission = StalenessBound(4, ahead=2, bound=2)
    assert admission.room(outstanding=0, version=7, step=8) == 12
    # While step 8 is trained, what is asked for now can be trained in steps 9 and 10.
    assert admission.room(outstanding=3, version=7, step=9) == 5
    assert admission.room(outstanding=20, version=7, step=9) == 0
    assert admission.room(outstanding=0, version=7, step=8, taken=2) == 10
    assert StalenessBound(4, ahead=2, bound=0).room(outstanding=0, version=7, step=9) == 0
    assert StalenessBound(4, ahead=1).room(outstanding=2, version=0, step=1) == 6


def test_defaults_by_mode() -> None:
    sync, apart = RunFacts(4, sync=True), RunFacts(4, sync=False)
    assert make_strategy(ReplayConfig(), sync).choose([facts("a", 3)], [], 5, 1).drop == (("a", "stale"),)
    assert make_strategy(ReplayConfig(), apart).choose([facts("a", 3)], [], 5, 1).take == ("a",)
    assert make_admission(ReplayConfig(), sync) == StalenessBound(4, 1, 0)
    assert make_admission(ReplayConfig(), apart) == StalenessBound(4, 1, 1)
    for name in STRATEGIES:
        make_strategy(load_config(ReplayConfig, defaults={"strategy": name}), apart)


OWN = """
from turnwise.rollout.replay.strategies import Choice, Strategy
class Newest(Strategy):
    def __init__(self, most=1):
        self.most = most
    def choose(self, ready, in_flight, step, batch_size, taken=0):
        return Choice(tuple(each.id for each in ready[-batch_size:])) if len(ready) >= batch_size else Choice()
class Other: pass
"""


def test_a_custom_strategy_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)

    def make(name: str, **config: Any) -> Any:
        section = {"strategy": {"name": name, "config": config}}
        return make_strategy(load_config(ReplayConfig, defaults=section), RunFacts(2, sync=True))

    strategy = make(f"{tmp_path}/mine.py:Newest", most=3)
    assert strategy.most == 3
    assert strategy.choose([facts("a", 0), facts("b", 0)], [], 1, 1).take == ("b",)
    with pytest.raises(ConfigError, match="is not a strategy: subclass"):
        make(f"{tmp_path}/mine.py:Other")
    with pytest.raises(ConfigError, match=r"cannot be made with its config \{'least': 1\}"):
        make(f"{tmp_path}/mine.py:Newest", least=1)
    with pytest.raises(ConfigError, match="did you mean 'bounded'"):
        make("bound")


def test_a_key_that_the_strategy_does_not_read_is_named() -> None:
    with pytest.raises(ConfigError, match="max_staleness is given, but the strategy fifo reads none of these keys"):
        load_config(ReplayConfig, defaults={"strategy": "fifo", "max_staleness": 3})
    with pytest.raises(ConfigError, match=r"strategy\.config is for custom strategies"):
        load_config(ReplayConfig, defaults={"strategy": {"name": "fifo", "config": {"x": 1}}})


def test_staleness_of_lost_weights_is_that_of_the_step() -> None:
    assert facts("a", 9).staleness(3) == 0
    assert facts("a", None).staleness(3) == 0
    assert facts("a", 1).staleness(3) == 1


@pytest.mark.parametrize("section", [
    {}, {"strategy": "bounded", "max_staleness": 3, "when_stale": "drop"}, {"strategy": "on_policy"},
    {"strategy": "fifo"},
])  # fmt: skip
def test_a_section_that_was_written_down_is_read_again(section: dict, tmp_path: Path) -> None:
    config = ReplayConfig.model_validate(section)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(ReplayConfig, tmp_path / "config.yaml") == config
