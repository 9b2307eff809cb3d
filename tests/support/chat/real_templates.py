"""Runs chat templates of real models, given as files, through detection, round trips and damaged calls.

``python -m support.chat.real_templates FILE.jinja ...`` prints a row of a table for each template. Templates stand in
llama.cpp's source package (``models/templates`` in the sdist of ``llama-cpp-python``) and in vLLM's (``examples``).
Their tokenizers are built here: what looks like a control token in a template becomes one.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.chat.model_dirs import Family, write_model_dir
from turnwise.chat.formats.derive import common_prefix
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.chat.template import ChatTemplate
from turnwise.errors import RenderError
from turnwise.model.canonical import canonical_messages
from turnwise.types import Message, ToolCall, ToolSchema, as_ids

_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|｜DSML｜|<\|[\w\"]+>|<[\w\"]+\|>|\[/?[A-Z][A-Z_]{2,}\]|\[gMASK\]"
    r"|\]<\]\w+\[>\[|\]~!?b[\]\[]|\[e~\[|<seed:(?:bos|eos)>|<SPECIAL_\d+>|</?s>|<(?:bos|eos|sop|sep|(?:start|end)_of_turn|\w+_of_(?:document|sentence)|role)>"
    r"|</(?:role|assistant|user|system)>"
)
"""What is a control token in the vocabulary of its model."""
_TAGS = re.compile(r"</?(?:think|tool_call|tool_calls|tool_response|arg_key|arg_value|minimax:tool_call)>|<tool_sep>")
"""What is an added token in the vocabulary of some models, and text in that of others."""
_ENDS = (
    "[e~[",
    "<seed:eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<｜end▁of▁sentence｜>",
    "<|end_of_text|>",
)
_KEY, _VALUE, _NUMBER = "key", "qv alpha", 73
LOOKUP = ToolSchema(
    "lookup",
    "Find a row.",
    {
        "type": "object",
        "properties": {_KEY: {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"}},
        "required": [_KEY],
    },
)
NOW = ToolSchema("now", "The time.", {"type": "object", "properties": {}})
TOOLS = [LOOKUP, NOW]
CALL = ToolCall("functions.lookup:0", "lookup", {_KEY: _VALUE, "count": _NUMBER})
_BARE = ToolCall("functions.now:1", "now", {})
_ODD = ToolCall("functions.lookup:0", "lookup", {_KEY: 'a "b" \\n\n{<x>} über [1, 2]\t', "count": -7, "deep": False})
_PIECES = re.compile(r"</?[\w:]+|[\w]+|\s+|.", re.DOTALL)


@dataclass
class Report:
    """What one template did.

    Attributes:
        chat_format: The chosen format; empty if the template is refused.
        refusal: Why it is refused.
        unproven: Conversations that detection does not read back, or that the template cannot write.
        refused_messages: Messages that were refused with an error, which is no fault.
        damaged: Number of damaged calls by what became of them.
        faults: Sentences on wrong executions, lost calls and lost ids.
    """

    chat_format: str = ""
    refusal: str = ""
    unproven: tuple[str, ...] = ()
    refused_messages: list[str] = field(default_factory=list)
    damaged: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def control_tokens(source: str) -> tuple[list[str], list[str], str]:
    """Return the control tokens and the tags of a template, in its text and in what it writes, and its end token."""
    texts = [source]
    end = next((token for token in _ENDS if token in source), "</s>" if "<|" not in source else "<|endoftext|>")
    wire = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "lookup", "arguments": CALL.arguments}}
        ],
    }
    template = ChatTemplate(source, variables={"eos_token": end, "bos_token": "<s>"})
    question = {"role": "user", "content": "?"}
    for messages in ([question], [question, wire], [question, {"role": "assistant", "content": "x"}, question]):
        try:
            texts.append(template.render(messages, [tool.to_json() for tool in TOOLS], generate=True))
        except RenderError:
            continue
    text = "\n".join(texts)
    special = dict.fromkeys([*_CONTROL.findall(text), end])
    return list(special), [tag for tag in dict.fromkeys(_TAGS.findall(text)) if tag not in special], end


def load_template(source: str, folder: Path, *, tags_are_tokens: bool) -> TemplateRenderer:
    """Return the renderer of a template with a tokenizer that has its control tokens."""
    special, tags, end = control_tokens(source)
    bos = "<s>" if "bos_token" in source else None
    family = Family(
        "",
        source=source,
        special=tuple(dict.fromkeys([*special, *([bos] if bos else [])])),
        plain=tuple(tags) if tags_are_tokens else (),
        bos=bos,
        eos=end,
    )
    return load_renderer(write_model_dir(folder, family))


def check_template(source: str, folder: Path, *, tags_are_tokens: bool) -> Report:
    """Return what a template does with messages, and with calls that are damaged."""
    report = Report()
    try:
        try:
            renderer = load_template(source, folder, tags_are_tokens=tags_are_tokens)
        except RenderError as error:
            if "cannot render one user message" not in str(error):
                raise
            # Such a template stands beside another one, for prompts without tools.
            source = "{%- set tools = tools or [] -%}" + source
            renderer = load_template(source, folder, tags_are_tokens=tags_are_tokens)
    except RenderError as error:
        report.refusal = str(error)
        return report
    description = renderer.describe()
    report.chat_format, report.unproven = description["format"], tuple(description["unproven"])
    check_messages(renderer, report)
    if report.chat_format != "plain":
        for calls in ([CALL], [CALL, _BARE]):
            check_damage(renderer, calls, report)
    return report


def _messages() -> dict[str, Message]:
    reasoning = "Let me look."
    return {
        "an answer": {"role": "assistant", "content": "It is 42."},
        "a call": {"role": "assistant", "content": "", "tool_calls": [CALL]},
        "odd arguments": {"role": "assistant", "content": "", "tool_calls": [_ODD]},
        "two calls": {"role": "assistant", "content": "", "tool_calls": [CALL, _BARE]},
        "text and a call": {"role": "assistant", "content": "One moment.", "tool_calls": [CALL]},
        "reasoning and a call": {
            "role": "assistant",
            "content": "",
            "reasoning_content": reasoning,
            "tool_calls": [CALL],
        },
    }


def _question(renderer: TemplateRenderer) -> Sequence[int]:
    return renderer.render(canonical_messages([{"role": "user", "content": "?"}]), TOOLS).tolist()


def check_messages(renderer: TemplateRenderer, report: Report) -> None:
    """Render messages and read them back: :meth:`completion` refuses what does not; written ids have to be kept."""
    prompt = as_ids(_question(renderer))
    for name, message in _messages().items():
        try:
            token_ids = renderer.completion(message, TOOLS)
        except RenderError:
            report.refused_messages.append(name)
            continue
        text = renderer.decode(token_ids)
        for call in renderer.parse(token_ids, prompt, TOOLS).get("tool_calls", ()):
            written = [word for word in re.findall(r"[\w.:]+", text) if word == CALL.id or word.endswith("lookup:0")]
            if written and call.name == "lookup" and call.id not in written:
                report.faults.append(f"{name}: the id {written[0]!r} is read as {call.id!r}")


def damaged_texts(text: str, controls: Sequence[str], calls: Sequence[ToolCall]) -> Iterator[tuple[str, str]]:
    """Yield texts of calls with one piece of markup missing, or white space before one, and what was done."""
    words = [_VALUE, str(_NUMBER), *(call.name for call in calls), *(key for call in calls for key in call.arguments)]
    pattern = re.compile("|".join(map(re.escape, sorted([*controls, *words], key=len, reverse=True))))
    pieces: list[tuple[str, bool]] = []
    position = 0
    for match in [*pattern.finditer(text), None]:
        until = match.start() if match else len(text)
        pieces += [(piece, True) for piece in _PIECES.findall(text[position:until])]
        if match is not None:
            pieces.append((match[0], match[0] not in words))
            position = match.end()
    for number, (piece, is_markup) in enumerate(pieces):
        before, after = "".join(p for p, _ in pieces[:number]), "".join(p for p, _ in pieces[number + 1 :])
        if is_markup and not piece.isspace():
            yield before + after, f"without {piece!r} behind {before[-20:]!r}"
        if is_markup:
            for blank in (" ", "\n"):
                yield before + blank + piece + after, f"{blank!r} between {before[-20:]!r} and {piece!r}"
    yield "Let me look.\n" + text, "text before"
    yield text + "\nDone.", "text behind"


def check_damage(renderer: TemplateRenderer, calls: list[ToolCall], report: Report) -> None:
    """Parse damaged calls: each is read as it was meant, or is an error; never another call, never an answer."""
    tokens, facts = renderer._tokens, renderer._facts
    message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        token_ids = renderer.completion(message, TOOLS)
        prompt, text, stop = as_ids(_question(renderer)), renderer.decode(token_ids[:-1]), int(token_ids[-1])
    except RenderError:
        # The generation prompt opens reasoning that the history leaves out.
        turn = facts.turn(renderer._form.message(canonical_messages([message])[0]))
        if turn is None:
            return
        generation = facts.prompt[len(facts.head) :]
        prefix = common_prefix(generation, turn, tokens.added)
        prompt, text = as_ids(tokens.encode(prefix)), facts.cut(turn[len(prefix) :], called=True)
        stop = min(renderer.stop_ids)
    if any(call.name not in text for call in calls):
        return
    expected, names = [_stripped(call) for call in calls], {tool.name for tool in TOOLS}
    for damaged, done in damaged_texts(text, list(tokens.added), calls):
        message = renderer.parse(as_ids([*tokens.encode(damaged), stop]), prompt, TOOLS)
        parsed = message.get("tool_calls", ())
        executed = [_stripped(call) for call in parsed if call.error is None]
        if any(call not in expected and call[0] in names for call in executed):
            outcome = "wrong"
        elif executed == expected:
            outcome = "read"
        elif len(executed) < len(parsed) or any(call[0] not in names for call in executed):
            # A call of a tool that is not offered is answered with an error.
            outcome = "error"
        else:
            outcome = "answer" if not executed else "lost"
        report.damaged[outcome] += 1
        if outcome not in ("read", "error"):
            report.faults.append(f"{outcome}: {done}: {damaged!r} -> {executed}")


def _stripped(call: ToolCall) -> tuple[str, dict[str, object]]:
    """Return name and arguments without white space around texts: blanks next to them are what was written."""
    arguments = {
        key.strip(): value.strip() if isinstance(value, str) else value for key, value in call.arguments.items()
    }
    return call.name.strip(), arguments


def row(path: Path, report: Report) -> str:
    """Return the row of the table for a template."""
    if report.refusal:
        reason, _, _ = report.refusal.partition(" Set `format:`")
        return f"| {path.stem} | refused | {reason} | |"
    damage = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.damaged.items()))
    return f"| {path.stem} | `{report.chat_format}` | {', '.join(report.refused_messages) or 'all'} | {damage} |"


def main() -> int:
    """Check the templates of the command line; return 1 if one of them has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("templates", nargs="+", type=Path)
    parser.add_argument("--tags-are-text", action="store_true", help="tags such as <tool_call> are no added tokens")
    parser.add_argument("--faults", type=int, default=3, help="how many faults to print for each template")
    options = parser.parse_args()
    refused = wrong = 0
    print("| template | format | refuses to write | damaged calls |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        for number, path in enumerate(options.templates):
            try:
                report = check_template(
                    path.read_text(encoding="utf-8"),
                    Path(root) / str(number),
                    tags_are_tokens=not options.tags_are_text,
                )
            except RenderError as error:
                report = Report(refusal=str(error))
            print(row(path, report))
            for fault in report.faults[: options.faults]:
                print(f"    {fault}")
            refused += bool(report.refusal)
            wrong += bool(report.faults)
    print(f"{len(options.templates)} templates: {refused} refused, {wrong} with a fault")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
