"""Scripts for TRL's GRPOTrainer, as its users write them, train here."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.trainer.lookup_run import MODEL, build_model, lines, shared
from turnwise.errors import ConfigError, EnvError

# In TRL: from trl import GRPOConfig, GRPOTrainer.
from turnwise.ext.frameworks.compat.trl import GRPOConfig, GRPOTrainer, TRLEnv, TRLRewards, reward_names
from turnwise.ext.frameworks.convert.trl import translate_trl
from turnwise.plugins import load_object
from turnwise.tasks import Task
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory import Segment, Trajectory

ROWS = [{"prompt": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(4)]
SIZES = {"per_device_train_batch_size": 8, "num_generations": 4}
CALLS: list[dict[str, Any]] = []


def right(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float | None]:
    CALLS.append({"completions": completions, "answer": answer, **kwargs})
    kwargs["log_extra"]("gold", answer)
    kwargs["log_metric"]("answers", len(answer))
    return [
        None if text == "?" else float(expected in str(text))
        for text, expected in zip(completions, answer, strict=True)
    ]


def seen(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return right([completion[0]["content"] for completion in completions], **kwargs)


def one_reward(completions: list[Any]) -> list[float]:
    return [1.0]


def one_of_ids(completion_ids: list[list[int]]) -> list[float]:
    return [1.0]


def in_words(completions: list[Any]) -> list[str]:
    return ["good" for _ in completions]


async def short(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids) < 8) for ids in completion_ids]


def multiply(first: int, second: int) -> int:
    """Multiply two numbers.

    Args:
        first: One factor.
        second: The other.
    """
    return first * second


class Counter:
    """An environment as TRL's users write it."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, start: int, **row: Any) -> str:
        self.count = start
        return f" You are at {start}."

    async def step(self, amount: int) -> str:
        """Move.

        Args:
            amount: How far.
        """
        self.count += amount
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count)


def trainer(home: Path, rewards: Any = right, **arguments: Any) -> GRPOTrainer:
    args = GRPOConfig(home / "out", **{**SIZES, **arguments.pop("options", {})})
    return GRPOTrainer("model", rewards, args, arguments.pop("train_dataset", ROWS), **arguments)


def translate(**options: Any) -> dict[str, Any]:
    config = translate_trl({**SIZES, **options}, rows=8, evaluates=False, calls_tools=False).config
    return config


def test_defaults_are_those_of_trl() -> None:
    config = translate()
    assert config["batch"] == {"groups": 2}
    assert config["steps"] == 12
    assert config["seed"] == 42
    assert config["rollout"] == {"group_size": 4, "max_tokens_per_turn": 512, "max_turns": 1}
    assert config["policies"]["main"]["optim"] == {"betas": [0.9, 0.999]}
    assert config["policies"]["main"]["schedule"] == {"kind": "linear", "warmup_steps": 0}
    algorithm = config["algorithm"]
    assert (algorithm["loss"], algorithm["loss_aggregation"]) == ("ppo_clip", "token_mean")
    assert algorithm["loss_options"] == {"clip_low": 0.2, "clip_high": 0.2}
    assert (algorithm["drop_zero_variance"], "kl" in algorithm) == (False, False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "dr_grpo"}, {"loss_aggregation": "seq_mean_token_sum_norm", "loss_scale": 512}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_options": {"clip_low": 1.0, "clip_high": 4.0}}),
        ({"loss_type": "sapo"}, {"loss_options": {"tau_pos": 1.0, "tau_neg": 1.05}}),
        ({"importance_sampling_level": "sequence", "loss_type": "luspo"}, {"loss": "gspo"}),
        ({"delta": 4.0}, {"loss_options": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 4.0}}),
        ({"beta": 0.04}, {"kl": {"coef": 0.04, "estimator": "k3+"}}),
        ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl": {"coef": 0.04, "estimator": "k3"}}),
        ({"scale_rewards": False}, {"advantage_options": {"norm_by_std": False}}),
        ({"steps_per_generation": 4, "num_iterations": 2}, {"minibatches": 4, "epochs": 2}),
        (
            {"use_vllm": True},
            {
                "correction": {"weights": "mask", "level": "sequence", "high": 3.0, "low": 1e-9},
                "old_logprobs": "recompute",
            },
        ),
    ],
)
def test_options_of_the_algorithm_are_translated(options: dict[str, Any], expected: dict[str, Any]) -> None:
    algorithm = translate(**options)["algorithm"]
    assert {key: algorithm[key] for key in expected} == expected


def test_max_steps_counts_optimizer_steps() -> None:
    assert translate(max_steps=10, steps_per_generation=2)["steps"] == 5


def test_options_without_counterpart_are_refused_together() -> None:
    with pytest.raises(ConfigError) as error:
        translate(repetition_penalty=1.2, loss_type="vespo", learning_rat=1e-6, log_completions=True, fp16=False)
    text = str(error.value)
    assert "repetition_penalty is 1.2: tokens are sampled from the distribution that is trained" in text
    assert "loss_type is 'vespo'" in text
    assert "there is no such option; did you mean 'learning_rate'?" in text
    assert "log_completions" not in text
    assert "fp16" not in text


def test_harmless_options_are_listed(tmp_path: Path) -> None:
    options = {"log_completions": True, "repetition_penalty": 1.0, "learning_rate": 1e-5}
    report = trainer(tmp_path, options=options).translation.report()
    assert set(report["no counterpart, harmless"]) >= {"log_completions", "repetition_penalty"}
    assert report["translated"]["learning_rate"] == "policies.main.optim.lr"


def test_options_of_trls_own_config_are_read(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    args = trl.GRPOConfig(str(tmp_path / "out"), use_cpu=True, learning_rate=3e-6, report_to="none", **SIZES)
    config = GRPOTrainer("model", right, args, ROWS).translation.config
    assert config["policies"]["main"]["optim"]["lr"] == 3e-6
    assert config["policies"]["main"]["model"]["device"] == "cpu"
    assert (config["name"], config["batch"]["groups"]) == ("out", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_dataset": [{"question": "q"}] * 4}, "row 0 has no column 'prompt'; it has question"),
        ({"train_dataset": [{"prompt": "q"}] * 4}, "reads 'answer', which is no column of train_dataset"),
        ({"rewards": lambda *texts: [0.0]}, "takes texts by position, but is called by name"),
        ({"rewards": "some/reward-model"}, "'some/reward-model' is a model"),
        ({"rewards": None}, "no reward: give reward_funcs"),
        ({"options": {"reward_weights": [1.0, 2.0]}}, "reward_weights has 2 numbers for 1 reward_funcs"),
        ({"processing_class": object()}, "processing_class is that of object: leave it out"),
        ({"callbacks": [object()]}, "callbacks has no counterpart: write them as hooks"),
        ({"rollout_func": print}, "rollout_func has no counterpart: write the conversation as an agent"),
        ({"environment_factry": Counter}, "GRPOTrainer has no argument 'environment_factry'"),
        ({"train_dataset": iter(ROWS)}, "rows of train_dataset cannot be counted: give max_steps"),
        ({"train_dataset": ROWS[:1]}, "fewer than a batch's 2"),
        ({"options": {"num_generations": 3}}, "8 completions, which is no multiple of num_generations, 3"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, **arguments)
    assert message in str(error.value)


def test_streamed_rows_end_where_the_run_does(tmp_path: Path) -> None:
    endless = ({"prompt": "q", "answer": "a"} for _ in iter(int, 1))
    assert len(trainer(tmp_path, train_dataset=endless, options={"max_steps": 3})._rows) == 6


def test_functions_without_a_name_are_kept_in_this_process(tmp_path: Path) -> None:
    weighted = functools.partial(right, scale=2)
    config = trainer(tmp_path, [right, weighted]).translation.config
    references = config["rollout"]["group_reward"]["arguments"]["functions"]
    assert [load_object(reference, "function") for reference in references] == [right, weighted]
    assert reward_names([right, weighted]) == ["right", "right#2"]


async def test_environment_appends_its_observation_and_offers_its_methods() -> None:
    env = TRLEnv([f"{__name__}:multiply"], f"{__name__}:Counter")
    task = Task("t", [{"role": "user", "content": "Move."}], {"start": 3})
    messages, _ = await env.reset(task)
    assert messages == [{"role": "user", "content": "Move. You are at 3."}]
    assert list(env.toolset()) == ["multiply", "step"]
    assert await env.score(None) == {"Counter": 3.0}


def test_rows_of_several_environments_choose_theirs(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Go."}], "start": 1, "environment": "counter"}] * 2
    door = trainer(tmp_path, None, train_dataset=rows, environment_factory={"counter": Counter})
    config = door._rows[0]["env"]["config"]
    assert load_object(config["environment"], "environment") is Counter
    others = [{**row, "environment": "other"} for row in rows]
    with pytest.raises(ConfigError, match="row 0 has environment 'other': environment_factory has counter"):
        trainer(tmp_path, None, train_dataset=others, environment_factory={"counter": Counter})


def test_adapters_and_decoupled_rewards_are_translated(tmp_path: Path) -> None:
    options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [2.0, 0.5]}
    adapter = SimpleNamespace(r=8, lora_alpha=16, target_modules={"v_proj", "q_proj"})
    config = trainer(tmp_path, [right, short], options=options, peft_config=adapter).translation.config
    lora = {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}
    assert config["policies"]["main"]["model"] == {"path": "model", "lora": lora}
    assert config["algorithm"]["advantage_options"] == {"reward_weights": {"right": 2.0, "short": 0.5}}
    assert config["rollout"]["group_reward"]["arguments"]["weights"] == [1.0, 1.0]


def member(number: int, text: str) -> Trajectory:
    ids = np.asarray([number], np.int32)
    prompt = Segment(0, -1, "context", ids, ({"role": "user", "content": "q"},))
    answer = Segment(1, 0, "sampled", ids, ({"role": "assistant", "content": text},), weight_versions=((3, 0, 1),))
    return Trajectory(str(number), f"e{number}", "g", "t", segments=[prompt, answer])


async def test_member_that_no_function_scores_has_the_mean_of_its_group() -> None:
    CALLS.clear()
    rewards = TRLRewards([f"{__name__}:seen"], [2.0], None, steps=10, updates=2)
    members = [member(0, "1"), member(1, "?"), member(2, "0")]
    assert await rewards(Task("t", "q", {"answer": "1"}), members) == [{"seen": 2.0}, {"unscored": 1.0}, {"seen": 0.0}]
    [call] = CALLS
    assert (call["trainer_state"].global_step, call["trainer_state"].epoch) == (6, 0.3)
    assert (call["prompts"], call["answer"], call["completion_ids"]) == (["q"] * 3, ["1"] * 3, [[0], [1], [2]])
    assert members[0].turn_notes[""] == {"gold": "1"}
    assert members[0].metrics == {"answers": 3.0}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_reward", "one_reward returned 1 rewards for 2 completions: return one for each"),
        ("one_of_ids", "one_of_ids returned 1 rewards for 2 completions: return one for each"),
        ("in_words", r"in_words returned \['good', 'good'\]: return a number or None for each completion"),
    ],
)
async def test_rewards_that_are_not_one_number_each_are_an_error(function: str, message: str) -> None:
    rewards = TRLRewards([f"{__name__}:{function}"], [1.0], None, steps=1, updates=1)
    with pytest.raises(EnvError, match=message):
        await rewards(Task("t", "q"), [member(0, "a"), member(1, "b")])


def test_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are no run: name another folder"):
        trainer(tmp_path).train()


def test_script_of_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a run starts its own processes: start the script by python"):
        trainer(tmp_path).train()


@pytest.mark.long
def test_rewards_tools_and_environment_train_a_model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    args = GRPOConfig(
        tmp_path / "out", max_steps=2, max_completion_length=12, use_cpu=True, reward_weights=[2.0, 0.5],
        eval_strategy="steps", eval_steps=2, num_generations_eval=1, **SIZES,
    )  # fmt: skip
    CALLS.clear()
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"], "start": 1} for row in ROWS
    ]
    tools: dict[str, Any] = {"tools": [multiply], "environment_factory": Counter}
    door = GRPOTrainer(str(model), [right, short], args, rows, rows[:1], **tools)
    summary = door.train()
    assert (summary.steps, summary.directory) == (2, tmp_path / "out")
    trained = [call for call in CALLS if len(call["completions"]) == 4]
    # Before the first and after the last step, the held-out row has one completion.
    assert [len(call["completions"]) for call in CALLS if call not in trained] == [1, 1]
    call = trained[0]
    assert len(call["completions"]) == len(call["answer"]) == len(call["completion_ids"]) == 4
    assert call["prompts"][0][-1]["content"].endswith("You are at 1.")
    assert call["completions"][0][0]["role"] == "assistant"
    assert all(isinstance(environment, Counter) for environment in call["environments"])
    assert [call["trainer_state"].global_step for call in trained] == [0, 0, 1, 1]
    steps = [record for record in lines(summary.directory / "metrics.jsonl") if record["kind"] == "train"]
    assert [step["batch/trajectories"] for step in steps] == [8, 8]
    assert summary.after is not None
    assert audit_run(summary.directory, recompute=False).contradictions == []
    assert (door.save_model() / "config.json").is_file()
