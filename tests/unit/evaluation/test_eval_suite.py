"""Suites: several evaluations and models, checked before work, continued, within one budget."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from turnwise.config import dump_config
from turnwise.errors import ConfigError, InferenceError, RegistryError, TurnwiseError
from turnwise.evaluation.config import EvalBudget, EvalConfig, TokenPrices
from turnwise.evaluation.metrics import rates_below
from turnwise.evaluation.spending import Spending, prompt_tokens
from turnwise.evaluation.suite import SUITE_FILE, SuiteConfig, load_suite, run_suite, suite_parts
from turnwise.trajectory import Segment, Trajectory
from turnwise.types import as_ids

SUITE = """
defaults: {samples: 2, greedy: false, rollout: {max_turns: 4}}
models:
  small: {model: tiny}
  served: {model: tiny, url: "http://127.0.0.1:1", prices: {prompt: 1, completion: 10}}
evaluations:
  table: {rollout: {env: {name: lookup}}, tasks: rows.jsonl}
  guess: {samples: 3, rollout: {env: {name: guess_number}, max_turns: 9}}
out: results
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "prompt": "?"}\n')
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def written(config: EvalConfig, rate: float = 0.5, tokens: int = 10, **more: Any) -> None:
    assert config.out is not None
    config.out.mkdir(parents=True)
    estimate = {"mean": rate, "stderr": 0.1, "episodes": 4, "tasks": 2}
    sampled = {"success": estimate, "reward": estimate, "turns": 2.0, "sampled_tokens": 5.0, "failed": 0}
    record = {"sampled": sampled, "seconds": 1.0, "spent": {"sampled_tokens": tokens, "cost": 0.5}, **more}
    (config.out / "summary.json").write_bytes(orjson.dumps(record))
    (config.out / "config.yaml").write_text(dump_config(config))


def test_a_part_has_the_settings_of_all_of_its_model_and_its_own(folder: Path) -> None:
    parts = suite_parts(load_suite(folder / "suite.yaml", []))
    assert [(part.evaluation, part.model) for part in parts] == [
        ("table", "small"), ("table", "served"), ("guess", "small"), ("guess", "served"),
    ]  # fmt: skip
    table, served, guess, _ = (part.config for part in parts)
    assert (table.samples, table.rollout.max_turns, table.rollout.env.name) == (2, 4, "lookup")
    assert (guess.samples, guess.rollout.max_turns, guess.greedy) == (3, 9, False)
    # Paths are those of the suite's folder, wherever the command is given.
    assert table.model == folder / "tiny"
    assert str(table.tasks) == str(folder / "rows.jsonl")
    assert served.url == "http://127.0.0.1:1"
    assert served.out == folder / "results" / "table--served"


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("evaluations.guess.rollout.env.name=gess", RegistryError, r"evaluations\.guess with models\.small: .*gess"),
        ("evaluations.guess.rollout.agent.name=nobody", RegistryError, r"evaluations\.guess with .*nobody"),
        ("evaluations.guess.samplse=3", ConfigError, r"evaluations\.guess with models\.small: .*samplse"),
        ("models.served.model=gone", ConfigError, r"with models\.served: model is .*gone, which is no directory"),
        ("evaluations.guess.out=x", ConfigError, r"out is set; results are in .*guess--small"),
        ("defaults.budget.money=3", ConfigError, r"with models\.small: .*prices"),
        ("budget.money=3", ConfigError, r"with models\.small: prices are missing, and budget\.money of the suite"),
        ("evaluations={}", ConfigError, "evaluations"),
        ("evaluations.guess.tasks=gone.jsonl", TurnwiseError, r"evaluations\.guess with models\.small: .*gone\.jsonl"),
    ],
)
def test_wrong_suite_fails_before_any_evaluation(
    folder: Path, override: str, error: type[Exception], words: str
) -> None:
    started: list[EvalConfig] = []
    with pytest.raises(error, match=words):
        run_suite(load_suite(folder / "suite.yaml", [override]), started.append, console=quiet())
    assert started == []
    assert not (folder / "results").exists()


def test_two_parts_do_not_share_a_folder(folder: Path) -> None:
    (folder / "suite.yaml").write_text(SUITE.replace("small:", "small!:").replace("served:", "small?:"))
    with pytest.raises(ConfigError, match=r"models\.small\?: .*models\.small! .*table--small-: rename one"):
        suite_parts(load_suite(folder / "suite.yaml", []))


def test_complete_parts_are_skipped_and_failed_parts_stop_no_other(folder: Path) -> None:
    suite, evaluated = load_suite(folder / "suite.yaml", []), list[str]()

    def evaluate(config: EvalConfig) -> None:
        assert config.out is not None
        evaluated.append(config.out.name)
        if config.out.name == "table--served" and len(evaluated) < 5:
            raise InferenceError("nothing listens there")
        written(config)

    console = quiet()
    rows = run_suite(suite, evaluate, console=console)
    assert evaluated == ["table--small", "table--served", "guess--small", "guess--served"]
    assert [row.error for row in rows] == [None, "nothing listens there", None, None]
    assert "0.500 ± 0.100" in console.file.getvalue()  # type: ignore[attr-defined]
    assert [bool(rates_below(0.4, row.figures)) for row in rows] == [False, True, False, False]
    rows = run_suite(suite, evaluate, console=quiet())
    assert evaluated[4:] == ["table--served"]
    saved = orjson.loads((folder / "results" / SUITE_FILE).read_bytes())
    assert [(row["evaluation"], row["model"], row["error"]) for row in saved][1] == ("table", "served", None)
    assert all(not rates_below(0.5, row.figures) for row in rows)
    assert all(rates_below(0.6, row.figures) for row in rows)


def test_results_of_other_settings_are_not_taken_for_those_of_a_changed_suite(folder: Path) -> None:
    run_suite(load_suite(folder / "suite.yaml", []), written, console=quiet())
    evaluated: list[EvalConfig] = []
    with pytest.raises(ConfigError, match=r"table with models\.small: .*complete evaluation with another samples"):
        run_suite(load_suite(folder / "suite.yaml", ["defaults.samples=8"]), evaluated.append, console=quiet())
    assert evaluated == []
    # Where it is served, what it costs and what it may spend are no other figures.
    free = ["models.served.url=http://127.0.0.1:2", "models.served.prices.prompt=9", "budget.tokens=9"]
    assert [
        row.error for row in run_suite(load_suite(folder / "suite.yaml", free), evaluated.append, console=quiet())
    ] == [None] * 4
    assert evaluated == []


def test_the_budget_of_a_suite_is_shared(folder: Path) -> None:
    suite, budgets = load_suite(folder / "suite.yaml", ["budget.tokens=15"]), list[EvalBudget]()

    def evaluate(config: EvalConfig) -> None:
        budgets.append(config.budget)
        written(config)

    rows = run_suite(suite, evaluate, console=quiet())
    assert [budget.tokens for budget in budgets] == [15, 5]
    assert [row.error for row in rows][2:] == ["not made: budget.tokens of the suite is spent"] * 2
    assert isinstance(suite, SuiteConfig)


def trajectory(number: int, policy: str = "main") -> Trajectory:
    segments = [
        Segment(0, -1, "context", as_ids(range(10))),
        Segment(1, 0, "sampled", as_ids([1, 2]), turn_id="t0"),
        Segment(2, 1, "context", as_ids([3])),
        Segment(3, 2, "sampled", as_ids([4]), turn_id="t1"),
    ]
    return Trajectory(f"{number}", f"{number}", "g", "t", policy=policy, frozen=policy != "main", segments=segments)


def test_spending_counts_prompts_of_all_calls_and_sampled_tokens() -> None:
    assert prompt_tokens(trajectory(0)) == 10 + 13
    text = Trajectory("a", "a", "g", "t", recorded="text", metrics={"prompt_tokens": 7, "completion_tokens": 2})
    assert prompt_tokens(text) == 7
    stopped: list[bool] = []
    spending = Spending(EvalBudget(money=0.0002), TokenPrices(prompt=2, completion=10))
    spending._stop = lambda: stopped.append(True)
    spending.add(trajectory(0, policy="judge"))
    assert spending.figures == {"prompt_tokens": 0, "sampled_tokens": 0, "cost": 0}
    for number in range(4):
        spending.add(trajectory(number))
    assert spending.figures["cost"] == pytest.approx(4 * (23 * 2 + 3 * 10) / 1e6)
    # It is stopped once: by the third, with 228 millionths.
    assert (spending.over, stopped) == ("money", [True])
