"""The ``rollout:`` section: environment, agent, sampling, limits and concurrency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from turnwise.agents.roles import MAIN, Compare, check_name
from turnwise.config import ConfigPath, ConfigReference, Section, shorthand
from turnwise.errors import TurnwiseError
from turnwise.gateway.config import FrozenConfig
from turnwise.gateway.endpoints import DEFAULT_FORM, check_base, check_template
from turnwise.gateway.errors import LENIENT, Lenient
from turnwise.rollout.branching.tree import TreeConfig
from turnwise.sandboxes.config import SandboxConfig
from turnwise.tools.config import ToolsConfig


def _checked_by(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator of texts that reports what a check raises."""

    def validate(value: str) -> str:
        try:
            check(value)
        except TurnwiseError as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(validate)


def _frozen_name(name: str) -> str:
    if name == MAIN:
        raise ValueError("another name than main, which is a trained policy's")
    return name


PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
FrozenName = Annotated[PolicyName, AfterValidator(_frozen_name)]
AgentName = Annotated[str, _checked_by(check_name)]
PositiveInt = Annotated[int, Field(gt=0)]


class NamedConfig(Section):
    """A component given by name and configuration.

    Attributes:
        name: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        config: Keyword arguments of its constructor.
    """

    name: ConfigReference
    config: dict[str, Any] = Field(default_factory=dict)


class AgentEntry(Section):
    """One agent of an ``agent_loop_config_path`` file.

    Attributes:
        name: Name for tasks and ``rollout.agent``; it shadows a registered agent of that name.
        target: ``pkg.module:Class``, ``pkg.module:function``, ``path/to/file.py:Class``, or a registered name. Aliases:
            ``_target_``, ``class``.
        config: Its configuration. Further keys of the entry, as other tools write them, are part of it.
    """

    name: Annotated[str, Field(pattern=r"^[^:./]+$")]
    target: ConfigReference
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _spelled(cls, data: Any) -> Any:
        """Normalise aliases; beside ``_target_`` stand the arguments themselves."""
        if not isinstance(data, dict):
            return data
        if "_target_" in data:
            arguments = {key: value for key, value in data.items() if key not in ("name", "_target_", "config")}
            name_entry = {key: data[key] for key in ("name",) if key in data}
            return {**name_entry, "target": data["_target_"], "config": {**(data.get("config") or {}), **arguments}}
        return {("target" if key == "class" else key): value for key, value in data.items()}


class AgentFile(Section):
    """An ``agent_loop_config_path`` file: a list of agents, also under ``agents``."""

    agents: list[AgentEntry]


class SpecConfig(NamedConfig):
    """An environment by name and configuration.

    Attributes:
        tools: Tools besides those of its class.
        wrappers: Wrappers, innermost first: ``turn_limit``, ``shape_reward`` or ``pkg.module:Class``.
    """

    tools: ToolsConfig = ToolsConfig()
    wrappers: list[NamedConfig] = Field(default_factory=list)


class GroupRewardConfig(Section):
    """A reward function of all trajectories of a group. A text is its ``function``.

    Attributes:
        function: ``rank_by``, ``pairwise_judge``, ``pkg.module:function`` or ``path/to/file.py:function``.
        arguments: Of the constructor where it names a class, else keyword arguments of every call.
        weight: Factor of the returned rewards; 0 only logs them.
        in_evaluation: Whether it also applies in evaluation, where it then counts for ``success_reward``.
    """

    function: ConfigReference
    arguments: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, allow_inf_nan=False)
    in_evaluation: bool = False


class AddressConfig(Section):
    """The gateway's address for agents that speak a wire API.

    Attributes:
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        public_urls: Base URLs of proxies or load balancers in front of it; each episode gets the least used. By default
            host and port.
        lenient: What requests ask for in vain: ``tool_choice``, a forced call where the engine cannot force one;
            ``server_tools``, tools that the provider runs. Counted as ``ignored_...``; ``[]`` refuses both.
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    public_urls: list[Annotated[str, _checked_by(check_base)]] = Field(default_factory=list)
    lenient: list[Lenient] = Field(default=list(LENIENT))


class RemoteConfig(Section):
    """Episodes run in ``turnwise runner`` processes, which connect to the port of ``rollout.gateway``.

    Attributes:
        key_file: File of the runners' key; created, readable by its owner only, where missing.
    """

    key_file: ConfigPath


class RolloutConfig(Section):
    """How episodes are rolled out.

    Attributes:
        env: The environment, unless a task names its own.
        agent: The agent, unless a task names its own.
        sandbox: The sandbox backend of environments.
        address: Template of a session's address, with ``{base}`` (or ``{host}`` and ``{port}``), ``{token}``, and
            optionally ``{rollout_id}``, ``{attempt_id}`` and ``{session}``.
        gateway: The gateway's address.
        remote: Lets ``turnwise runner`` processes, with their own agents, run the episodes; ``agent`` is ignored. By
            default they run here.
        agent_loop_manager_class: A custom rollout manager: a registered name, ``pkg.module.Class``,
            ``pkg.module:Class`` or ``path/to/file.py:Class``.
        agent_loop_config_path: A YAML file of agents that tasks and ``agent`` may name besides the registered ones.
        group_size: Episodes per task, whose trajectories are compared.
        compare: Baseline of a session's reward within its group: ``role``, sessions of its role (its name up to the
            slash); ``agent``, those of its name; ``together``, all trained ones.
        temperature: Sampling temperature of training rollouts.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k likeliest tokens; 0 keeps all.
        min_p: Least share of the likeliest token's probability.
        sampling_mask: Where top-p, top-k, min-p or a grammar truncates: ``keep`` has the engine record what was kept,
            and trains under the distribution that was sampled from; ``full`` trains under the whole one.
        max_turns: Model calls per session; the episode then ends with ``max_turns``.
        max_tokens_per_turn: Most tokens of one completion.
        max_total_tokens: Most tokens of one session over all its branches, prompts included.
        context_length: Most tokens of prompt and completion; by default the server's limit.
        concurrency: Episodes that run at the same time.
        episode_timeout: Seconds after which an episode ends with ``timeout``.
        score_timeout: Seconds for scoring after the agent returned.
        retries: Retries of an episode after an infrastructure failure.
        min_members: The fewest members of a group without a failure in all attempts; a group with fewer is dropped, and
            the next task taken. With ``group_size`` only complete groups are trained.
        reasoning: Reasoning of earlier turns: ``keep`` leaves it in the prompt; ``template`` follows the chat template,
            and each turn where that drops some starts a branch (exact, at the cost of more tokens). Also in evaluation.
        echo: An assistant message that returns rewritten, with its call ids: ``same`` takes it as the sampled turn;
            ``strict`` as edited, which starts a branch.
        roles: Policy of an agent or role (``solver`` includes ``solver/0``): one of ``policies`` or ``frozen``. Others
            are played by ``main``.
        frozen: Further policies by name; their sessions are recorded and audited, never trained.
        group_reward: Rewards trajectories by comparison within their group.
        tree: Forks the episodes of training rollouts at some of their turns; by default none.
    """

    env: SpecConfig
    agent: NamedConfig = NamedConfig(name="react")
    sandbox: SandboxConfig = SandboxConfig()
    address: Annotated[str, _checked_by(check_template)] = DEFAULT_FORM
    gateway: AddressConfig = AddressConfig()
    remote: RemoteConfig | None = None
    agent_loop_manager_class: ConfigReference | None = None
    agent_loop_config_path: ConfigPath | None = None
    group_size: PositiveInt = 8
    compare: Compare = "role"
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    sampling_mask: Literal["keep", "full"] = "keep"
    max_turns: PositiveInt = 16
    max_tokens_per_turn: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    context_length: PositiveInt | None = None
    concurrency: PositiveInt = 128
    episode_timeout: Annotated[float, Field(gt=0)] | None = 1800.0
    score_timeout: Annotated[float, Field(gt=0)] = 600.0
    retries: Annotated[int, Field(ge=0)] = 2
    min_members: PositiveInt = 1
    reasoning: Literal["keep", "template"] = "keep"
    echo: Literal["same", "strict"] = "same"
    roles: dict[AgentName, PolicyName] = Field(default_factory=dict)
    frozen: dict[FrozenName, FrozenConfig] = Field(default_factory=dict)
    group_reward: Annotated[GroupRewardConfig | None, shorthand("function")] = None
    tree: TreeConfig | None = None

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if self.min_members > self.group_size:
            raise ValueError(
                f"min_members is {self.min_members}, but a group has {self.group_size} (group_size): no group could "
                "ever be trained"
            )
        if self.remote is not None and self.agent_loop_manager_class is not None:
            raise ValueError("either remote or agent_loop_manager_class: such a class distributes its episodes itself")
        if self.gateway.public_urls and "{base}" not in self.address:
            raise ValueError("gateway.public_urls only together with {base} in address, which inserts them")
        return self

    @model_validator(mode="after")
    def _trees_are_expanded_here(self) -> Self:
        if self.tree is None:
            return self
        elsewhere = {
            "remote": self.remote is not None,
            "agent_loop_manager_class": self.agent_loop_manager_class is not None,
            "group_reward": self.group_reward is not None,
        }
        if name := next((name for name, is_set in elsewhere.items() if is_set), None):
            why = "compares whole episodes" if name == "group_reward" else "runs agents elsewhere"
            raise ValueError(f"tree, but {name} {why}, whose branches it does not know: remove one of both")
        return self
