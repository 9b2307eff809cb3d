"""Driver of Inspect (inspect-ai): the samples of a task, played by its own solver, tools and sandbox, with its scorers.

Inspect runs the loop: one evaluation a task lasts as long as the worker, and an episode is a sample that is added to
it. Its model is ours: a completion that the solver asks for is an observation, and the message of a step is the
completion. Needs a process of its own: Inspect runs one evaluation in a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise_foreign.core import Failure, check_installed, framework, text_of

PACKAGE = "inspect-ai"
_PROVIDER = "turnwise"
_AT_ONCE = 100_000


def names() -> list[str]:
    """Return nothing: what there is, only files and packages say."""
    check_installed("inspect_ai")
    return []


def load(name: str, kwargs: dict[str, Any], system_prompt: str | None) -> InspectTask:
    """Return a task of a file (``path/to/file.py@task``) or a package (``package/task``).

    ``scorer`` of the arguments names the scorer that is the reward, where the task has several; the others are its own.
    """
    if system_prompt is not None:
        raise ValueError("system_prompt is set, but an Inspect task has its own messages: set it to null")
    arguments = dict(kwargs)
    scorer = arguments.pop("scorer", None)
    return InspectTask(_task(name, arguments), scorer)


def _task(name: str, arguments: dict[str, Any]) -> Any:
    framework("inspect_ai")
    path, _, attribute = name.partition("@")
    if not path.endswith(".py"):
        try:
            return framework("inspect_ai.util").registry_create("task", name, **arguments)
        except (LookupError, ValueError) as error:
            raise Failure("config", f"{error}: name path/to/file.py@task, or package/task") from error
    file = Path(path).absolute()
    if not file.is_file():
        raise Failure("config", f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"inspect_task_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    function = getattr(module, attribute, None)
    if not callable(function):
        is_task = framework("inspect_ai._util.registry").is_registry_object
        tasks = [name for name, value in vars(module).items() if is_task(value, type="task")]
        raise Failure("config", f"{file} has no task {attribute!r}; it has {', '.join(tasks)}: write {path}@TASK")
    return function(**arguments)


class InspectTask:
    """A task, and the evaluation that its episodes are samples of."""

    def __init__(self, task: Any, scorer: str | None) -> None:
        self._task = task
        self._rows = list(task.dataset)
        info = framework("inspect_ai._util.registry").registry_unqualified_name
        scorers = [info(function) for function in task.scorer or []]
        if not scorers:
            raise ValueError("the task has no scorer, so it has no reward")
        if scorer is None and len(scorers) > 1:
            raise ValueError(f"the task has the scorers {', '.join(scorers)}: name the reward: kwargs.scorer")
        if scorer is not None and scorer not in scorers:
            raise ValueError(f"scorer is {scorer!r}; the task has {', '.join(scorers)}")
        self.scorer = scorer or scorers[0]
        self._evaluation: Evaluation | None = None

    def tasks(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """Return rows of its dataset."""
        if split != "train":
            raise Failure(
                "config", f"split is {split!r}: a task has one dataset (train); split it by split and test_fraction"
            )
        rows = range(start, min(start + count, len(self._rows)))
        return [{"prompt": _input(self._rows[row]), "data": {"sample": row}} for row in rows]

    def sample(self, data: Mapping[str, Any] | None, seed: int | None) -> Any:
        """Return the sample of a task's data, or one of the seed."""
        row = (data or {}).get("sample", (seed or 0) % len(self._rows))
        if not 0 <= row < len(self._rows):
            raise Failure("raised", f"there is no sample {row}; the dataset has {len(self._rows)}")
        return self._rows[row]

    def evaluation(self) -> Evaluation:
        """Return the evaluation, which is begun at first."""
        if self._evaluation is None:
            self._evaluation = Evaluation(self._task)
        if self._evaluation.ended:
            raise Failure("raised", f"the evaluation of the task ended: {self._evaluation.why()}")
        return self._evaluation

    def episode(self) -> SampleEpisode:
        """Return an episode."""
        return SampleEpisode(self)


class Evaluation:
    """An evaluation without an end, whose samples are the episodes."""

    _numbers = itertools.count(1)

    def __init__(self, task: Any) -> None:
        inspect = framework("inspect_ai")
        framework("inspect_ai.util._display").init_display_type("none")
        self.playing: dict[str, SampleEpisode] = {}
        self._idle: asyncio.Future[list[Any]] | None = None
        self._inside: contextvars.Context | None = None
        self._early: list[Any] = []
        source = _model_source(inspect, self)
        model = framework("inspect_ai.model").get_model(f"{_PROVIDER}/policy", memoize=False, episodes=self.playing)
        self._logs = tempfile.TemporaryDirectory(prefix="turnwise-inspect-")
        self._running = asyncio.ensure_future(
            inspect.eval_async(
                inspect.task_with(task, dataset=source),
                model=model,
                epochs=1,
                fail_on_error=False,
                max_samples=_AT_ONCE,
                log_dir=self._logs.name,
                log_samples=False,
                log_realtime=False,
                score_display=False,
                acp_server=False,
                ctl_server=False,
            )
        )
        self._running.add_done_callback(self._end)

    @property
    def ended(self) -> bool:
        """Whether it ended, which it does by an error only."""
        return bool(self._running.done())

    def why(self) -> str:
        """Return why it ended."""
        if self._running.cancelled():
            return "it was cancelled"
        error = self._running.exception()
        if error is not None:
            return f"{type(error).__name__}: {error}"
        logs = self._running.result()
        return str(logs[0].error.message if logs and logs[0].error else "no reason given")

    def add(self, episode: SampleEpisode, sample: Any) -> str:
        """Add a sample for an episode; return its id."""
        name = f"{sample.id}-{next(self._numbers)}"
        self.playing[name] = episode
        added = sample.model_copy(update={"id": name}, deep=True)
        if self._idle is not None and not self._idle.done():
            self._idle.set_result([added])
        elif self._inside is not None:
            # Inspect takes samples from the context of its task only.
            self._inside.run(framework("inspect_ai").enqueue_sample, added)
        else:
            self._early.append(added)
        return name

    async def more(self) -> list[Any]:
        """Return the samples to run next; waits for one."""
        self._inside = contextvars.copy_context()
        if self._early:
            early, self._early = self._early, []
            return early
        self._idle = asyncio.get_running_loop().create_future()
        return await self._idle

    async def complete(self, sample: Any) -> None:
        """Give an episode its finished sample."""
        episode = self.playing.pop(str(sample.id), None)
        if episode is not None:
            episode.finish(sample)

    def _end(self, _: Any) -> None:
        for episode in self.playing.values():
            episode.fail(f"the evaluation of the task ended: {self.why()}")
        self.playing.clear()
        self._logs.cleanup()


class SampleEpisode:
    """One episode: a sample, whose solver waits for completions."""

    def __init__(self, task: InspectTask) -> None:
        self._task = task
        self._sample = ""
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._completion: asyncio.Future[Any] | None = None
        self._conversation: list[str] = []
        self._tools: list[dict[str, Any]] = []
        self._last: Mapping[str, Any] | None = None
        self._over = False

    async def reset(self, data: Mapping[str, Any] | None, seed: int | None) -> dict[str, Any]:
        """Begin the sample; its first request is the observation."""
        sample = self._task.sample(data, seed)
        self._evaluation = self._task.evaluation()
        self._sample = self._evaluation.add(self, sample)
        kind, event = await self._next_event()
        if kind != "asked":
            raise Failure("raised", "the solver ended the sample without a request to the model")
        messages, self._tools = event
        self._conversation = [_key(message) for message in messages]
        return {"messages": [_plain(message) for message in messages], "tools": self._tools}

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Give the message to the solver as its completion; the next request, or the end, is the observation."""
        self._answer(message)
        kind, event = await self._next_event()
        if kind == "asked":
            messages, tools = event
            return {
                "messages": self._new_messages(messages, tools),
                "reward": 0.0,
                "terminated": False,
                "truncated": False,
            }
        return {"messages": [], **self._scored(event), "terminated": not event.limit, "truncated": bool(event.limit)}

    async def score(self, message: Mapping[str, Any] | None) -> dict[str, float]:
        """End the sample as a limit of Inspect's does, and return what its scorer says of what there is."""
        if message is not None and message != self._last and self._completion is not None:
            self._answer(message)
            kind, event = await self._next_event()
            if kind == "ended":
                return dict(self._scored(event)["rewards"])
        limit = framework("inspect_ai.util").LimitExceededError("custom", value=1, limit=1, message="cut off")
        if self._completion is not None and not self._completion.done():
            self._completion.set_exception(limit)
        _, event = await self._next_event()
        return dict(self._scored(event)["rewards"])

    async def close(self) -> None:
        """End the sample without a score."""
        playing = self._sample and self._evaluation.playing.pop(self._sample, None) is not None
        if playing and self._completion is not None and not self._completion.done():
            self._completion.set_exception(RuntimeError("the episode was closed"))

    async def ask(self, messages: list[Any], tools: list[Any]) -> Any:
        """Return the completion of a request of the solver."""
        if self._completion is not None and not self._completion.done():
            raise RuntimeError("its solver makes two requests at the same time: an episode has one conversation")
        self._completion = asyncio.get_running_loop().create_future()
        self._events.put_nowait(("asked", (messages, [_tool(tool) for tool in tools])))
        return await self._completion

    def finish(self, sample: Any) -> None:
        """Note the end of the sample."""
        self._events.put_nowait(("ended", sample))

    def fail(self, why: str) -> None:
        """Note that there is no end to come."""
        self._events.put_nowait(("failed", why))

    async def _next_event(self) -> tuple[str, Any]:
        if self._over:
            raise Failure("raised", "the sample is over")
        kind, event = await self._events.get()
        self._over = kind != "asked"
        return kind, event

    def _answer(self, message: Mapping[str, Any]) -> None:
        if self._completion is None or self._completion.done():
            raise Failure("raised", "the sample is over")
        self._last = message
        answer = _assistant(message)
        self._conversation.append(_key(answer))
        self._completion.set_result(answer)

    def _new_messages(self, messages: list[Any], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        keys = [_key(message) for message in messages]
        count = len(self._conversation)
        if keys[:count] != self._conversation:
            at = next(
                (at for at, pair in enumerate(zip(keys, self._conversation, strict=False)) if pair[0] != pair[1]),
                len(keys),
            )
            raise Failure(
                "raised", f"its solver changed the conversation at message {at + 1}: an episode only adds to it"
            )
        if tools != self._tools:
            raise Failure("raised", "its solver changed the tools in the middle of the conversation")
        self._conversation = keys
        return [_plain(message) for message in messages[count:]]

    def _scored(self, sample: Any) -> dict[str, Any]:
        if isinstance(sample, str):
            raise Failure("raised", sample)
        if sample.error is not None:
            raise Failure("raised", f"the sample failed: {sample.error.message}")
        if not sample.scores or self._task.scorer not in sample.scores:
            raise Failure("raised", f"the sample has no score of {self._task.scorer}")
        scores = dict(sample.scores)
        reward = _number(scores.pop(self._task.scorer).value)
        metrics = {}
        for name, score in scores.items():
            with contextlib.suppress(Failure):
                metrics[name] = _number(score.value)
        return {"reward": reward, "rewards": {self._task.scorer: reward}, "metrics": metrics}


def _number(value: Any) -> float:
    """Return a score as Inspect's number. Raises Failure where Inspect only warns and takes it as 0."""
    number: float = framework("inspect_ai.scorer").value_to_float()(value)
    is_number = framework("inspect_ai._util.text").is_finite_number
    zeros = ("i", "n", "no", "false")
    is_word = isinstance(value, str) and number == 0.0 and value.lower() not in zeros and not is_number(value)
    if is_word or isinstance(value, (Mapping, list)):
        raise Failure("raised", f"the score is {value!r}: it must be one number, or a word that Inspect has one for")
    return number


def _model_source(inspect: Any, evaluation: Evaluation) -> Any:
    class Episodes(inspect.SampleSource):  # type: ignore[misc]
        async def next_samples(self) -> list[Any]:
            return await evaluation.more()

        async def sample_complete(self, sample: Any) -> None:
            await evaluation.complete(sample)

    _register_model()
    return Episodes()


def _register_model() -> None:
    """Register the model whose completions are the messages of episodes."""
    models = framework("inspect_ai.model")

    @models.modelapi(name=_PROVIDER)
    class Policy(models.ModelAPI):  # type: ignore[misc, name-defined]
        def __init__(self, model_name: str, *_: Any, episodes: dict[str, SampleEpisode], **more: Any) -> None:
            super().__init__(model_name, config=more.get("config") or models.GenerateConfig())
            self._episodes = episodes

        async def generate(self, input: list[Any], tools: list[Any], tool_choice: Any, config: Any) -> Any:  # noqa: A002
            state = framework("inspect_ai.solver._task_state").sample_state()
            message = await self._episodes[str(state.sample_id)].ask(input, tools)
            output = models.ModelOutput.from_message(message)
            # Inspect counts tokens that are not told, with a vocabulary that it downloads.
            output.usage = models.ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
            return output

        def max_connections(self) -> int:
            return _AT_ONCE


def _input(sample: Any) -> str:
    return sample.input if isinstance(sample.input, str) else "\n".join(message.text for message in sample.input)


def _tool(info: Any) -> dict[str, Any]:
    return {
        "name": info.name,
        "description": info.description,
        "parameters": info.parameters.model_dump(exclude_none=True, mode="json"),
    }


def _assistant(message: Mapping[str, Any]) -> Any:
    models, tool = framework("inspect_ai.model"), framework("inspect_ai.tool")
    calls = [
        tool.ToolCall(
            id=call["id"], function=call["name"], arguments=call["arguments"] or {}, parse_error=call.get("error")
        )
        for call in message.get("tool_calls") or ()
    ]
    return models.ChatMessageAssistant(content=text_of(message), tool_calls=calls or None)


def _plain(message: Any) -> dict[str, Any]:
    """Return a message of Inspect's as one of ours."""
    text = message.text
    if message.role == "tool":
        text = f"Error: {message.error.message}" if message.error else text
        return {"role": "tool", "tool_call_id": message.tool_call_id, "name": message.function, "content": text}
    plain: dict[str, Any] = {"role": message.role, "content": text}
    if message.role == "assistant" and message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "name": call.function, "arguments": call.arguments} for call in message.tool_calls
        ]
    return plain


def _key(message: Any) -> str:
    """Return what makes a message the same: its role, text and calls."""
    plain = _plain(message)
    if plain.get("role") == "assistant":
        plain["content"] = plain["content"].strip()
    return json.dumps(plain, sort_keys=True, default=repr)
