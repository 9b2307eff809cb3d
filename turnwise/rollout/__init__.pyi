"""The public names of the package, each with the module that it comes from."""

from turnwise.rollout.config import RolloutConfig as RolloutConfig
from turnwise.rollout.config import SpecConfig as SpecConfig
from turnwise.rollout.core import BatchRef as BatchRef
from turnwise.rollout.core import EpisodeOutcome as EpisodeOutcome
from turnwise.rollout.core import EpisodeSpec as EpisodeSpec
from turnwise.rollout.core import ReplayBuffer as ReplayBuffer
from turnwise.rollout.core import RolloutManager as RolloutManager
from turnwise.rollout.core import RolloutParts as RolloutParts
from turnwise.rollout.core import RolloutRequest as RolloutRequest
from turnwise.rollout.producer import RolloutProducer as RolloutProducer
from turnwise.rollout.replay.buffer import LocalReplayBuffer as LocalReplayBuffer
from turnwise.rollout.runner import EpisodeRunner as EpisodeRunner
