"""The sessions of one episode.

Owns: :class:`EpisodeSessions`: what a session of an episode is opened with, and which ones there are. Refuses: making
trajectories of them (``runner.py``).
"""

from __future__ import annotations

from turnwise.inference.core import LLMClient, Renderer
from turnwise.inference.session import Session, SessionLimits
from turnwise.rollout.config import RolloutConfig
from turnwise.seeding import stable_hash
from turnwise.types import SamplingParams


class EpisodeSessions:
    """Opens sessions when an agent asks for them.

    Args:
        client: Who samples.
        renderer: Messages to ids and back.
        config: Sampling and limits.
        episode_id: Names the main session; others are called ``<episode_id>/<name>``.
        seed: Sampling seed of the episode; each session draws its own from it and from its name.
        temperature: Sampling temperature of the episode.
        trained: Whether its trajectories are trained: they are then sampled at this temperature only.
        context_length: Most tokens of prompt and completion together.

    Attributes:
        opened: Session and policy by the session's name, in the order in which they were opened.
    """

    def __init__(
        self,
        client: LLMClient,
        renderer: Renderer,
        config: RolloutConfig,
        *,
        episode_id: str,
        seed: int,
        temperature: float,
        trained: bool,
        context_length: int,
    ) -> None:
        self.opened: dict[str, tuple[Session, str]] = {}
        self._client = client
        self._renderer = renderer
        self._episode_id = episode_id
        self._seed = seed
        self._trained = trained
        self._params = SamplingParams(
            temperature=temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p
        )
        self._limits = SessionLimits(
            context_length=context_length,
            max_tokens_per_turn=config.max_tokens_per_turn,
            max_total_tokens=config.max_total_tokens,
            max_turns=config.max_turns,
        )

    def open(self, name: str, policy: str) -> Session:
        """Open the session of that name.

        Args:
            name: Whose session it is; ``main`` is the agent's own.
            policy: Which policy samples in it.
        """
        session = Session(
            self._client,
            self._renderer,
            id=self._episode_id if name == "main" else f"{self._episode_id}/{name}",
            limits=self._limits,
            params=self._params,
            seed=stable_hash("session", self._seed, name),
            one_temperature=self._trained,
        )
        self.opened[name] = (session, policy)
        return session
