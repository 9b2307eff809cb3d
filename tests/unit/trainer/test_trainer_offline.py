"""Objectives on data that is there: preferences, reward models, recorded trajectories."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from support.trainer.preference_data import BAD, GOOD, PEOPLE, chat_model, preferences, record, write_lines
from turnwise.chat.renderer import load_renderer
from turnwise.engine.reward_model import Classifier, Encoder
from turnwise.errors import TaskError, TrainError
from turnwise.trainer.config.offline import DPOConfig, FilterConfig, PairingConfig, RewardModelConfig, SFTConfig
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.observe.loggers import LoggedRun, Logger
from turnwise.trainer.observe.metrics import meaning
from turnwise.trainer.observe.run_log import read_metrics
from turnwise.trainer.offline.core import filter_trajectories, make_pairs, read_recorded
from turnwise.trainer.offline.dpo import PreferenceObjective, reference_sums, run_dpo
from turnwise.trainer.offline.preferences import Pair, load_preferences, pack_pairs, preference_pairs, token_sides
from turnwise.trainer.offline.reward_model import run_reward_model
from turnwise.trainer.offline.sft import run_sft
from turnwise.trajectory import Trajectory, to_samples
from turnwise.trajectory_file import TrajectoryWriter

MODEL_OPTIONS = {"device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def settings(model: Path, home: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "name": "run",
        "runs": str(home / "runs"),
        "steps": 8,
        "model": {"path": str(model), **MODEL_OPTIONS},
        "optim": {"lr": 3e-3},
    }
    return {**options, **changes}


class Noting(Logger):
    """Keeps the losses that it is given."""

    def __init__(self, run: LoggedRun) -> None:
        assert (run.name, run.step, run.settings()["model.path"] != "") == ("run", 0, True)
        self._file = (run.directory / "noted.txt").open("a")

    def log(self, step: int, figures) -> None:
        self._file.write(f"{figures['train/loss']!r}\n")

    def close(self) -> None:
        self._file.close()


# -- pairs in micro-batches


def pair_of(row: Callable[..., Any], number: int, lengths: tuple[int, int], branches: int = 1) -> Pair:
    rows = [
        [row(length, 2 + number, seed=10 * number + 3 * side + leaf, name=f"{number}-{side}", leaf=leaf)]
        for side, length in enumerate(lengths)
        for leaf in range(branches)
    ]
    flat = [row_group[0] for row_group in rows]
    return Pair(flat[:branches], flat[branches:])


def test_both_sides_of_a_pair_are_packed_into_one_micro_batch(row: Callable[..., Any]) -> None:
    pairs = [pair_of(row, number, (8 + number, 12 - number), branches=1 + number % 2) for number in range(4)]
    batches, sides = pack_pairs(pairs, 45)
    assert len(batches) > 1
    assert sides.tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 7]
    sides_of = [token_sides(batch, sides) for batch in batches]
    assert sorted(int(pair) for indices, _ in sides_of for pair in indices) == [0, 1, 2, 3]
    for batch, (indices, of_token) in zip(batches, sides_of, strict=True):
        assert batch.tokens <= 45
        # Each trained token counts for its own side: 2 + number of them for each row.
        expected = [(2 + int(pair)) * (1 + int(pair) % 2) for pair in indices for _ in range(2)]
        assert torch.bincount(of_token).tolist() == expected


@pytest.mark.parametrize(
    "options", [{}, {"loss": "ipo"}, {"length_normalised": True, "label_smoothing": 0.1}, {"nll_coef": 0.5}], ids=str
)
def test_dpo_gradient_equals_the_formula_however_pairs_are_split(
    model_dir: Callable[..., Path], row: Callable[..., Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    pairs = [pair_of(row, number, (9 + number, 13 - number), branches=1 + number % 2) for number in range(3)]
    config = DPOConfig.model_validate(settings(model_dir(), tmp_path, data="d", beta=0.3, **options))
    other = TorchLearner.create(config.policy, 1, model_path=model_dir(seed=1))
    reference = reference_sums(other, pairs, config)
    gradients, losses = [], []
    for budget in (20, 60, 1000):
        learner = TorchLearner.create(config.policy, 1)
        batches, sides = pack_pairs(pairs, budget)
        stats = learner.forward_backward(batches, PreferenceObjective(config, sides, reference), 3.0)
        losses.append(stats.loss)
        gradients.append({n: p.grad for n, p in learner.policy.model.named_parameters() if p.grad is not None})
    largest = max(1.0, *(float(grad.abs().max()) for grad in gradients[0].values()))
    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-6)
        for name, grad in gradient.items():
            assert torch.allclose(grad, gradients[0][name], atol=5e-6 * largest), name
    # The same from each row alone, with transformers' own forward pass.
    plain = transformers_model(model_dir())
    frozen = transformers_model(model_dir(seed=1))
    total = torch.zeros(())
    for pair in pairs:
        sums = [side_logprob(plain, side) for side in (pair.chosen, pair.rejected)]
        with torch.no_grad():
            refs = [side_logprob(frozen, side) for side in (pair.chosen, pair.rejected)]
        counts = [sum(row.sample.trained_tokens for row in side) for side in (pair.chosen, pair.rejected)]
        scale = counts if options.get("length_normalised") else [1, 1]
        margin = (sums[0] - refs[0]) / scale[0] - (sums[1] - refs[1]) / scale[1]
        if options.get("loss") == "ipo":
            total = total + (margin - 1 / 0.6) ** 2
        else:
            smooth = options.get("label_smoothing", 0.0)
            total = total - (1 - smooth) * torch.log(torch.sigmoid(0.3 * margin))
            total = total - smooth * torch.log(torch.sigmoid(-0.3 * margin))
        total = total - options.get("nll_coef", 0.0) * sums[0] / counts[0]
    (total / 3).backward()
    assert losses[0] == pytest.approx(float(total.detach()) / 3, rel=1e-5)
    for name, parameter in plain.named_parameters():
        if name in gradients[0]:
            assert torch.allclose(parameter.grad, gradients[0][name], atol=1e-5 * largest), name


def transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()


def side_logprob(plain: Any, rows: list[Any]) -> torch.Tensor:
    total = torch.zeros(())
    for row in rows:
        ids = torch.from_numpy(row.sample.input_ids.astype(np.int64))
        logs = torch.log_softmax(plain(input_ids=ids[None]).logits[0].float(), -1)
        token_logprobs = logs[:-1].gather(1, ids[1:, None])[:, 0]
        total = total + token_logprobs[torch.from_numpy(row.sample.loss_mask[1:])].sum()
    return total


# -- DPO


def test_dpo_prefers_the_chosen_side_and_logs_documented_names(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", preferences())
    loggers = {"loggers": [f"{__name__}:Noting"], "overwrite": True}
    config = DPOConfig.model_validate(settings(model, tmp_path, data=str(data), pairs=3, steps=10, **loggers))
    run_dpo(config.model_copy(update={"steps": 1}), console=quiet())
    result = run_dpo(config, console=quiet())
    records = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == list(range(1, 11)), "those of the run that was made over do not count"
    noted = [float(figure) for figure in (tmp_path / "runs" / "run" / "noted.txt").read_text().split()]
    assert noted == [record["train/loss"] for record in (records[0], *records)]
    # Before the first update policy and reference are the same: ln 2, and no margin.
    assert records[0]["train/loss"] == pytest.approx(np.log(2.0), abs=1e-5)
    assert records[0]["preference/margin"] == pytest.approx(0.0, abs=1e-5)
    assert result.metrics["preference/accuracy"] == 1.0
    assert result.metrics["train/loss"] < 0.5
    assert result.metrics["preference/chosen"] > result.metrics["preference/rejected"]
    assert not [name for name in records[0] if name not in ("kind", "step") and meaning(name) is None]
    assert (result.model / "turnwise_format.json").exists()
    # Another reference: the trained model against the first one prefers strongly from the beginning.
    second = settings(result.model, tmp_path, name="again", data=str(data), steps=1, reference=str(model))
    first = run_dpo(DPOConfig.model_validate(second), console=quiet())
    assert first.metrics["train/loss"] < 0.5


def test_the_assistants_turns_of_the_prompt_are_context(model: Path) -> None:
    renderer = load_renderer(model)
    prompt = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "team?"},
    ]
    row = {"messages": prompt, "chosen": [{"role": "assistant", "content": "red"}], "rejected": "blue"}
    (preference,) = _loaded([row])
    ((pair,), left_out) = asyncio.run(preference_pairs([preference], renderer))
    assert left_out == 0
    assert pair.margin == 0.0
    for side, text in ((pair.chosen, "red"), (pair.rejected, "blue")):
        (only,) = side
        trained = only.sample.input_ids[only.sample.loss_mask]
        assert renderer.decode(trained).endswith(f"{text}<|im_end|>")
        assert "hello" not in renderer.decode(trained)
    # Whole conversations without a prompt share their beginning.
    config = {
        "chosen": [*prompt, {"role": "assistant", "content": "red"}],
        "rejected": [*prompt, {"role": "assistant", "content": "blue"}],
    }
    (same,) = _loaded([config])
    assert (same.prompt, same.chosen) == (preference.prompt, preference.chosen)


def _loaded(rows: list[dict[str, Any]]) -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        return load_preferences(write_lines(Path(home) / "data.jsonl", rows))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "chosen or rejected is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "score": 1}, "unknown field 'score'; allowed: prompt"),
        ({"prompt": "a", "messages": [], "chosen": "b", "rejected": "c"}, "the same thing: give one"),
        ({"chosen": "b", "rejected": "c"}, "there is no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same: nothing is preferred"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}, "chosen holds no message of"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "margin is 'big'"),
        ({"prompt": [3], "chosen": "b", "rejected": "c"}, r"prompt\[0\] is 3; a message is an object with a role"),
    ],
)
def test_invalid_preference_row_raises_task_error(row: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        _loaded([row])
    assert "data.jsonl:1" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (SFTConfig, {}, "either data .* or trajectories"),
        (DPOConfig, {}, "either data .* or trajectories"),
        (RewardModelConfig, {}, "either data .* or trajectories"),
        (DPOConfig, {"data": "d", "trajectories": {"path": "p"}}, "either data .* or trajectories"),
        (DPOConfig, {"data": "d", "loss": "ipo", "label_smoothing": 0.1}, "no label_smoothing: the loss ipo has none"),
        (DPOConfig, {"data": "d", "beta": 0}, "beta"),
    ],
)
def test_invalid_offline_configuration_is_refused(kind: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        kind.model_validate({"name": "n", "model": {"path": "m"}, **changes})


# -- reward models


def test_served_reward_model_scores_as_the_trained_model(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", preferences(PEOPLE[:4]))
    held_out = write_lines(tmp_path / "held_out.jsonl", preferences(PEOPLE[4:]))
    options = settings(model, tmp_path, data=str(data), held_out=str(held_out), pairs=2, steps=12)
    result = run_reward_model(RewardModelConfig.model_validate(options), console=quiet())
    assert result.metrics["preference/accuracy"] == 1.0
    assert result.metrics["preference/held_out_accuracy"] == 1.0
    served = Classifier(result.model, dtype="float32", device="cpu", max_context=None)
    assert (served.labels, served.label_names) == (1, ["reward"])
    encoder = Encoder(result.model)
    token_ids = [
        encoder.chat(
            [
                {"role": "user", "content": "Which team is eva in?"},
                {"role": "assistant", "content": text.format("eva")},
            ],
            arguments={},
        )
        for text in (GOOD, BAD)
    ]
    good_reward, bad_reward = (served.forward([ids])[0][0] for ids in token_ids)
    assert good_reward > bad_reward + 0.5
    # Beside a longer one the shorter one is padded, which changes nothing.
    assert served.forward(token_ids) == [[pytest.approx(good_reward, abs=1e-5)], [pytest.approx(bad_reward, abs=1e-5)]]
    # Going on from a reward model keeps its head: it is right from the first step.
    second = settings(result.model, tmp_path, name="again", data=str(data), steps=1, optim={"name": "muon", "lr": 1e-5})
    assert run_reward_model(RewardModelConfig.model_validate(second), console=quiet()).metrics["train/loss"] < 0.5


def test_the_loss_of_a_reward_model_is_that_of_its_served_scores(model: Path, tmp_path: Path) -> None:
    rows = preferences(PEOPLE[:3])
    rows[1]["margin"] = 0.7
    data = write_lines(tmp_path / "pairs.jsonl", rows)
    tiny = settings(model, tmp_path, data=str(data), steps=1, optim={"lr": 1e-30}, max_tokens_per_micro_batch=1)
    result = run_reward_model(RewardModelConfig.model_validate(tiny), console=quiet())
    served = Classifier(result.model, dtype="float32", device="cpu", max_context=None)
    encoder = Encoder(result.model)
    total = 0.0
    for row in rows:
        ids = [
            encoder.chat(
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": text}], arguments={}
            )
            for text in (row["chosen"], row["rejected"])
        ]
        (good_reward,), (bad_reward,) = served.forward(ids)
        total += float(np.log1p(np.exp(-(good_reward - bad_reward - row.get("margin", 0.0)))))
    assert result.metrics["train/loss"] == pytest.approx(total / 3, abs=1e-5)


def test_a_conversation_that_is_too_long_is_left_out_whole(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", preferences())
    options = settings(model, tmp_path, data=str(data), max_tokens_per_row=3)
    with pytest.raises(TrainError, match="max_tokens_per_row leaves no pair"):
        run_reward_model(RewardModelConfig.model_validate(options), console=quiet())


# -- recorded trajectories


ROWS = [
    ("mia", GOOD.format("mia"), 1.0),
    ("mia", GOOD.format("mia"), 1.0),
    ("mia", BAD.format("mia"), 0.0),
    ("leo", "Leo: red.", 0.5),
    ("leo", BAD.format("leo"), 0.0),
    ("leo", GOOD.format("leo"), 0.9),
    ("ada", BAD.format("ada"), 0.0),
    ("ada", "Ada? " + BAD.format("ada"), 0.0),
]


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    home = tmp_path_factory.mktemp("evaluated")
    trajectories = asyncio.run(record(load_renderer(model), home / "trajectories.twz", ROWS))
    return home, trajectories


def test_good_trajectories_are_kept(recorded: tuple[Path, list[Trajectory]]) -> None:
    home, every = recorded

    def kept(**options: Any) -> list[str]:
        return [trajectory.id for trajectory in filter_trajectories(every, FilterConfig(path=home, **options))]

    # t1 says the same as t0.
    assert kept() == ["t0", "t2", "t3", "t4", "t5", "t6", "t7"]
    assert kept(dedupe=False) == [f"t{number}" for number in range(8)]
    assert kept(min_reward=0.5) == ["t0", "t3", "t5"]
    # Of each task the best; of equal ones the shorter.
    assert kept(best_per_task=1) == ["t0", "t5", "t6"]
    assert kept(best_per_task=1, min_reward=0.95) == ["t0"]
    with pytest.raises(TaskError, match=r"min_reward is 2.0, but the best of 8 has reward 1"):
        kept(min_reward=2.0)


def test_pairs_are_best_against_worst(recorded: tuple[Path, list[Trajectory]]) -> None:
    home, every = recorded

    def paired(**options: Any) -> list[tuple[str, str]]:
        return [(a.id, b.id) for a, b in make_pairs(every, PairingConfig(path=home, **options))]

    assert paired() == [("t0", "t2"), ("t5", "t4")]
    assert paired(min_gap=0.95) == [("t0", "t2")]
    # A group of three has one pair, and ada's two are equal.
    assert paired(pairs_per_group=5) == [("t0", "t2"), ("t5", "t4")]
    with pytest.raises(TaskError, match="no two of which one has a reward larger by"):
        paired(min_gap=3)


def test_rejection_sampling_trains_the_recorded_ids(
    model: Path, recorded: tuple[Path, list[Trajectory]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, every = recorded
    seen: list[Any] = []
    from turnwise.trainer.offline import sft

    real = sft.pack
    monkeypatch.setattr(sft, "pack", lambda rows, budget, **how: seen.extend(rows) or real(rows, budget, **how))
    options = settings(model, tmp_path, trajectories={"path": str(home), "min_reward": 0.9}, conversations=2, steps=6)
    result = run_sft(SFTConfig.model_validate(options), console=quiet())
    expected = {trajectory.id: to_samples(trajectory).rows[0].input_ids.tolist() for trajectory in (every[0], every[5])}
    assert {row.sample.trajectory_id: row.sample.input_ids.tolist() for row in seen} == expected
    records = list(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl"))
    assert result.metrics["train/nll"] < records[0]["train/nll"] - 1


def test_dpo_and_reward_models_learn_from_recorded_pairs(
    model: Path, recorded: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    home, _ = recorded
    options = settings(model, tmp_path, trajectories={"path": str(home)}, pairs=2)
    assert run_dpo(DPOConfig.model_validate(options), console=quiet()).metrics["preference/accuracy"] == 1.0
    options["name"] = "reward"
    result = run_reward_model(RewardModelConfig.model_validate(options), console=quiet())
    assert result.metrics["preference/accuracy"] == 1.0


def test_trajectories_of_another_tokenizer_are_refused(recorded: tuple[Path, list[Trajectory]], tmp_path: Path) -> None:
    home, _ = recorded
    other = load_renderer(chat_model(tmp_path / "other", "llama3_1"))
    with pytest.raises(TaskError, match=r"trajectory t0: its ids do not encode its messages with the tokenizer"):
        read_recorded(FilterConfig(path=home), other)


def test_unreadable_recorded_trajectories_raise_errors_with_remedies(
    model: Path, recorded: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    home, every = recorded
    renderer = load_renderer(model)
    with pytest.raises(TaskError, match=r"no such file: .*nowhere"):
        read_recorded(FilterConfig(path=tmp_path / "nowhere"), renderer)
    with pytest.raises(
        TaskError, match=r"8 trajectories \(policies: main\), but none of policy other and partition val"
    ):
        read_recorded(FilterConfig(path=home, policy="other", partition="val"), renderer)
    failed = tmp_path / "failed.twz"
    with closing(TrajectoryWriter(failed)) as file:
        file.write(replace(every[0], error="ToolError: gone"))
    with pytest.raises(TaskError, match="none of policy main that ended without an error"):
        read_recorded(FilterConfig(path=failed), renderer)
    failed.write_text("{}\n")
    with pytest.raises(TaskError, match=r"trajectories.path: .*failed.twz is no file of trajectories"):
        read_recorded(FilterConfig(path=failed), renderer)
