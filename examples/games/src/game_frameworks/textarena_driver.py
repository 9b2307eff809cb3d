"""Driver of TextArena: games of one or more players."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from turnwise_foreign.core import Failure, framework, opening, refusals, text_of

PACKAGE = "textarena"
_MOST_PLAYERS = 16
_HEADING = re.compile(r"(?<=[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])(?=\s*\[)")


def names() -> list[str]:
    """Return the ids of the games."""
    return sorted(framework("textarena.envs.registration").ENV_REGISTRY) if framework("textarena") else []


def load(name: str, kwargs: dict[str, Any], system_prompt: str | None) -> Game:
    """Return a game; ``num_players`` of the arguments is the number of players, by default the least possible."""
    arguments = dict(kwargs)
    players = arguments.pop("num_players", None)
    game = Game(name, arguments, system_prompt)
    game.players = game.least_players() if players is None else players
    return game


class Game:
    """A game by its id."""

    players: int

    def __init__(self, name: str, kwargs: dict[str, Any], system_prompt: str | None) -> None:
        self._name = name
        self._kwargs = kwargs
        self.system_prompt = system_prompt

    def make(self) -> Any:
        """Make it."""
        return framework("textarena").make(self._name, **self._kwargs)

    def least_players(self) -> int:
        """Return the least number of players that it can be reset with."""
        for number in range(1, _MOST_PLAYERS + 1):
            try:
                self.make().reset(num_players=number, seed=0)
            except (AssertionError, ValueError, KeyError, IndexError):
                # Each environment raises another error for a wrong number of players.
                continue
            return number
        raise Failure("config", f"it takes no number of players from 1 to {_MOST_PLAYERS}: set kwargs.num_players")

    def episode(self) -> Match:
        """Return an episode."""
        return Match(self)


class Match:
    """One match. With several players each is an agent, ``player/0`` and so on, which sees what was said to it."""

    def __init__(self, game: Game) -> None:
        self._system_prompt = game.system_prompt
        self._players = game.players
        self._env = game.make()
        self._seen: dict[int, str] = {}
        self._greeted: set[int] = set()

    def reset(self, data: Mapping[str, Any] | None, seed: int | None) -> dict[str, Any]:
        """Begin a match with the seed."""
        self._env.reset(num_players=self._players, seed=seed)
        player, text = self._observe()
        answer: dict[str, Any] = {"messages": self._user_message(player, text)}
        if self._players > 1:
            answer["agents"] = [_agent(number) for number in range(self._players)]
            answer["turn"] = _agent(player)
        return answer

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take the text of a message as the current player's action."""
        acting = self._env.state.current_player_id
        done, _ = self._env.step(action=without_headings(text_of(message), self._env.state.role_mapping.values()))
        if done:
            return {"messages": refusals(message), "terminated": True, "truncated": False, **self._outcome(acting)}
        player, text = self._observe()
        answer = {"messages": [*(refusals(message) if player == acting else ()), *self._user_message(player, text)]}
        turn = {"turn": _agent(player)} if self._players > 1 else {}
        return {**answer, "reward": 0.0, "terminated": False, "truncated": False, **turn}

    def _outcome(self, acting: int) -> dict[str, Any]:
        rewards, infos = self._env.close()
        if rewards is None:
            raise Failure("raised", "the game ended without rewards")
        why = str(infos.get(acting, {}).get("reason", ""))
        answer: dict[str, Any] = {"reward": rewards[acting], "notes": {"reason": why} if why else {}}
        answer["metrics"] = {"invalid_move": float(bool(infos.get(acting, {}).get("invalid_move")))}
        if self._players > 1:
            other_rewards = {_agent(number): {"game": value} for number, value in rewards.items() if number != acting}
            answer["agent_rewards"] = other_rewards
        answer["rewards"] = {"game": rewards[acting]}
        return answer

    def _observe(self) -> Any:
        """Return the current player and what it was not yet shown: wrappers for models give the whole match again."""
        player, observation = self._env.get_observation()
        if not isinstance(observation, str):
            roles = self._env.state.role_mapping
            lines = (f"[{roles.get(sender, f'Player {sender}')}] {text}" for sender, text, *_ in observation)
            return player, "\n".join(lines)
        seen = self._seen.get(player, "")
        self._seen[player] = observation
        return player, observation[len(seen) :] if seen and observation.startswith(seen) else observation

    def _user_message(self, player: int, text: str) -> list[dict[str, Any]]:
        first = player not in self._greeted
        self._greeted.add(player)
        return opening(self._system_prompt if first else None, text.lstrip("\n"))


def without_headings(text: str, roles: Iterable[str]) -> str:
    """Return what a player says without what others would read as lines of the game or of another player.

    The framework removes each role's tag once from what others see, and so would leave ``[GA[GAME]ME]`` as one.
    """
    tags = [f"[{role}]" for role in roles]
    while any(tag in (shown := _removed(text, tags)) for tag in tags):
        text = shown
    return _HEADING.sub(" ", text)


def _removed(text: str, tags: Iterable[str]) -> str:
    for tag in tags:
        text = text.replace(tag, "")
    return text


def _agent(player: int) -> str:
    return f"player/{player}"
