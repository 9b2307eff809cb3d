"""Supervised fine-tuning from a jsonl file to a model on disk, with real templates and tokenizers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError
from rich.console import Console

from support.chat.model_dirs import build_model_dir
from turnwise.append_file import lock_directory
from turnwise.chat.renderer import load_renderer
from turnwise.errors import RenderError, TaskError, TrainError
from turnwise.evaluation.config import EvalConfig
from turnwise.model.canonical import canonical_messages
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.observe.metrics import read_metrics
from turnwise.trainer.offline import demonstrations as demonstrations_module
from turnwise.trainer.offline import sft as sft_module
from turnwise.trainer.offline.demonstrations import Demonstration, demonstration_rows, load_demonstrations
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.run.export import export_model
from turnwise.types import ToolSchema

TOOL = {
    "type": "function",
    "function": {
        "name": "team_of",
        "description": "Find a team",
        "parameters": {"type": "object", "properties": {"person": {"type": "string"}}, "required": ["person"]},
    },
}
STEPS = 14
TEAMS = {"mia": "red", "leo": "blue", "ada": "green"}


def conversation(person: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"Which team is {person} in?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "team_of", "arguments": json.dumps({"person": person})},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": TEAMS[person]},
            {"role": "assistant", "content": f"{person} is in {TEAMS[person]}."},
        ],
        "tools": [TOOL],
    }


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small model with the tokenizer and template of a family, made once."""
    models: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in models:
            directory = build_model_dir(tmp_path_factory.mktemp("start"), family)
            size = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
            torch.manual_seed(0)
            config = transformers.Qwen3Config(
                vocab_size=len(size),
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                tie_word_embeddings=True,
                initializer_range=0.05,
            )
            transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
            models[family] = directory
        return models[family]

    return make


def configure(start: Path, directory: Path, **changes: Any) -> SFTConfig:
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(conversation(person)) + "\n" for person in TEAMS))
    settings: dict[str, Any] = {
        "name": "warm",
        "runs": directory / "runs",
        "data": data,
        "steps": STEPS,
        "conversations": 3,
        "max_tokens_per_micro_batch": 300,
        "model": {"path": str(start), "device": "cpu", "threads": 1},
        "optim": {"name": "muon", "lr": 4e-3, "muon": {"lr": 0.02}},
        "schedule": {"kind": "wsd", "warmup_steps": 5},
    }
    return SFTConfig.model_validate({**settings, **changes})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "qwen3_6"])
def test_only_assistant_tokens_are_trained_and_the_prompt_is_the_templates(
    start: Callable[[str], Path], family: str
) -> None:
    directory = start(family)
    renderer = load_renderer(directory)
    demonstrations = load_demonstrations_of([conversation(person) for person in TEAMS])
    rows, cut = asyncio.run(demonstration_rows(demonstrations, renderer))
    assert cut == 0
    assert [len(row_group) for row_group in rows] == [1, 1, 1]
    for (row,), person in zip(rows, TEAMS, strict=True):
        sample = row.sample
        trained = renderer.decode(sample.input_ids[sample.loss_mask])
        context = renderer.decode(sample.input_ids[~sample.loss_mask])
        assert f"{person} is in {TEAMS[person]}." in trained
        assert "team_of" in trained
        assert person in trained.split("is in")[0]
        assert "Which team is" in context
        assert "Answer briefly." in context
        assert "Which team is" not in trained
        # The last id is the stop id of the last turn: ending a turn is learned too.
        assert sample.loss_mask[-1]
        assert int(sample.input_ids[-1]) in renderer.stop_ids


def load_demonstrations_of(rows: list[dict[str, Any]]) -> list[Demonstration]:
    lines = [demonstrations_module._demonstration(f"row {n}", row) for n, row in enumerate(rows)]
    return lines


def test_shared_prefixes_of_conversations_do_not_change_the_result(
    start: Callable[[str], Path], tmp_path: Path
) -> None:
    results = {}
    for name, shared in (("whole", False), ("shared", True)):
        config = configure(start("qwen3"), tmp_path, name=name, steps=1, share_prefixes=shared)
        run_sft(config, console=quiet())
        records = list(read_metrics(tmp_path / "runs" / name / "metrics.jsonl"))
        results[name] = [value for record in records for value in (record["train/nll"], record["train/grad_norm"])]
    assert results["shared"] == pytest.approx(results["whole"], abs=1e-5)


def test_loss_without_its_scale_is_refused_before_data_is_read(tmp_path: Path) -> None:
    norm = {"loss_aggregation": "seq_mean_token_sum_norm"}
    with pytest.raises(ValidationError, match="loss_scale is None, and loss_aggregation is seq_mean_token_sum_norm"):
        configure(tmp_path, tmp_path, **norm)
    with pytest.raises(ValidationError, match=r"loss_scale is 8\.0, and loss_aggregation is token_mean"):
        configure(tmp_path, tmp_path, loss_scale=8.0)
    assert configure(tmp_path, tmp_path, loss_scale=8.0, **norm).loss_scale == 8.0


def test_a_run_learns_saves_and_can_be_repeated(start: Callable[[str], Path], tmp_path: Path) -> None:
    weights = []
    for name in ("one", "two"):
        config = configure(start("qwen3"), tmp_path, name=name)
        result = run_sft(config, console=quiet())
        assert result.model == tmp_path / "runs" / name / "model"
        assert result.steps == STEPS
        weights.append(dict(load_model(result.model).named_weights()))
        records = list(read_metrics(tmp_path / "runs" / name / "metrics.jsonl"))
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        assert records[-1]["train/nll"] < 0.5 * records[0]["train/nll"]
        assert records[0]["lr/muon"] == pytest.approx(0.02 / 5)
        assert result.metrics["train/skipped_updates"] == 0
    # The same seed gives the same bits.
    for parameter, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][parameter]), parameter
    # Any program finds tokenizer, template and chat format beside the weights.
    saved = load_renderer(result.model)
    assert saved.describe()["format"] == load_renderer(start("qwen3")).describe()["format"]
    assert (result.model / "turnwise_format.json").exists()
    assert (result.model / "tokenizer.json").read_bytes() == (start("qwen3") / "tokenizer.json").read_bytes()
    assert not [entry for entry in result.model.parent.iterdir() if entry.name.startswith(".")]


@pytest.mark.long
def test_an_interrupted_run_resumes_with_the_same_bits_and_shows_the_held_out_loss(
    start: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft_module, "SAVE_S", 0.0)
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps(conversation("mia")) + "\n")
    uninterrupted = run_sft(configure(start("qwen3"), tmp_path, name="whole", held_out=held_out), console=quiet())
    losses = {
        record["step"]: record["held_out/nll"]
        for record in read_metrics(tmp_path / "runs" / "whole" / "metrics.jsonl")
        if "held_out/nll" in record
    }
    assert set(losses) == set(range(1, STEPS + 1))
    assert losses[STEPS] < 0.5 * losses[1]
    steps_begun, take_step = [], sft_module.take_step

    def interrupted_step(*arguments: Any) -> dict[str, float]:
        steps_begun.append(arguments)
        if len(steps_begun) == 6:
            raise KeyboardInterrupt
        return take_step(*arguments)

    monkeypatch.setattr(sft_module, "take_step", interrupted_step)
    config = configure(start("qwen3"), tmp_path, name="parts", held_out=held_out)
    with pytest.raises(KeyboardInterrupt):
        run_sft(config, console=quiet())
    other = config.model_copy(update={"seed": 1})
    with pytest.raises(TrainError, match=r"interrupted run with another configuration: seed was 0 and is 1; resume it"):
        run_sft(other, console=quiet())
    console = quiet()
    resumed = run_sft(config, console=console)
    assert f"after step 5 of {STEPS}" in console.file.getvalue()
    steps = [record["step"] for record in read_metrics(tmp_path / "runs" / "parts" / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    expected = dict(load_model(uninterrupted.model).named_weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_model(resumed.model).named_weights())
    assert sorted(entry.name for entry in resumed.model.parent.iterdir()) == ["metrics.jsonl", "model"]


def test_trained_model_renders_the_prompts_of_its_training(start: Callable[[str], Path], tmp_path: Path) -> None:
    config = configure(start("qwen3"), tmp_path, steps=1, renderer={"chat_template": "hermes-short"})
    prompt, tools = canonical_messages(conversation("mia")["messages"][:2]), [ToolSchema(**TOOL["function"])]
    trained = config.renderer.load(config.model.path).render(prompt, tools)
    model = run_sft(config, console=quiet()).model
    evaluated = EvalConfig.model_validate({"model": str(model), "rollout": {"env": {"name": "lookup"}}})
    assert evaluated.renderer.load(evaluated.directory).render(prompt, tools).tolist() == trained.tolist()
    exported = tmp_path / "exported"
    export_model(model, exported)
    assert load_renderer(exported).render(prompt, tools).tolist() == trained.tolist()
    with pytest.raises(
        RenderError, match=r"renderer\.chat_template is hermes .* was trained with another chat template"
    ):
        EvalConfig.model_validate({**evaluated.model_dump(), "renderer": {"chat_template": "hermes"}}).renderer.load(
            model
        )


def test_epochs_cover_every_conversation(
    start: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    real = sft_module.shuffled

    def spy(count: int, size: int, seed: int) -> Any:
        for batch in real(count, size, seed):
            seen.append(batch)
            yield batch

    monkeypatch.setattr(sft_module, "shuffled", spy)
    config = configure(start("qwen3"), tmp_path, steps=None, epochs=3, conversations=2)
    assert run_sft(config, console=quiet()).steps == 6
    for epoch in range(3):
        assert sorted(index for batch in seen[2 * epoch : 2 * epoch + 2] for index in batch) == [0, 1, 2]


def test_existing_model_is_not_replaced_without_overwrite_nor_by_two_processes(
    start: Callable[[str], Path], tmp_path: Path
) -> None:
    config = configure(start("qwen3"), tmp_path, steps=1)
    first = run_sft(config, console=quiet()).model
    weights_before = (first / "model.safetensors").read_bytes()
    with pytest.raises(TrainError, match="overwrite: true"):
        run_sft(config, console=quiet())
    assert (first / "model.safetensors").read_bytes() == weights_before
    again = config.model_copy(update={"overwrite": True, "steps": 2})
    with lock_directory(first.parent, TrainError, "the run"), pytest.raises(TrainError, match="another process"):
        run_sft(again, console=quiet())
    run_sft(again, console=quiet())
    assert (first / "model.safetensors").read_bytes() != weights_before


def test_an_interrupt_leaves_no_model(
    start: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config = configure(start("qwen3"), tmp_path, steps=1)
    monkeypatch.setattr(sft_module, "save_format", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_sft(config, console=quiet())
    assert sorted(entry.name for entry in (tmp_path / "runs" / "warm").iterdir()) == ["metrics.jsonl"]


def test_long_conversations_are_cut_and_counted(start: Callable[[str], Path], tmp_path: Path) -> None:
    renderer = load_renderer(start("qwen3"))
    demonstrations = load_demonstrations_of([conversation("mia")])
    (untruncated,), _ = asyncio.run(demonstration_rows(demonstrations, renderer))
    length, trained = len(untruncated[0].sample.input_ids), untruncated[0].sample.trained_tokens
    (short,), cut = asyncio.run(demonstration_rows(demonstrations, renderer, length - 3))
    assert cut == 3
    assert short[0].sample.trained_tokens == trained - 3
    with pytest.raises(TrainError, match="no conversation"):
        run_sft(configure(start("qwen3"), tmp_path, max_tokens_per_row=3), console=quiet())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data\.jsonl:2: this line is not JSON"),
        ('{"tools": []}', r"data\.jsonl:2: messages is missing"),
        ('{"messages": [], "mesages": 1}', r"unknown field 'mesages'; allowed: messages, tools, id"),
        ('{"messages": ["hi"]}', r"messages\[0\] is 'hi'"),
        ('{"messages": [{"role": "user"}], "tools": [{"type": "function"}]}', r"tools\[0\] is"),
    ],
)
def test_invalid_row_raises_task_error_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(conversation("mia")) + "\n" + line + "\n")
    with pytest.raises(TaskError, match=message):
        load_demonstrations(data)
    assert len(load_demonstrations(data, limit=1)) == 1


def test_missing_and_empty_files_raise_task_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nothing: cannot be read"):
        load_demonstrations(tmp_path / "nothing")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TaskError, match="holds no demonstration"):
        load_demonstrations(tmp_path / "empty.jsonl")


def test_line_separators_inside_messages_do_not_split_rows(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    text = "one\u2028two\u0085three"
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}
    data.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (demonstration,) = load_demonstrations(data)
    assert demonstration.messages[0]["content"] == text


def test_conversation_without_an_assistant_raises_task_error(start: Callable[[str], Path]) -> None:
    demonstrations = load_demonstrations_of([{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(TaskError, match=r"row 0.*assistant"):
        asyncio.run(demonstration_rows(demonstrations, load_renderer(start("qwen3"))))
