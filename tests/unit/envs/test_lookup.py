"""The lookup environment: its tables, its tools, its tasks."""

import asyncio
import inspect

import pytest

from turnwise.envs import make, reset_env, schemas, score_env, step_env
from turnwise.envs.basic import lookup
from turnwise.errors import TaskError
from turnwise.tasks import load_tasks
from turnwise.tasks.seeded import SPLITS
from turnwise.types import ToolCall


def calls(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", name, arguments)]}


def test_a_table_is_26_names_in_12_teams_with_managers_from_the_same_names():
    assert (len(set(lookup.NAMES)), len(set(lookup.TEAMS))) == (26, 12)
    table = lookup.table(0)
    assert sorted(table.teams) == sorted(lookup.NAMES)
    assert set(table.teams.values()) <= set(lookup.TEAMS)
    assert sorted(table.managers) == sorted(lookup.TEAMS)
    assert set(table.managers.values()) <= set(lookup.NAMES)
    assert table.answer == table.managers[table.teams[table.person]]


def test_the_seed_decides_everything():
    assert lookup.table(5) == lookup.table(5)
    assert lookup.table(5) != lookup.table(6)
    assert lookup.table(5, person="mia").teams == lookup.table(5, person="zoe").teams
    people = {lookup.table(seed).person for seed in range(300)}
    assert people == set(lookup.NAMES)


def test_no_table_is_in_both_splits():
    def contents(split, seeds):
        return {
            tuple(table.teams.values()) + tuple(table.managers.values())
            for table in (lookup.table(seed, split=split) for seed in seeds)
        }

    train, test = contents("train", range(200)), contents("test", range(200))
    assert len(train) == len(test) == 200
    assert not train & test
    # Not by luck: the content of a table says where it belongs.
    assert all(lookup.stable_hash(*cells) % 4 for cells in train)
    assert not any(lookup.stable_hash(*cells) % 4 for cells in test)


def test_tasks_have_stable_ids_and_questions():
    first = list(lookup.tasks(50, split="test"))
    assert first == list(lookup.tasks(50, split="test"))
    assert first[:10] == list(lookup.tasks(10, split="test"))
    assert first[3].id == "lookup-test-0-3"
    assert first[3].prompt == f"Who manages {first[3].data['person']}?"
    ids = {task.id for split in SPLITS for seed in range(2) for task in lookup.tasks(50, split=split, seed=seed)}
    assert len(ids) == 200
    assert load_tasks("turnwise.envs.basic.lookup:tasks?n=5&split=test") == first[:5]


def test_wrong_splits_and_people_are_named():
    with pytest.raises(TaskError, match="split='dev'"):
        lookup.table(0, split="dev")
    with pytest.raises(TaskError, match="person='bob'"):
        lookup.table(0, person="bob")


async def test_the_right_chain_is_worth_1_and_anything_else_0():
    env = make("lookup")
    for task in lookup.tasks(5, split="test"):
        messages, _ = await reset_env(env, task, seed=11)
        assert messages == [{"role": "user", "content": task.prompt}]
        table = lookup.table(11, person=task.data["person"], split="test")
        team = (await step_env(env, calls("team_of", person=table.person))).observation[0]["content"]
        assert team == table.teams[table.person]
        manager = (await step_env(env, calls("manager_of", team=team))).observation[0]["content"]
        assert manager == table.answer
        result = await step_env(env, {"role": "assistant", "content": f" {manager}\n"})
        assert (result.reward, result.terminated) == (1.0, True)
        for wrong in (None, {"role": "assistant", "content": f"It is {manager}"}, {"role": "assistant", "content": ""}):
            assert await score_env(env, wrong) == {"score": 0.0}


async def test_unknown_names_are_tool_errors():
    env = make("lookup")
    await reset_env(env, seed=0)
    for call in (calls("team_of", person="bob"), calls("manager_of", team="mia")):
        result = await step_env(env, call)
        assert '"tool_error"' in result.observation[0]["content"]


async def test_without_a_seed_episodes_differ():
    env = make("lookup")
    tables = []
    for _ in range(5):
        await reset_env(env)
        tables.append(env.table)
    assert any(table != tables[0] for table in tables)


def test_the_two_tools_and_their_short_schemas():
    tool_schemas = schemas(make("lookup"))
    assert [(schema.name, list(schema.parameters["properties"])) for schema in tool_schemas] == [
        ("team_of", ["person"]),
        ("manager_of", ["team"]),
    ]


def test_lookup_stays_short():
    assert len(inspect.getsource(lookup).splitlines()) <= 105
    assert asyncio.iscoroutinefunction(lookup.LookupEnv.step)
