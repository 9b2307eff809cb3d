"""Nim: rules, payoffs, and opponents, against play worked out by hand and by search."""

from __future__ import annotations

import functools

import pytest
from nim_env import best, chosen, tasks

from turnwise.envs import make, reset_env, score_env, step_env
from turnwise.errors import EnvError, RegistryError, TaskError
from turnwise.tasks import Task


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


async def game(*moves: str, stones: int = 7, **config):
    env = make("nim", **config)
    heard, info = await reset_env(env, Task("t", "", {"stones": stones}), seed=0)
    results = [await step_env(env, say(move)) for move in moves]
    return env, [heard[-1]["content"], info], results


async def test_players_take_turns_and_read_how_many_stones_are_left() -> None:
    _, (heard, info), (first, second, third) = await game("3", "2", "2")
    assert heard == "Take 1 to 3 stones. Who takes the last one wins. Answer with a number. 7 are left."
    assert info == {"agents": ["first", "second"], "turn": "first"}
    assert (first.info["turn"], first.observation[-1]["content"], first.reward) == ("second", "4 are left.", 0.0)
    # The second player reads the rules when it first speaks.
    assert "Who takes the last one wins" in first.observation[0]["content"]
    assert [message["content"] for message in second.observation] == ["2 are left."]
    assert third.terminated
    assert (third.info["rewards"], third.info["agent_rewards"]) == ({"score": 1.0}, {"second": {"score": 0.0}})


@pytest.mark.parametrize("move", ["0", "4", "-1", "two", "1 or 2", "", "1.5"])
async def test_an_answer_that_is_no_move_loses(move: str) -> None:
    _, _, (result,) = await game(move)
    assert result.terminated
    assert (result.reward, result.info["agent_rewards"]) == (0.0, {"second": {"score": 1.0}})


async def test_nobody_takes_more_than_there_are() -> None:
    _, _, results = await game("3", "3", "2")
    assert results[-1].reward == 0.0


async def test_step_after_the_end_raises_env_error() -> None:
    env, _, _ = await game("0")
    with pytest.raises(EnvError, match="no episode runs"):
        await step_env(env, say("1"))


async def test_nobody_wins_a_game_that_a_limit_ended() -> None:
    env, _, _ = await game("3")
    parts = await score_env(env, None)
    assert parts.agents == {"first": {"score": 0.0}, "second": {"score": 0.0}}


@functools.cache
def wins(stones: int, take: int) -> bool:
    """By search: whoever moves wins where a move leaves the other no win."""
    return any(not wins(stones - taken_stones, take) for taken_stones in range(1, min(take, stones) + 1))


@pytest.mark.parametrize("take", [1, 2, 3, 5])
def test_the_perfect_player_is_that_of_the_search(take: int) -> None:
    for stones in range(1, 40):
        move = best(stones, take)
        assert 1 <= move <= min(take, stones)
        if wins(stones, take):
            assert not wins(stones - move, take)


@pytest.mark.parametrize("seed", range(6))
async def test_against_the_perfect_player_only_perfect_play_wins(seed: int) -> None:
    for careful in (True, False):
        env = make("nim", opponent="perfect")
        await reset_env(env, None, seed=seed)
        is_over, result = False, None
        while not is_over:
            result = await step_env(env, say(str(best(env.stones, 3) if careful else 1)))
            is_over = result.terminated
        assert result is not None
        # Taking one each time is perfect only by luck of the heap.
        assert result.reward == 1.0 if careful else env.winner in ("main", "opponent")


def test_answers_and_configurations_are_read_strictly() -> None:
    assert [chosen(text) for text in ("2", " I take 3.", "2 or 3", "none", "1.5")] == [2, 3, None, None, None]
    for config in ({"take": 0}, {"least": 3}, {"most": 4}, {"least": "5"}, {"opponent": "me"}):
        with pytest.raises((EnvError, RegistryError), match="nim: "):
            make("nim", **config)


@pytest.mark.parametrize(
    ("data", "words"),
    [({"stones": 0}, "above 0"), ({"stones": "7"}, "above 0"), ({"stones": 2, "side": "second"}, "takes all 2"),
     ({"side": "left"}, "first or second")],
)  # fmt: skip
async def test_games_that_cannot_be_played_are_refused(data: dict, words: str) -> None:
    env = make("nim", opponent="perfect")
    with pytest.raises(TaskError, match=words):
        await reset_env(env, Task("t", "", data), seed=0)


def test_tasks_name_their_opponent() -> None:
    assert [(task.id, task.env_config) for task in tasks(2, name="a", opponent="random")] == [
        ("nim-a-0", {"opponent": "random"}), ("nim-a-1", {"opponent": "random"}),
    ]  # fmt: skip
    with pytest.raises(TaskError, match="at least 1"):
        list(tasks(0))
