"""GymnasiumAdapter: environments of this package as Gymnasium environments, with message spaces."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar, cast, get_args

import gymnasium
import orjson

from turnwise.envs.core import Env, StepResult, as_messages, close_env, reset_env, schemas, score_env, step_env
from turnwise.envs.registration import EnvSpec, make, register_with_gymnasium
from turnwise.envs.results import check_one_agent, transcript
from turnwise.errors import EnvError, TaskError, shown, undo_on_error
from turnwise.tasks.core import Task, as_tool_call, message_record
from turnwise.tasks.reader import load_tasks
from turnwise.tasks.sources import TaskSource
from turnwise.tools.sample_arguments import random_arguments
from turnwise.types import Message, Role, ToolSchema

_ROLES: Final = frozenset(get_args(Role))
_WORDS: Final = "yes no one two left right up down hello answer north south 0 1 2 3 10 42".split()  # noqa: SIM905


class _MessageSpace(gymnasium.spaces.Space):  # type: ignore[misc]
    """Base of the spaces of messages."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: a message has no fixed length."""
        return False

    def _rng(self, mask: Any, probability: Any) -> random.Random:
        if mask is not None or probability is not None:
            raise ValueError("the message space takes neither a mask nor probabilities")
        return random.Random(int(self.np_random.integers(2**63)))


class ActionSpace(_MessageSpace):
    """Assistant messages: texts, or dicts with ``content`` and ``tool_calls``.

    A call is a :class:`~turnwise.types.ToolCall` or a dict with ``name`` and ``arguments``; missing ids are added.
    Samples are random words, or calls of the tools with random arguments.
    """

    def __init__(self, tools: Sequence[ToolSchema] = (), seed: int | None = None) -> None:
        super().__init__(seed)
        self.tools = tuple(tools)

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """Return a random message; refuses mask and probability with ValueError."""
        rng = self._rng(mask, probability)
        if self.tools and rng.random() < 0.5:
            tool = rng.choice(self.tools)
            arguments = random_arguments(tool, rng, _WORDS)
            if arguments is not None:
                call = {"id": "call_0", "name": tool.name, "arguments": arguments}
                return {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"role": "assistant", "content": " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))}

    def contains(self, x: Any) -> bool:
        """Whether :func:`as_message` takes it."""
        try:
            as_message(x)
        except EnvError:
            return False
        return True

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        """Return messages as JSON values."""
        return [message_record(as_message(action)) for action in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        """Invert :meth:`to_jsonable`."""
        return list(sample_n)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and other.tools == self.tools

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ActionSpace(tools={[tool.name for tool in self.tools]})"


class ObservationSpace(_MessageSpace):
    """Tuples of messages, each a dict of JSON values with a ``role``."""

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[dict[str, Any], ...]:
        """Return one to three random user messages; refuses mask and probability with ValueError."""
        rng = self._rng(mask, probability)
        return tuple(
            {"role": "user", "content": " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))}
            for _ in range(rng.randint(1, 3))
        )

    def contains(self, x: Any) -> bool:
        """Whether it is a tuple of messages that are JSON."""
        if not isinstance(x, tuple) or not all(
            isinstance(message, dict) and message.get("role") in _ROLES for message in x
        ):
            return False
        try:
            orjson.dumps(x)
        except (TypeError, orjson.JSONEncodeError):
            return False
        return True

    def to_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        """Return conversations as lists."""
        return [list(observation) for observation in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        """Invert :meth:`to_jsonable`."""
        return [tuple(observation) for observation in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObservationSpace)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "ObservationSpace()"


def as_message(action: Any) -> Message:
    """Return an action as an assistant message."""
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    if not isinstance(action, Mapping) or action.get("role", "assistant") != "assistant":
        raise EnvError(f"an action is a string or an assistant message, not {shown(action)}")
    content = action.get("content", "")
    if content is not None and not isinstance(content, (str, list)):
        raise EnvError(f"an action's content is {shown(content)}: it must be a string, a list of parts or None")
    calls = action.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise EnvError(f"an action's tool_calls are {shown(calls)}: they must be a list")
    message = cast("Message", {**action, "role": "assistant", "content": content})
    message.pop("tool_calls", None)
    if calls:
        try:
            tool_calls = [as_tool_call(call, f"tool_calls[{n}]", f"call_{n}") for n, call in enumerate(calls)]
        except TaskError as error:
            raise EnvError(f"an action: {error}") from error
        message["tool_calls"] = tool_calls
    return message


T = TypeVar("T")

MOST_TASKS: Final = 1_000
"""Default number of tasks that are read from a source and drawn from."""
_TIMES: Final = "seconds"


class _Loop:
    """An event loop in its own thread, usable from inside a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turnwise-gymnasium", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end_loop, self._loop, self._thread)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        # Ctrl-C interrupts the waiting thread: the awaited work must not continue in the background.
        with undo_on_error(running.cancel):
            return running.result()

    def close(self) -> None:
        self._end()


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5.0)
    if not thread.is_alive():
        loop.close()


class GymnasiumAdapter(gymnasium.Env):  # type: ignore[misc]
    """An environment of this package as a Gymnasium environment.

    An observation is a tuple of messages (dicts of JSON values), an action a text or an assistant message. Rewards,
    ``terminated`` and ``truncated`` are the environment's own; on truncation the score is added to the step's reward,
    since Gymnasium has no other place for it.

    Attributes:
        observation_space: Tuples of messages.
        action_space: Assistant messages; samples call the environment's tools.
        conversation: All messages of the running episode, actions included.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        env: str | EnvSpec | Env | Callable[[], Env],
        *,
        tasks: TaskSource | None = None,
        max_tasks: int = MOST_TASKS,
        render_mode: str | None = None,
        **config: Any,
    ) -> None:
        """Wrap an environment.

        Args:
            env: A registered name or reference, a spec, an environment, or a factory.
            tasks: Tasks that resets draw from; by default the environment's own, if any.
            max_tasks: Most tasks read.
            render_mode: ``ansi`` for the conversation as text, or None.
            **config: Keyword arguments of its constructor, where ``env`` is a name.

        Raises:
            RegistryError: The environment is unknown, or refuses the configuration.
            TaskError: The tasks cannot be read, or there are none.
            EnvError: Arguments were given to an existing environment, or the render mode is unknown.
        """
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise EnvError(f"render_mode is {render_mode!r}: it must be 'ansi' (the conversation as text) or None")
        self.render_mode = render_mode
        self._env = _make_env(env, config)
        self._tasks = _tasks(self._env, tasks, max_tasks)
        self._loop: _Loop | None = None
        self._open = True
        self.observation_space = ObservationSpace()
        self.action_space = ActionSpace(schemas(self._env))
        self.conversation: list[Message] = []

    @property
    def env(self) -> Env:
        """The wrapped environment."""
        return self._env

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Seeds all later draws, as in Gymnasium: tasks and environment seeds.
            options: ``task`` names the task: a Task, a row, an id, or its index.

        Returns:
            The head of the conversation, and the environment's info with ``task_id``.

        Raises:
            EnvError: The environment raised, broke its contract or has several agents.
            TaskError: ``options["task"]`` is unknown.
        """
        super().reset(seed=seed)
        random_seed = int(self.np_random.integers(2**31))
        task = self._task((options or {}).get("task"))
        messages, info = self._run(reset_env(self._env, task, seed=random_seed if seed is None else seed))
        check_one_agent(info, self._env, "the player of a Gymnasium environment")
        self.action_space.tools = tuple(schemas(self._env))
        self.conversation = list(messages)
        return self._observed(messages), {**_comparable(info), "task_id": None if task is None else task.id}

    def step(self, action: Any) -> tuple[tuple[dict[str, Any], ...], float, bool, bool, dict[str, Any]]:
        """Take an action.

        Args:
            action: A text or an assistant message.

        Raises:
            EnvError: It is invalid, or the environment raised or broke its contract.
        """
        message = as_message(action)
        self.conversation.append(message)
        result: StepResult = self._run(step_env(self._env, message))
        reward, info = result.reward, dict(result.info)
        if result.truncated and not result.terminated:
            parts: dict[str, float] = self._run(score_env(self._env, None))
            info["rewards"] = {**(info.get("rewards") or {"step": reward}), **parts}
            reward += sum(parts.values())
        messages = as_messages(result.observation)
        self.conversation += messages
        observed = self._observed(messages)
        return observed, float(reward), result.terminated, result.truncated, _comparable(info)

    def render(self) -> str | None:
        """Return the conversation as text, in the render mode ``ansi``."""
        if self.render_mode is None:
            return None
        return transcript(self.conversation)

    def close(self) -> None:
        """Close the environment and end its event loop. Idempotent."""
        if not self._open:
            return
        try:
            # Before the first reset too: a constructor may have opened something.
            self._run(close_env(self._env))
        finally:
            self._open = False
            if self._loop is not None:
                self._loop.close()
                self._loop = None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._open = True
        if self._loop is None:
            self._loop = _Loop()
        return self._loop.run(work)

    def _task(self, option: Any) -> Task | None:
        if option is None:
            return self._tasks[int(self.np_random.integers(len(self._tasks)))] if self._tasks else None
        if isinstance(option, Task):
            return option
        if isinstance(option, dict):
            return Task.from_record(option, where="options['task']", default_id="options")
        named = next((task for task in self._tasks if task.id == option), None)
        if named is not None:
            return named
        if isinstance(option, int) and not isinstance(option, bool) and 0 <= option < len(self._tasks):
            return self._tasks[option]
        raise TaskError(
            f"options['task'] is {shown(option)}: there are {len(self._tasks)} tasks; give a number below that, an id, "
            "a Task or a row"
        )

    def _observed(self, messages: list[Message]) -> tuple[dict[str, Any], ...]:
        # JSON and back: the returned value is a copy without objects.
        try:
            observed: list[dict[str, Any]] = orjson.loads(
                orjson.dumps([message_record(message) for message in messages])
            )
        except TypeError as error:
            raise EnvError(f"{type(self._env).__qualname__}: an observation is not JSON: {error}") from error
        return tuple(observed)


def to_gymnasium(env: str | EnvSpec | Env | Callable[[], Env], **options: Any) -> GymnasiumAdapter:
    """Wrap an environment; the arguments are those of :class:`GymnasiumAdapter`."""
    return GymnasiumAdapter(env, **options)


def _make_env(env: str | EnvSpec | Env | Callable[[], Env], config: dict[str, Any]) -> Env:
    if isinstance(env, str):
        return make(env, **config)
    if config:
        raise EnvError(
            f"configuration {config} was given beside {shown(env)}: it applies to an environment's name only"
        )
    instance = env if isinstance(env, Env) else env.make() if isinstance(env, EnvSpec) else env()
    if not isinstance(instance, Env):
        raise EnvError(f"{shown(env)} made {shown(instance)}: it must make an environment (a turnwise.Env)")
    return instance


def _tasks(env: Env, source: TaskSource | None, limit: int) -> list[Task]:
    source = env.default_tasks if source is None else source
    if source is None:
        return []
    loaded = load_tasks(source, limit=limit)
    if not loaded:
        raise TaskError(f"tasks={source!r}: it contains no tasks")
    return loaded


def _comparable(info: dict[str, Any]) -> dict[str, Any]:
    """Return an info without times in its metrics: Gymnasium compares infos of equal episodes."""
    metrics = info.get("metrics")
    if not metrics:
        return dict(info)
    return {**info, "metrics": {name: value for name, value in metrics.items() if not name.endswith(_TIMES)}}


register_with_gymnasium()
