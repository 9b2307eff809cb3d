"""Training with summaries and sub-agents, with every part real: each sampled token is trained once, by the audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.trainer.lookup_run import MODEL, lines, shared, silent, train_config
from turnwise.agents.context.config import SubAgentConfig
from turnwise.agents.context.sub_agent import schema_of
from turnwise.envs.basic.lookup import LookupEnv, table, tasks
from turnwise.rollout.audit import audit_files
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import make_model
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories

SUB_AGENT = {"prompt": "Help.", "description": "Help."}
ASK = "Sum up."


def called(number: int, name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"c{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def heard(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "name": name, "content": text}


def demonstrations() -> list[dict[str, Any]]:
    """An agent that has another one look the team up, that other one, and summaries: each a conversation."""
    lookup_tools = [tool.schema.to_json() for tool in LookupEnv.tool_methods.values()]
    offered = [*lookup_tools, schema_of(SubAgentConfig.model_validate(SUB_AGENT)).to_json()]
    rows = []
    for seed, task in enumerate(tasks(150)):
        people = table(seed, person=task.data["person"])
        person, team = people.person, people.teams[people.person]
        main = [
            {"role": "user", "content": f"Who manages {person}?"},
            called(0, "delegate", task=person), heard(0, "delegate", team),
            called(1, "manager_of", team=team), heard(1, "manager_of", people.answer),
        ]  # fmt: skip
        rows.append({"messages": [*main, {"role": "assistant", "content": people.answer}], "tools": offered})
        ask, summary = {"role": "user", "content": ASK}, {"role": "assistant", "content": people.answer}
        rows.append({"messages": [*main, ask, summary], "tools": offered})
        worker = [
            {"role": "system", "content": "Help."}, {"role": "user", "content": person},
            called(0, "team_of", person=person), heard(0, "team_of", team), {"role": "assistant", "content": team},
        ]  # fmt: skip
        rows.append({"messages": worker, "tools": lookup_tools})
    return rows


def build(directory: Path) -> None:
    base = directory / "base"
    rows = demonstrations()
    make_model(base, rows, seed=0, width=64, layers=2)
    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_sft(
        SFTConfig.model_validate({
            "name": "sft", "runs": directory, "data": data, "model": {"path": base, "threads": 1}, "steps": 50,
            "conversations": 8, "optim": {"name": "muon", "lr": 4e-3}, "schedule": {"kind": "wsd", "warmup_steps": 5},
        }),
        console=silent(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "context-model", build) / MODEL


@pytest.mark.long
def test_a_run_with_summaries_and_sub_agents_trains_each_sampled_token_once(model: Path, tmp_path: Path) -> None:
    context = {
        "length": 100,
        "compaction": {"above": 0.5, "prompt": ASK, "summary": "{summary}", "keep_turns": 0},
        "drop_tool_results": {"keep": 0, "above": 0.5, "note": "-"},
        "sub_agent": SUB_AGENT,
    }
    rollout = {"agent": {"name": "react", "config": {"context": context}}, "max_turns": 8, "group_size": 4}
    run = run_train(train_config(model, tmp_path, steps=2, rollout=rollout), console=silent()).directory
    report = audit_files(run)
    assert report.contradictions == []
    assert report.counts["ids trained once"] > 0
    forks: set[str] = set()
    for trajectory in read_trajectories(run / "trajectories.twz"):
        assert trajectory.error is None
        forks |= set(trajectory.forks())
    assert {"sub_agent", "compaction", "dropped_tool_results"} <= forks
    logged = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "train"]
    assert max(record["context/sub_agents"] for record in logged) > 0
    assert max(record["context/compactions"] for record in logged) > 0
