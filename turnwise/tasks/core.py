"""The Task dataclass and its parsing from rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from turnwise.errors import SessionError, TaskError, shown
from turnwise.images import check_type, image_part
from turnwise.types import Message, Role, ToolCall

_ROLES = frozenset(get_args(Role))
_FIELDS = ("id", "prompt", "data", "env", "agent")
_CALL_FIELDS = frozenset(("id", "name", "arguments", "raw", "error"))


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a dataset.

    Attributes:
        id: Unique in its dataset; part of every seed, so keep it stable between runs.
        prompt: The initial user text, or whole messages.
        data: The environment's setup and scoring data; never shown to the model by itself.
        env: Registered name or reference of the environment, where it is not the run's.
        agent: The same for the agent.
        env_config: Keyword arguments of the environment's constructor, merged over the run's.
        agent_config: The same for the agent.
        source: Source name in metrics, if there is more than one; not part of the row.
    """

    id: str
    prompt: str | list[Message]
    data: dict[str, Any] = field(default_factory=dict)
    env: str | None = None
    agent: str | None = None
    env_config: dict[str, Any] = field(default_factory=dict)
    agent_config: dict[str, Any] = field(default_factory=dict)
    source: str | None = field(default=None, compare=False)

    def __hash__(self) -> int:
        return hash(self.id)

    def messages(self) -> list[Message]:
        """Return the prompt as a new list of messages; a text is one user message.

        Images that the row names by their path are read now. Raises TaskError if one cannot be.
        """
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [_with_files(message, self.id) for message in self.prompt]

    def to_record(self) -> dict[str, Any]:
        """Return the row as JSON values; :meth:`from_record` is the inverse."""
        prompt = self.prompt if isinstance(self.prompt, str) else [message_record(message) for message in self.prompt]
        record: dict[str, Any] = {"id": self.id, "prompt": prompt, "data": self.data}
        specs = {"env": (self.env, self.env_config), "agent": (self.agent, self.agent_config)}
        for key, (name, config) in specs.items():
            if config:
                record[key] = {"config": config} if name is None else {"name": name, "config": config}
            elif name is not None:
                record[key] = name
        return record

    @classmethod
    def from_record(
        cls,
        record: Mapping[str, Any],
        *,
        where: str = "task",
        default_id: str | None = None,
        folder: Path | None = None,
    ) -> Task:
        """Parse a row. Unknown columns become entries of ``data``.

        Args:
            record: The row.
            where: File and row number, for error messages.
            default_id: Id of a row without one.
            folder: Where relative paths of images begin: the folder of the row's file.

        Raises:
            TaskError: A field is missing or of the wrong type; the message names it and the remedy.
        """
        if not isinstance(record, Mapping):
            raise TaskError(f"{where}: a row is an object with the field 'prompt', not {kind(record)}")
        data = _data(record, where)
        env, env_config = read_spec(record.get("env"), f"{where}: field 'env'")
        agent, agent_config = read_spec(record.get("agent"), f"{where}: field 'agent'")
        return cls(
            id=_id(record.get("id"), default_id, where),
            prompt=_prompt(record, where, folder),
            data=data,
            env=env,
            agent=agent,
            env_config=env_config,
            agent_config=agent_config,
        )


def message_record(message: Message) -> dict[str, Any]:
    """Return a message as a new dict of JSON values."""
    record = cast("dict[str, Any]", dict(message))
    if message.get("tool_calls"):
        record["tool_calls"] = [asdict(call) for call in message["tool_calls"]]
    return record


def _id(value: Any, default: str | None, where: str) -> str:
    if value is None or value == "":
        if default is None:
            raise TaskError(f"{where}: field 'id' is missing: give every task a unique string")
        return default
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TaskError(f"{where}: field 'id' is {shown(value)}: it must be a string or an integer")
    return str(value)


def _data(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    value = record.get("data")
    if value is not None and not isinstance(value, Mapping):
        raise TaskError(f"{where}: field 'data' is {shown(value)}: it must be an object (or be left out)")
    data = dict(value or {})
    for key, column in record.items():
        if not isinstance(key, str):
            raise TaskError(f"{where}: column {key!r} has a name that is not text")
        if key in _FIELDS:
            continue
        if key in data:
            raise TaskError(f"{where}: {key!r} is a column of the row and an entry of 'data' too: keep one of them")
        data[key] = column
    return data


def read_spec(value: Any, where: str) -> tuple[str | None, dict[str, Any]]:
    """Return name and configuration of a row's environment or agent (None for absent ones). Raises TaskError."""
    if value is None or value == "":
        return None, {}
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and set(value) <= {"name", "config"}:
        name, config = value.get("name"), value.get("config")
        if (name is None or isinstance(name, str)) and (config is None or isinstance(config, Mapping)):
            return name or None, dict(config or {})
    raise TaskError(
        f"{where} is {shown(value)}: it must be a registered name, pkg.module:Class, or an object "
        '{"name": text, "config": object}'
    )


def _prompt(record: Mapping[str, Any], where: str, folder: Path | None) -> str | list[Message]:
    if record.get("prompt") is None:
        present = ", ".join(repr(key) for key in record) or "none"
        raise TaskError(
            f"{where}: field 'prompt' is missing (fields here: {present}): it is the user's text, or a list of messages"
        )
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)) or not prompt:
        raise TaskError(f"{where}: field 'prompt' is {shown(prompt)}: it must be a string or a list of messages")
    return [_message(message, f"{where}: field 'prompt[{index}]'", folder) for index, message in enumerate(prompt)]


def _message(value: Any, where: str, folder: Path | None) -> Message:
    if not isinstance(value, Mapping):
        raise TaskError(f"{where} is {shown(value)}: a message is an object with 'role' and 'content'")
    if value.get("role") not in _ROLES:
        raise TaskError(f"{where}.role is {shown(value.get('role'))}: allowed are {', '.join(sorted(_ROLES))}")
    content = value.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise TaskError(f"{where}.content is {shown(content)}: it must be a string or a list of parts")
    # Columnar files write every field that any row has: a null is the same as its absence.
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if isinstance(content, list):
        message["content"] = [_part(part, f"{where}.content[{n}]", folder) for n, part in enumerate(content)]
    if message.get("tool_calls"):
        if not isinstance(value["tool_calls"], (list, tuple)):
            raise TaskError(f"{where}.tool_calls is {shown(value['tool_calls'])}: it must be a list of calls")
        calls = enumerate(value["tool_calls"])
        message["tool_calls"] = [as_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in calls]
    return cast("Message", message)


def _part(value: Any, where: str, folder: Path | None) -> dict[str, Any]:
    """Return a part of a content: JSON, in which an image is a ``data:`` URI or the absolute path of its file."""
    if not isinstance(value, Mapping):
        raise TaskError(f"{where} is {shown(value)}: a part is an object with 'type'")
    part = {key: item for key, item in value.items() if item is not None}
    if part.get("type") != "image":
        return part
    image = part.get("image")
    if isinstance(image, Mapping):
        # A row of the Hugging Face datasets library.
        image = image.get("bytes")
    try:
        if "path" in part:
            path = Path(folder or "", str(part["path"])).absolute()
            with path.open("rb") as file:
                check_type(file.read(16), f"{where} ({path})")
            return {"type": "image", "path": str(path)}
        return part if isinstance(image, str) or image is None else image_part(image)
    except OSError as error:
        raise TaskError(
            f"{where}.path is {shown(part['path'])}: {path} cannot be read ({error.strerror or error}); a path is "
            "relative to the file of the row"
        ) from None
    except SessionError as error:
        raise TaskError(f"{where}: {error}") from None


def _with_files(message: Message, task: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any("path" in part for part in content):
        return message
    return {**message, "content": [_read(part, task) if "path" in part else part for part in content]}


def _read(part: Mapping[str, Any], task: str) -> dict[str, Any]:
    try:
        return image_part(Path(part["path"]).read_bytes())
    except OSError as error:
        raise TaskError(
            f"task {task}: the image {part['path']} cannot be read any more ({error.strerror or error}): keep the "
            "images where they were when the tasks were read"
        ) from None
    except SessionError as error:
        raise TaskError(f"task {task}: {part['path']}: {error}") from None


def as_tool_call(value: Any, where: str, call_id: str = "") -> ToolCall:
    """Return a written call; TaskError says ``where`` it is malformed. ``call_id`` is for one without an id."""
    if isinstance(value, ToolCall):
        return value
    is_call = isinstance(value, Mapping) and set(value) <= _CALL_FIELDS
    if not is_call or not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), Mapping):
        raise TaskError(
            f'{where} is {shown(value)}: write {{"id": text, "name": text, "arguments": object}}, '
            "with the arguments as an object and not as JSON text"
        )
    return ToolCall(
        id=str(value.get("id") or call_id),
        name=value["name"],
        arguments=dict(value.get("arguments", {})),
        raw=str(value.get("raw") or ""),
        error=value.get("error"),
    )


def kind(value: Any) -> str:
    """Return the name of a value's JSON type for error messages."""
    return f"a value of type {type(value).__name__}"
