"""The public names of the package, each with the module that it comes from."""

from turnwise.envs.rewards.core import Part as Part
from turnwise.envs.rewards.core import RewardFunction as RewardFunction
from turnwise.envs.rewards.core import Rubric as Rubric
from turnwise.envs.rewards.core import as_rubric as as_rubric
from turnwise.envs.rewards.groups import PairwiseJudge as PairwiseJudge
from turnwise.envs.rewards.groups import RankBy as RankBy
from turnwise.envs.rewards.groups import answer_of as answer_of
from turnwise.envs.rewards.groups import centred_ranks as centred_ranks
from turnwise.envs.rewards.groups import conversation_of as conversation_of
from turnwise.envs.rewards.judge import Judge as Judge
from turnwise.envs.rewards.matching import ExactMatch as ExactMatch
from turnwise.envs.rewards.matching import Numeric as Numeric
from turnwise.envs.rewards.matching import Regex as Regex
from turnwise.envs.rewards.matching import extract_answer as extract_answer
from turnwise.envs.rewards.matching import normalize as normalize
from turnwise.envs.rewards.matching import parse_number as parse_number
from turnwise.envs.rewards.model import RewardModel as RewardModel
from turnwise.envs.rewards.registry import register_reward as register_reward
from turnwise.ext.environments.math.symbolic import Symbolic as Symbolic
