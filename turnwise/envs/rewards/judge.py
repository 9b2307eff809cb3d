"""Generative judges: a chat model grades an answer."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import jinja2
import jinja2.sandbox
import orjson
from pydantic import Field, NonNegativeInt, PositiveFloat

from turnwise.envs.core import Env
from turnwise.envs.results import transcript
from turnwise.envs.rewards.core import RewardFunction
from turnwise.envs.rewards.endpoint import Endpoint, EndpointError, EndpointOptions, PolicyOptions, read_options
from turnwise.envs.rewards.matching import gold_answers
from turnwise.errors import ConfigError, EnvError, shown, user_code
from turnwise.tasks.core import Task
from turnwise.types import Guide, Message, SamplingParams, text_of

Verdict: TypeAlias = dict[str, Any]
ReadVerdict: TypeAlias = Callable[[str, str], Verdict]
"""From what a judge wrote, and the material that it judged, to its verdict. Raises ValueError where it is none."""

_REFUSED_FORM = frozenset((400, 415, 422, 501))
_THOUGHT = re.compile(r"<think>.*?</think>|\A\s*<think>.*", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*\n(.*)```", re.DOTALL | re.IGNORECASE)
# What chat templates write between messages, which servers read as such in a message, too.
_CONTROL = re.compile(
    r"<(?=[|｜][^<>\s]{1,40}[|｜]>|/?(?:s|think)>|(?:start|end)_of_turn>|[be]os>|</?SYS>>)"
    r"|\[(?=\|\w+\|\]|/?(?:INST|SYSTEM_PROMPT)\])"
)


class _Reply(NamedTuple):
    """A model's text, and whether a length limit cut it."""

    text: str
    cut: bool


class AskOptions(EndpointOptions, PolicyOptions):
    """Request options of a judge behind an API, beside those of a policy.

    Attributes:
        extra_body: Further fields of each request.
        cache_size: Verdicts kept in memory.
    """

    timeout: PositiveFloat = 120.0
    retries: NonNegativeInt = 5
    retry_wait: PositiveFloat = 1.0
    extra_body: dict[str, Any] = Field(default_factory=dict)
    cache_size: NonNegativeInt = 65536


class _Questions:
    """Asks for verdicts of one form until one parses."""

    def __init__(self, schema: Mapping[str, Any], read: ReadVerdict, options: PolicyOptions, label: str) -> None:
        self._schema, self._read, self._label = schema, read, label
        self._options = options

    async def _ask_until_read(
        self,
        complete: Callable[[list[Message]], Awaitable[_Reply]],
        question: str,
        material: str,
        redact: Callable[[str], str] = str,
    ) -> Verdict:
        attempts, max_tokens = self._options.attempts, self._options.max_tokens
        first: Message = {"role": "user", "content": question}
        messages, answer, why = [first], "", ""
        for _ in range(attempts):
            answer, cut = await complete(messages)
            try:
                if cut:
                    # What was quoted or weighed before the end must not pass for the verdict.
                    raise ValueError(f"it was truncated at max_tokens ({max_tokens})")
                return self._read(_THOUGHT.sub("", answer), material)
            except ValueError as error:
                why = str(error)
                form = orjson.dumps(self._schema).decode()
                correction = f"That is not a verdict: {why}. Answer only with one JSON object of this schema: {form}"
                messages = [
                    first,
                    {"role": "assistant", "content": answer[-4000:]},
                    {"role": "user", "content": correction},
                ]
        tries = "1 try" if attempts == 1 else f"{attempts} tries"
        problem = redact(f"{why}; the last answer was {shown(answer, 200)}")
        raise EnvError(f"{self._label} returned no verdict in {tries}: {problem}")


class PolicyVerdicts(_Questions):
    """Requests verdicts from a frozen policy of the run; each is a session of the episode that is judged."""

    def __init__(self, policy: str, schema: Mapping[str, Any], read: ReadVerdict, arguments: Mapping[str, Any]) -> None:
        """Name the policy; the other arguments are those of :class:`Verdicts`, with :class:`PolicyOptions`."""
        options: PolicyOptions = read_options(PolicyOptions, arguments, f"judge of the policy {policy!r}")
        super().__init__(schema, read, options, f"judge: the policy {policy!r}")
        self._policy = policy
        guide = None if options.structured == "never" else Guide(dict(schema))
        self._params = SamplingParams(options.temperature, max_tokens=options.max_tokens, guide=guide)

    async def ask(self, question: str, material: str, env: Env | None) -> tuple[Verdict, bool]:
        """Return the verdict on a question about some material, asked in the environment's episode; never cached."""
        if env is None or env.open_judge is None:
            raise EnvError(f"{self._label} is served by no run here: give base_url and model instead")
        session = env.open_judge(self._policy, self._params)

        async def complete(messages: list[Message]) -> _Reply:
            answer = await session.chat(messages)
            return _Reply(text_of(answer), answer.get("finish_reason") == "length")

        return await self._ask_until_read(complete, question, material), False


class Verdicts(_Questions):
    """Requests verdicts of one form from a chat model, once for each question."""

    def __init__(
        self, base_url: str, model: str, schema: Mapping[str, Any], read: ReadVerdict, arguments: Mapping[str, Any]
    ) -> None:
        """Configure the model.

        Args:
            base_url: Of an OpenAI-compatible API; ``/chat/completions`` is appended.
            model: Name of the model.
            schema: JSON schema of a verdict; sent as ``response_format`` where the server takes it.
            read: Parses a verdict.
            arguments: Request options: the fields of :class:`AskOptions`.
        """
        options = read_options(AskOptions, arguments, "judge")
        if not isinstance(model, str) or not model:
            raise ConfigError(f"judge: model is {shown(model)}: it must be the name of a model")
        endpoint = Endpoint(base_url, options, what="judge")
        super().__init__(schema, read, options, f"{endpoint.name} ({model})")
        self._endpoint = endpoint
        self._body: dict[str, Any] = {
            "model": model,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            **options.extra_body,
        }
        self._structured = options.structured != "never"
        self._may_drop = options.structured == "auto"
        self._cache_size = options.cache_size
        self._cache: OrderedDict[str, Verdict] = OrderedDict()
        self._asking: dict[tuple[int, str], asyncio.Task[Verdict]] = {}

    async def ask(self, question: str, material: str, env: Env | None = None) -> tuple[Verdict, bool]:  # noqa: ARG002
        """Return the verdict on a question about some material, and whether it was cached."""
        key = self._key(question)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key], True
        running = (id(asyncio.get_running_loop()), key)
        task = self._asking.get(running)
        shared = task is not None
        if task is None:
            task = self._asking[running] = asyncio.create_task(self._ask(question, material, key))
            task.add_done_callback(lambda done: self._ended(running, done))
        # Shielded: one waiter may be cancelled while others wait for the same verdict.
        return await asyncio.shield(task), shared

    async def close(self) -> None:
        """Close this event loop's connections."""
        await self._endpoint.close()

    def _ended(self, running: tuple[int, str], task: asyncio.Task[Verdict]) -> None:
        self._asking.pop(running, None)
        # Retrieved here, as every waiter may have been cancelled.
        _ = task.cancelled() or task.exception()

    async def _ask(self, question: str, material: str, key: str) -> Verdict:
        verdict = await self._ask_until_read(self._complete, question, material, self._endpoint.redact)
        self._keep(key, verdict)
        return verdict

    async def _complete(self, messages: list[Message]) -> _Reply:
        body = {**self._body, "messages": messages}
        if self._structured:
            form = {"name": "verdict", "schema": self._schema, "strict": True}
            try:
                return self._read_reply(
                    await self._endpoint.post(
                        "/chat/completions", {**body, "response_format": {"type": "json_schema", "json_schema": form}}
                    )
                )
            except EndpointError as error:
                if not self._may_drop or error.status not in _REFUSED_FORM:
                    raise
        answer = await self._endpoint.post("/chat/completions", body)
        # Where it had a form, the server refused that: the same request without it went through.
        self._structured = False
        return self._read_reply(answer)

    def _read_reply(self, answer: Any) -> _Reply:
        try:
            content = answer["choices"][0]["message"]["content"]
            cut = answer["choices"][0].get("finish_reason") == "length"
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            text = self._endpoint.redact(shown(answer, 200))
            raise EnvError(f"{self._label} returned no choices[0].message.content: {text}") from error
        return _Reply(content if isinstance(content, str) else "", cut)

    def _key(self, question: str) -> str:
        identity = [self._endpoint.name, self._body, self._schema, question]
        return hashlib.blake2b(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()

    def _keep(self, key: str, verdict: Verdict) -> None:
        self._cache[key] = verdict
        self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


_TEMPLATE: Final = Path(__file__).with_name("judge.jinja").read_text("utf-8")
_CRITERIA: Final = "A good answer does what was asked, is correct, and says nothing that is not so."
_SCORE: Final = re.compile(r"[\"']?\bscore\b[\"']?\s*[:=]\s*[\"']?(-?\d+(?:\.\d+)?)(?![\d%]|[.,]\d)", re.IGNORECASE)


class Question:
    """A sandboxed jinja template of a judge's question.

    The filter ``inside("name")`` puts a text between tags ``<name-DIGEST>``, which the text cannot close, and breaks
    control tokens of chat templates in it.
    """

    def __init__(self, template: str | None, template_file: str | None, default: str) -> None:
        """Compile a template.

        Args:
            template: Its text.
            template_file: A file with its text.
            default: The default text.
        """
        if template is not None and template_file is not None:
            raise ConfigError("judge: template and template_file are both given: keep one of them")
        where = "template" if template_file is None else f"template_file {template_file}"
        if template_file is not None:
            try:
                template = Path(template_file).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"judge: {where} cannot be read: {error}") from error
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["inside"] = _inside
        try:
            self._template = environment.from_string(default if template is None else template)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"judge: {where} is not a template (line {error.lineno}: {error.message})") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Render the question."""
        with user_code(EnvError, "judge: the template raised"):
            return self._template.render(values)


def _inside(text: Any, name: str) -> str:
    # No text can hold its own digest. A model reads </ANSWER>, < / answer > and a full-width sign as the end, too.
    tag = f"{name}-{hashlib.blake2b(str(text).encode('utf-8', 'replace'), digest_size=8).hexdigest()}"
    escaped = re.sub(rf"[<＜](?=[^\w<＜]*[/／][^\w<＜]*{re.escape(name)})", "<\\\\", str(text), flags=re.IGNORECASE)
    return f"<{tag}>\n" + _CONTROL.sub(r"\g<0>\\", escaped) + f"\n</{tag}>"


def read_statement(text: str, name: str, mark: re.Pattern[str], material: str) -> Any:
    """Return a member of a JSON object that is all of a reply, else what a reply states in another form.

    Args:
        text: The reply.
        name: The member.
        mark: Finds what is stated in another form.
        material: The judged text.

    Raises:
        ValueError: The reply states several, or what the judged text states, and may quote it.
    """
    fence = _FENCE.fullmatch(text.strip())
    try:
        value = orjson.loads(fence[1] if fence else text)
    except orjson.JSONDecodeError:
        stated = set(mark.findall(text))
        if len(stated) > 1 or stated.intersection(mark.findall(material)):
            raise ValueError(f"it is no JSON object, and may quote a {name}") from None
        return next(iter(stated), None)
    return value.get(name) if isinstance(value, dict) else None


class Judge(RewardFunction):
    """A chat model's grade of the answer, scaled to [0, 1].

    Equal questions are asked once; the metric ``cached`` marks repeats.
    """

    # Tries, their waits and a rate limit take their time.
    timeout: ClassVar[float | None] = 600.0

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        policy: str | None = None,
        criteria: str = _CRITERIA,
        template: str | None = None,
        template_file: str | None = None,
        column: str | None = None,
        low: float = 0.0,
        high: float = 10.0,
        without_answer: float = 0.0,
        **options: Any,
    ) -> None:
        """Configure the judge.

        Args:
            base_url: Of an OpenAI-compatible API: ``/chat/completions`` is appended.
            model: Name of the model.
            policy: Instead of both: a policy of ``rollout.frozen``, which the run serves. Its turns are recorded in a
                session of the episode, ``reward/POLICY.N``.
            criteria: Criteria of a good answer, for the template.
            template: A jinja template of the question; it sees ``task``, ``data``, ``conversation``, ``messages``,
                ``answer``, ``reference``, ``criteria``, ``low`` and ``high``.
            template_file: A file with the template.
            column: Entry of ``task.data`` for ``reference``.
            low: The worst grade, worth 0.
            high: The best grade, worth 1.
            without_answer: Value of an episode without a final message, which is not judged.
            **options: Key, tries, rate and cache: the fields of :class:`AskOptions`, or :class:`PolicyOptions`.
        """
        for name, value in (("low", low), ("high", high)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"judge: {name} is {shown(value)}: it must be a finite number")
        if low >= high:
            raise ConfigError(f"judge: low is {low:g} and high is {high:g}: low must be less")
        self._low, self._high = low, high
        self._criteria, self._column, self._without = criteria, column, without_answer
        self._question = Question(template, template_file, _TEMPLATE)
        if policy is not None and (base_url, model) != (None, None):
            raise ConfigError(
                f"judge: policy is {policy!r}, and base_url or model is set: give either policy, or base_url and model"
            )
        form = _schema(low, high), self._read
        self._verdicts: Verdicts | PolicyVerdicts = (
            Verdicts(base_url or "", model or "", *form, options)
            if policy is None
            else PolicyVerdicts(policy, *form, options)
        )

    async def __call__(
        self,
        task: Task | None,
        final: Message | None,
        text: str,
        messages: list[Message],
        data: Mapping[str, Any],
        env: Env | None = None,
    ) -> tuple[float, dict[str, float]]:
        """Grade the answer."""
        if final is None:
            return self._without, {"cached": 0.0}
        history = messages[:-1] if messages and messages[-1] is final else messages
        reference = None
        if self._column is not None:
            reference = "\n".join(str(answer) for answer in gold_answers(data, self._column, "judge"))
        question = self._question.render(
            {
                "task": task,
                "data": data,
                "messages": messages,
                "conversation": transcript(history),
                "answer": text,
                "reference": reference,
                "criteria": self._criteria,
                "low": f"{self._low:g}",
                "high": f"{self._high:g}",
            }
        )
        verdict, cached = await self._verdicts.ask(question, f"{transcript(history)}\n{text}", env)
        return (verdict["score"] - self._low) / (self._high - self._low), {"cached": float(cached)}

    async def close(self) -> None:
        """Close this event loop's connections."""
        if isinstance(self._verdicts, Verdicts):
            await self._verdicts.close()

    def _read(self, text: str, material: str) -> Verdict:
        score = read_statement(text, "score", _SCORE, material)
        try:
            number = math.nan if score is None or isinstance(score, bool) else float(score)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError("its score is not a number")
        if not self._low <= number <= self._high:
            raise ValueError(f"its score is {number:g}, not from {self._low:g} to {self._high:g}")
        return {"score": number}


def _schema(low: float, high: float) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "reasoning": {"type": "string"},
            "score": {"type": "number", "description": f"from {low:g} to {high:g}"},
        },
        "required": ["reasoning", "score"],
        "additionalProperties": False,
    }


def named_policies(config: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield the keys by which judges in a configuration, whose key is ``where``, name a policy, with the names."""
    if not isinstance(config, Mapping):
        return
    arguments = config.get("arguments")
    if config.get("function") == "judge" and isinstance(arguments, Mapping) and "policy" in arguments:
        yield f"{where}.arguments.policy", str(arguments["policy"])
    for key, value in config.items():
        yield from named_policies(value, f"{where}.{key}")
