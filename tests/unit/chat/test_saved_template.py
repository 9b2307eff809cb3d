"""The chat template of a trained model: saved with it, compared when it is loaded, named by the config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from support.chat.model_dirs import FAMILIES, Family, model_dir, template_of, write_model_dir
from turnwise.chat.renderer import TemplateRenderer, load_renderer, save_format, shipped_templates
from turnwise.config import dump_config, load_config
from turnwise.engine.reward_model import Encoder
from turnwise.errors import ConfigError, RenderError
from turnwise.gateway.config import FrozenConfig
from turnwise.gateway.frozen import load_renderers
from turnwise.inference.config import RendererConfig
from turnwise.model.canonical import canonical_messages
from turnwise.types import Message, ToolCall, ToolSchema

TOOLS = [
    ToolSchema(
        "calculate",
        "Computes an expression.",
        {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    ),
    ToolSchema("finish", ""),
]
MESSAGES: list[Message] = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "What is 3 * 7?"}]
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def prompt(renderer: TemplateRenderer) -> list[int]:
    return [int(number) for number in renderer.render(canonical_messages(MESSAGES), TOOLS)]


def trained(folder: Path, source: Path, config: RendererConfig) -> TemplateRenderer:
    """Save what a model of ``source`` was trained with, as every training does; return the renderer of the training."""
    shutil.copytree(source, folder)
    renderer = config.load(source)
    assert isinstance(renderer, TemplateRenderer)
    save_format(renderer, folder)
    return renderer


@pytest.fixture
def template_file(tmp_path: Path) -> Path:
    """A template that is no shipped one, in a file."""
    file = tmp_path / "terse.jinja"
    file.write_text(template_of(FAMILIES["hermes-short"]).replace("You can call tools:", "Tools:"))
    return file


@pytest.mark.parametrize("source_name", ["hermes-short", "file"])
def test_saved_template_is_that_of_the_training(tmp_path: Path, template_file: Path, source_name: str) -> None:
    source = model_dir("qwen2_5")
    config = RendererConfig(chat_template=str(template_file) if source_name == "file" else source_name)
    renderer = trained(tmp_path / "saved", source, config)
    assert prompt(renderer) != prompt(load_renderer(source))
    reloaded = load_renderer(tmp_path / "saved")
    assert prompt(reloaded) == prompt(renderer)
    assert reloaded.describe()["template"] == renderer.describe()["template"]
    # Other programs read the same folder.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    tools = [tool.to_json() for tool in TOOLS]
    assert tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True)["input_ids"] == prompt(
        reloaded
    )
    # The config that it was trained with still fits.
    assert prompt(config.load(tmp_path / "saved")) == prompt(renderer)  # type: ignore[arg-type]


def test_unchanged_template_leaves_the_folder_untouched(tmp_path: Path) -> None:
    source = model_dir("qwen2_5")
    trained(tmp_path / "saved", source, RendererConfig())
    files_before = {file.name: file.read_bytes() for file in source.iterdir()}
    files_after = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    assert files_after.pop("turnwise_format.json")
    assert files_after == files_before


def test_templates_in_older_locations_are_kept_or_replaced(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "source", Family("plain"), template=PLAIN)
    (source / "chat_template.jinja").unlink()
    settings = json.loads((source / "tokenizer_config.json").read_text())
    templates = [
        {"name": "default", "template": PLAIN},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}" + PLAIN},
    ]
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": templates}))
    (source / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    # Both of its own templates are kept as they are.
    two = trained(tmp_path / "two", source, RendererConfig())
    assert prompt(load_renderer(tmp_path / "two")) == prompt(two)
    one = trained(tmp_path / "one", source, RendererConfig(chat_template="hermes"))
    assert prompt(load_renderer(tmp_path / "one")) == prompt(one)
    assert json.loads((tmp_path / "one" / "tokenizer_config.json").read_text()) == settings
    assert not (tmp_path / "one" / "chat_template.json").exists()
    # And back: a model of one template goes on with two.
    (source / "chat_template.json").unlink()
    save_format(load_renderer(source), tmp_path / "one")
    assert prompt(load_renderer(tmp_path / "one")) == prompt(two)
    assert (tmp_path / "one" / "additional_chat_templates" / "tool_use.jinja").is_file()


def test_line_ends_are_no_other_template(tmp_path: Path) -> None:
    file = tmp_path / "windows.jinja"
    file.write_bytes(template_of(FAMILIES["hermes-short"]).replace("\n", "\r\n").encode())
    renderer = trained(tmp_path / "saved", model_dir("qwen2_5"), RendererConfig(chat_template=str(file)))
    assert prompt(load_renderer(tmp_path / "saved")) == prompt(renderer)


def test_other_template_is_refused_with_both_remedies(tmp_path: Path, template_file: Path) -> None:
    saved = tmp_path / "saved"
    renderer = trained(saved, model_dir("qwen2_5"), RendererConfig(chat_template="hermes-short"))
    with pytest.raises(
        RenderError,
        match=r"renderer\.chat_template is .*terse\.jinja .* was trained with another .*: remove "
        r"renderer\.chat_template to use the template .*; to use this one anyway, set renderer\.check_template: false",
    ):
        RendererConfig(chat_template=str(template_file)).load(saved)
    with pytest.raises(RenderError, match=r"renderer\.chat_template is hermes \("):
        RendererConfig(chat_template="hermes").load(saved)
    unchecked = RendererConfig(chat_template="hermes", check_template=False).load(saved)
    assert prompt(unchecked) != prompt(renderer)  # type: ignore[arg-type]

    shutil.copyfile(template_file, saved / "chat_template.jinja")
    with pytest.raises(
        RenderError,
        match=r"the chat template in .*saved .* is not the one that this model was trained with .*: restore that "
        r"one as chat_template\.jinja, or set renderer\.chat_template to it; .* renderer\.check_template: false",
    ):
        RendererConfig().load(saved)
    assert prompt(RendererConfig(chat_template="hermes-short").load(saved)) == prompt(renderer)  # type: ignore[arg-type]
    RendererConfig(check_template=False).load(saved)
    with pytest.raises(RenderError, match="is not the one that this model was trained with"):
        Encoder(saved)
    # With a config.json a folder is a model's.
    (saved / "config.json").write_text("{}")
    frozen = FrozenConfig.model_validate({"model": str(saved)})
    with pytest.raises(
        ConfigError, match=r"rollout\.frozen\.judge: .* is not the one that this model was trained with"
    ):
        load_renderers({"judge": frozen}, None, RendererConfig())


def test_the_policy_that_a_run_begins_with_is_rendered_as_the_run_does(tmp_path: Path, template_file: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(model_dir("qwen2_5"), source)
    run = RendererConfig(chat_template=str(template_file))
    policies = {
        "start": FrozenConfig.model_validate({"start": True}),
        "other": FrozenConfig.model_validate({"start": True, "renderer": {"chat_template": "hermes"}}),
        "model": FrozenConfig.model_validate({"model": str(source)}),
    }
    # With a config.json a folder is a model's.
    (source / "config.json").write_text("{}")
    renderers = load_renderers(policies, source, run)
    digests = {name: renderer.describe()["template"] for name, renderer in renderers.items()}
    assert digests["start"] == run.load(source).describe()["template"]
    assert digests["other"] == load_renderer(source, chat_template="hermes").describe()["template"]
    assert digests["model"] == load_renderer(source).describe()["template"]


@pytest.mark.parametrize("name", shipped_templates())
def test_a_template_that_ships_speaks_hermes_without_tokens_for_tags(tmp_path: Path, name: str) -> None:
    renderer = load_renderer(write_model_dir(tmp_path, Family("plain"), template=PLAIN), chat_template=name)
    description = renderer.describe()
    assert (description["format"], description["source"]) == ("hermes", "auto")
    assert {"answer", "one call", "two calls", "text and a call"} <= set(description["proof"])
    call = ToolCall("c", "calculate", {"expression": "3 * 7"})
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer: Message = {"role": "tool", "tool_call_id": "c", "content": "21"}
    messages = canonical_messages([*MESSAGES, turn, answer])
    ids = renderer.completion(turn, TOOLS)
    ids_before = renderer.render(messages[:2], TOOLS)
    [read] = renderer.parse(ids, ids_before, TOOLS)["tool_calls"]
    assert (read.name, read.arguments) == ("calculate", {"expression": "3 * 7"})
    behind = renderer.extend(ids_before, ids, messages[2], messages[3:], TOOLS)
    assert behind is not None, renderer.why
    assert [*ids_before, *ids, *behind] == list(renderer.render(messages, TOOLS))


def test_short_template_lists_tools_in_one_line() -> None:
    renderers = [load_renderer(model_dir("qwen2_5"), chat_template=name) for name in ("hermes-short", "hermes")]
    short, full = (renderer.decode(renderer.render(canonical_messages(MESSAGES), TOOLS)) for renderer in renderers)
    assert "- calculate(expression): Computes an expression.\n- finish()\n" in short
    assert '"description": "Computes an expression."' in full
    assert len(short) < len(full) / 2


@pytest.mark.parametrize(
    ("chat_template", "words"),
    [
        (
            "hermse",
            r"'hermse', which is not a shipped template; did you mean 'hermes'\?: name one of hermes, hermes-short",
        ),
        ("chatml", r"'chatml', which is not a shipped template: name one of .*, or a jinja file \(\./chatml\)"),
        ("none.jinja", r"none\.jinja: .*No such file"),
        ("./hermes", r"renderer\.chat_template is .*hermes: .*No such file"),
    ],
)
def test_a_template_that_is_not_there_is_named(chat_template: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RendererConfig(chat_template=chat_template).load(model_dir("qwen2_5"))


def test_a_template_that_ships_and_a_tokenizer_without_its_headers() -> None:
    with pytest.raises(
        ConfigError, match=r"'hermes', .* has no token <\|im_start\|> and <\|im_end\|>: name a jinja file"
    ):
        RendererConfig(chat_template="hermes").load(model_dir("own"))


def test_config_names_a_template_file_or_a_shipped_template(tmp_path: Path, template_file: Path) -> None:
    (tmp_path / "hermes").mkdir()
    for chat_template, expected in (
        ("terse.jinja", str(template_file)),
        ("./terse.jinja", str(template_file)),
        ("hermes", "hermes"),
    ):
        file = tmp_path / "renderer.yaml"
        file.write_text(f"chat_template: {chat_template}\n")
        config = load_config(RendererConfig, file)
        assert config.chat_template == expected
        file.write_text(dump_config(config))
        assert load_config(RendererConfig, file) == config
        config.load(model_dir("qwen2_5"))
