"""The sql environment: its databases, its limits, its questions, and what counts as the same answer."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import sqlite3
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sql_env.database import Database, Result, bytes_written, create_database, open_file
from sql_env.gold import MOST_ROWS, is_informative, is_ordered, is_right, question_of, same_result, submitted_query
from sql_env.schemas import SCHEMAS
from sql_env.tasks import tasks

from support.chat.model_dirs import model_dir
from support.chat.toy_renderer import ToyRenderer
from turnwise.config import load_config
from turnwise.envs import close_env, make, play_solution, reset_env, schemas, score_env, step_env
from turnwise.errors import ConfigError, RegistryError, TaskError, ToolError
from turnwise.ext.checks.environment import check_env
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task, load_tasks
from turnwise.tasks.seeded import SPLITS
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.dry_run import dry_run
from turnwise.types import ToolCall

ROOT = Path(__file__).parents[3]


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", name, arguments)]}


def says(text):
    return {"role": "assistant", "content": text}


async def begun(task, **config):
    env = make("sql", **config)
    await reset_env(env, task, seed=0)
    return env


async def answer(env, name, **arguments):
    return (await step_env(env, call(name, **arguments))).observation[0]["content"]


@pytest.fixture
def shop():
    with closing(create_database("shop", 1)) as database:
        yield database


def rows_of(database, sql):
    return database.query(sql, most_rows=MOST_ROWS).rows


def the_task(n=0, **arguments):
    return list(tasks(n + 1, split="test", **arguments))[n]


# Databases.


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_database_is_drawn_from_its_seed_and_keeps_its_references(name):
    def content(seed):
        with closing(create_database(name, seed)) as database:
            return {table: rows_of(database, f"SELECT * FROM {table}") for table in database.tables}

    first = content(3)
    assert content(3) == first
    assert content(4) != first
    assert max(map(len, first.values())) >= 600, "few rows are guessed too easily"
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMAS[name].tables)
    for table, rows in first.items():
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


REFUSED = (
    "DELETE FROM orders",
    "INSERT INTO orders VALUES (0, 1, '2024-01-01', 'open')",
    "UPDATE orders SET status = 'open'",
    "DROP TABLE orders",
    "CREATE TEMP TABLE t (x)",
    "PRAGMA query_only = OFF",
    "PRAGMA table_info(orders)",
    "SELECT * FROM pragma_table_info('orders')",
    "ATTACH 'other.db' AS other",
    "VACUUM INTO 'copy.db'",
    "BEGIN",
    "REINDEX",
    "SELECT load_extension('x')",
    "SELECT random()",
    "SELECT hex(randomblob(4))",
    "SELECT current_timestamp",
    "WITH x AS (SELECT 1) DELETE FROM orders",
    "SELECT 1; DELETE FROM orders",
    "",
    "-- nothing",
    "SELEC 1",
    "SELECT \x00",
    "SELECT '\ud800'",
    "SELECT hex(zeroblob(4000))",
    "SELECT " + "1 + " * 10_000 + "1",
)


@pytest.mark.parametrize("sql", REFUSED, ids=range(len(REFUSED)))
def test_whatever_is_no_plain_read_is_refused_and_changes_nothing(shop, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    original = {table: rows_of(shop, f"SELECT * FROM {table}") for table in shop.tables}
    with pytest.raises(ToolError) as caught:
        shop.query(sql, most_rows=5)
    assert str(caught.value)
    assert {table: rows_of(shop, f"SELECT * FROM {table}") for table in shop.tables} == original
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r",
        "SELECT COUNT(*) FROM order_lines a, order_lines b, order_lines c",
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION SELECT x + 1 FROM r ORDER BY 1) SELECT MAX(x) FROM r",
    ],
)
def test_endless_query_is_stopped_and_the_next_query_runs(shop, sql):
    with pytest.raises(ToolError, match="takes too long"):
        shop.query(sql, most_rows=5)
    assert rows_of(shop, "SELECT COUNT(*) FROM orders") == [(380,)]


@pytest.mark.parametrize(
    "collected",
    ["SELECT x FROM t ORDER BY x", "SELECT COUNT(DISTINCT x) FROM t", "SELECT x, RANK() OVER (ORDER BY x) FROM t"],
)
def test_temporary_files_of_a_query_are_bounded_and_the_next_query_runs(shop, collected):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n), "
    rows = endless + "t(x) AS (SELECT printf('%1500d', i) FROM n) "
    before = bytes_written()
    with pytest.raises(ToolError, match="more than 64 MB of temporary files and was stopped: sort or group fewer"):
        shop.query(rows + collected, most_rows=5)
    assert bytes_written() - before < 80_000_000
    assert rows_of(shop, "SELECT COUNT(*) FROM orders") == [(380,)]


def test_a_result_is_bounded_as_a_whole_and_the_next_query_runs(shop):
    # 5,000 rows of 50 texts, each of which is allowed: 1 GB.
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000), "
    text = f"t(x) AS (SELECT printf('%4000c', 'a')) SELECT {', '.join(['x'] * 50)} FROM n, t"
    with pytest.raises(ToolError, match="more than 32 MB: ask for fewer rows or columns"):
        shop.query(many + text, most_rows=5_000)
    with pytest.raises(ToolError, match="too many columns"):
        shop.query(f"SELECT {', '.join(['1'] * 201)}", most_rows=1)
    assert rows_of(shop, "SELECT COUNT(*) FROM orders") == [(380,)]


def test_steps_are_limited_so_that_the_same_query_ends_the_same_way_everywhere():
    count = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT {}) SELECT MAX(x) FROM r"
    with closing(create_database("shop", 1, steps=200_000)) as database:
        assert rows_of(database, count.format(5_000)) == [(5_000,)]
        with pytest.raises(ToolError, match="takes too long"):
            database.query(count.format(50_000), most_rows=5)


def test_reads_of_every_kind_are_allowed(shop):
    assert rows_of(shop, "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY 1")[0] == ("customers",)
    assert rows_of(shop, "WITH t AS (SELECT 2 AS x) SELECT x, CAST(x'ff' AS TEXT), NULL FROM t") == [
        (2, "\ufffd", None)
    ]
    assert len(rows_of(shop, "SELECT id, RANK() OVER (ORDER BY list_price) FROM products")) == 45
    result = shop.query("SELECT id FROM orders", most_rows=7)
    assert (result.columns, len(result.rows), result.more) == (("id",), 7, True)
    assert not shop.query("SELECT id FROM orders LIMIT 7", most_rows=7).more


def test_closing_ends_the_query_that_runs_in_another_thread():
    database = create_database("shop", 1, steps=10**12)
    running = threading.Event()
    errors = []

    def endless():
        running.set()
        try:
            database.query(
                "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT COUNT(*) FROM r", most_rows=1
            )
        except ToolError as error:
            errors.append(str(error))

    thread = threading.Thread(target=endless)
    thread.start()
    running.wait()
    database.close()
    thread.join(30)
    assert not thread.is_alive()
    assert errors
    with pytest.raises(ToolError, match="closed"):
        database.query("SELECT 1", most_rows=1)
    database.close()


# Questions.


def test_there_are_at_least_25_templates_over_four_schemas_with_all_that_sql_is_about():
    golds = [template.gold for schema in SCHEMAS.values() for template in schema.templates]
    assert len(golds) >= 25
    assert f"with {len(golds)} templates of questions" in (ROOT / "examples/sql/README.md").read_text()
    assert len(SCHEMAS) == 4
    for word in (
        "JOIN",
        "GROUP BY",
        "HAVING",
        "NOT IN",
        "NOT EXISTS",
        "DISTINCT",
        "julianday",
        "strftime",
        "AVG",
        "LIMIT",
    ):
        assert any(word in gold for gold in golds), word


@pytest.mark.parametrize("name", SCHEMAS)
def test_gold_queries_are_distinct_and_every_template_has_an_answer(name):
    schema = SCHEMAS[name]
    pairs = [pair for template in schema.templates for pair in template.filled()]
    assert len({gold for _, gold in pairs}) == len(pairs)
    assert all("{" not in question + gold for question, gold in pairs)
    answered = Counter()
    for seed in range(2):
        with closing(create_database(name, seed)) as database:
            for template in schema.templates:
                answered[template.gold] += sum(
                    is_informative(database.query(gold, most_rows=MOST_ROWS)) for _, gold in template.filled()
                )
    assert min(answered.values()) > 0, "a template that no database answers is never asked"


def test_splits_share_no_gold_query_and_no_database():
    rows_by_split = {split: list(tasks(600, split=split)) for split in SPLITS}
    golds = {
        split: {(task.data["schema"], task.data["gold"]) for task in rows} for split, rows in rows_by_split.items()
    }
    assert not golds["train"] & golds["test"]
    assert not {task.data["database"] for task in rows_by_split["train"]} & {
        task.data["database"] for task in rows_by_split["test"]
    }
    for split, maximum in (("train", 28), ("test", 22)):
        used = {
            (s, t.gold)
            for s, schema in SCHEMAS.items()
            for t in schema.templates
            for _, g in t.filled()
            if (s, g) in golds[split]
        }
        assert len(used) >= maximum, f"{split}: {len(used)} templates"


def test_tasks_are_stable_and_do_not_tell_the_answer():
    first = list(tasks(50, split="test"))
    assert first == list(tasks(50, split="test")) == load_tasks("sql_env:tasks?n=50&split=test")
    assert first[:23] == list(tasks(23, split="test"))
    assert first[3].id == "sql-test-0-3"
    assert {task.data["schema"] for task in tasks(100)} == set(SCHEMAS)
    assert {task.data["schema"] for task in tasks(30, schema="library")} == {"library"}
    assert not [task for task in first if "SELECT" in task.prompt or task.data["gold"] in task.prompt]


async def test_the_gold_query_is_worth_1_and_its_result_written_down_nothing():
    for task in tasks(60, split="test"):
        env = await begun(task)
        assert (await play_solution(env))[-1][1].reward == 1.0
        with closing(create_database(task.data["schema"], task.data["database"])) as database:
            rows = rows_of(database, task.data["gold"])
        written = " UNION ALL ".join("SELECT " + ", ".join(map(_literal, row)) for row in rows)
        await reset_env(env, task, seed=0)
        end = await step_env(env, says(f"```sql\n{written}\n```"))
        assert (end.reward, end.terminated) == (0.0, True), task.prompt
        await close_env(env)


def _literal(value):
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else "NULL" if value is None else repr(value)


async def test_wrong_answers_score_0_and_gold_queries_score_1():
    env = await begun(the_task())
    for text in ("", env.question.schema, the_task().prompt, "SELECT 1", "DROP TABLE orders", "```sql\n```", "SELECT"):
        assert await score_env(env, says(text)) == {"score": 0.0}
    assert await score_env(env, None) == {"score": 0.0}
    bomb = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r"
    assert await score_env(env, says(bomb)) == {"score": 0.0}
    gold = env.question.gold
    for text in (
        gold,
        f"{gold};",
        f"Here it is:\n```sql\n{gold};\n```",
        f"```\nSELECT 1\n```\nor rather\n```SQL\n{gold}\n```\n",
    ):
        assert await score_env(env, says(text)) == {"score": 1.0}, text
    await close_env(env)


# Results.


def result(*rows, columns=None, more=False):
    return Result(tuple(columns or "abcdefg"[: len(rows[0]) if rows else 1]), list(rows), more)


@pytest.mark.parametrize(
    ("rows", "gold", "ordered", "same"),
    [
        (result((1, "x"), (2, "y")), result((2, "y"), (1, "x")), False, True),
        (result((1, "x"), (2, "y")), result((2, "y"), (1, "x")), True, False),
        (result((1, "x"), columns=("p", "q")), result((1, "x"), columns=("r", "s")), True, True),
        (result((1, "x")), result(("x", 1)), False, False),
        (result((1,), (1,)), result((1,)), False, False),
        (result((1,), (1,), (2,)), result((1,), (2,), (2,)), False, False),
        (result((1,)), result((1, 1)), False, False),
        (result((3.0,)), result((3,)), False, True),
        (result((3,)), result((3.0,)), False, True),
        (result((3.004,)), result((3,)), False, False),
        (result((3.141592,)), result((3.14,)), False, True),
        (result((3.15,)), result((3.14,)), False, False),
        (result((1_000_000.4,)), result((1_000_000.0,)), False, True),
        (result(("3",)), result((3,)), False, False),
        (result(("3.0",)), result((3.0,)), False, False),
        (result(("X",)), result(("x",)), False, False),
        (result((None,)), result((0,)), False, False),
        (result((None,)), result((None,)), False, True),
        (result((b"x",)), result(("x",)), False, False),
        (result(("a", 1.0), ("a", 2.0)), result(("a", 2.001), ("a", 1.001)), False, True),
        (result((1.0, "b"), (1.004, "a")), result((1.0, "a"), (1.0, "b")), False, True),
        (result((1,), more=True), result((1,)), False, False),
        (result(), result(), False, True),
    ],
)
def test_results_are_the_same_rows_by_value_each_as_often(rows, gold, ordered, same):
    assert same_result(rows, gold, ordered=ordered) is same


VALUES = (
    st.none() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from(["", "a", "B", "3"]) | st.binary(max_size=2)
)


@given(
    st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[VALUES] * width), min_size=1, max_size=6)),
    st.randoms(),
)
def test_any_result_is_the_same_as_itself_shuffled_and_not_with_a_row_more(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert same_result(result(*shuffled), result(*rows), ordered=False)
    assert same_result(result(*rows), result(*rows), ordered=True)
    assert not same_result(result(*rows, rows[0]), result(*rows), ordered=False)
    changed = [(*rows[0][:-1], "something else"), *rows[1:]]
    assert not same_result(result(*changed), result(*rows), ordered=False)


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order  by a limit 1", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT (SELECT 3))", False),
        ("SELECT ROW_NUMBER() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'order by' FROM t -- order by a", False),
        ('SELECT "order by" FROM t', False),
        ("SELECT a FROM t WHERE b IN (SELECT b FROM u ORDER BY b) ORDER BY a", True),
    ],
)
def test_a_query_is_ordered_by_its_outermost_order_by(sql, ordered):
    assert is_ordered(sql) is ordered


def test_the_query_of_a_message_is_its_last_block():
    assert submitted_query("SELECT 1;") == "SELECT 1"
    assert submitted_query("a\n```sql\nSELECT 1\n```\nb\n```\nSELECT 2 ;\n```\n") == "SELECT 2"
    assert submitted_query("```sqlite\nSELECT 1") == "```sqlite\nSELECT 1"


# Tools.


async def test_the_tools_look_and_tell_errors():
    task = the_task(schema="shop")
    env = await begun(task, max_rows=2)
    assert [schema.name for schema in schemas(env)] == ["list_tables", "describe_table", "query"]
    assert await answer(env, "list_tables") == "customers, order_lines, orders, products"
    described = await answer(env, "describe_table", table="orders")
    assert described.startswith("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id")
    assert len(described.split("\n\n")[1].splitlines()) == 4
    unknown = json.loads(await answer(env, "describe_table", table='x"; DROP TABLE orders'))["error"]
    assert unknown["type"] == "tool_error"
    assert "there are customers, order_lines" in unknown["message"]
    text = await answer(env, "query", sql="SELECT id, NULL AS gone, x'0a' FROM orders ORDER BY id")
    assert text.splitlines() == [
        "id | gone | x'0a'",
        "1 | NULL | x'0a'",
        "2 | NULL | x'0a'",
        "(further rows are not shown; the first 2 are)",
    ]
    assert (await answer(env, "query", sql="```sql\nSELECT id FROM orders WHERE 0;\n```")).splitlines() == [
        "id",
        "(no rows)",
    ]
    assert "read-only" in await answer(env, "query", sql="DELETE FROM orders")
    long = await answer(env, "query", sql="SELECT group_concat(title) FROM products")
    assert len(long.splitlines()[1]) == 123
    wide = await answer(env, "query", sql="SELECT " + ", ".join(["hex(zeroblob(60))"] * 200))
    assert len(wide) <= 8_000
    await close_env(env)


@pytest.mark.parametrize("config", [{"max_rows": 0}, {"max_rows": True}, {"max_steps": -1}, {"max_steps": 1.5}])
def test_limits_that_are_none_are_named(config):
    with pytest.raises(ConfigError, match=f"{next(iter(config))} is .*at least 1"):
        make("sql", **config)
    with pytest.raises(RegistryError, match="max_rows"):
        make("sql", max_row=3)


# A user's own database files.


@pytest.fixture
def files(tmp_path):
    for name, count in (("one", 3), ("two", 5)):
        with closing(sqlite3.connect(tmp_path / f"{name}.sqlite")) as connection:
            connection.execute('CREATE TABLE "odd ""name" (n INTEGER, note TEXT)')
            connection.executemany('INSERT INTO "odd ""name" VALUES (?, ?)', [(n, "x" * 9_000) for n in range(count)])
            connection.commit()
    return tmp_path


GOLD = 'SELECT MAX(n) FROM "odd ""name"'


async def test_answer_on_a_database_file_is_judged_on_the_check_database(files):
    data = {"database": str(files / "one.sqlite"), "check_database": str(files / "two.sqlite"), "gold": GOLD}
    content = (files / "one.sqlite").read_bytes()
    env = await begun(Task("t", "What is the largest n?", data))
    assert await answer(env, "list_tables") == 'odd "name'
    assert "0 | xxxx" in await answer(env, "describe_table", table='odd "name')
    assert (await step_env(env, says("SELECT 2"))).reward == 0.0
    await reset_env(env, Task("t", "What is the largest n?", data), seed=0)
    assert (await play_solution(env))[-1][1].reward == 1.0
    await reset_env(env, Task("t", "?", {**data, "check_database": None}), seed=0)
    assert (await step_env(env, says("SELECT 2"))).reward == 1.0
    await close_env(env)
    assert (files / "one.sqlite").read_bytes() == content
    assert sorted(file.name for file in files.iterdir()) == ["one.sqlite", "two.sqlite"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, r"data\['gold'\] is None"),
        ({"gold": " "}, r"data\['gold'\]"),
        ({"gold": "SELECT 1"}, r"data\['database'\] is None.*seed, or the path"),
        ({"gold": "SELECT 1", "database": 1}, r"data\['schema'\] is None.*shop"),
        ({"gold": "SELECT 1", "database": True, "schema": "shop"}, r"data\['database'\] is True"),
        (
            {"gold": "SELECT x FROM nowhere", "database": 1, "schema": "shop"},
            r"data\['gold'\] fails: no such table: nowhere",
        ),
        ({"gold": "DELETE FROM orders", "database": 1, "schema": "shop"}, r"data\['gold'\] fails: .*read-only"),
        ({"gold": "SELECT 1", "database": 1, "schema": "shop"}, "same result on 50 different databases"),
        ({"gold": "SELECT COUNT(*) FROM orders WHERE 0", "database": 1, "schema": "shop"}, "same result"),
        ({"gold": "SELECT 1 FROM order_lines, orders", "database": 1, "schema": "shop"}, "more than 5000 rows"),
        ({"gold": "SELECT 1", "database": "/nowhere.sqlite"}, r"'/nowhere.sqlite': there is no such file"),
        ({"gold": "SELECT 1", "database": __file__}, "cannot be read as a SQLite database"),
        ({"gold": "SELECT 1", "database": "x", "check_database": 3}, r"data\['check_database'\] is 3"),
    ],
)
async def test_a_task_that_cannot_be_judged_is_named(data, words):
    env = make("sql")
    with pytest.raises(TaskError, match=rf"^task 't': .*{words}"):
        await reset_env(env, Task("t", "p", data), seed=0)
    await close_env(env)


def test_unknown_splits_and_schemas_are_named():
    with pytest.raises(TaskError, match="split 'dev'"):
        next(tasks(split="dev"))
    with pytest.raises(TaskError, match="schema 'bank'"):
        next(tasks(schema="bank"))


# The environment as such.


def test_a_wrong_query_is_found_on_the_second_database_only():
    """Why there is a second one: on the first these two queries cannot be told apart."""
    question = question_of(
        Task("t", "p", {"schema": "shop", "database": 1, "gold": "SELECT COUNT(*) FROM customers WHERE city = 'Lyon'"})
    )
    with closing(question.open(steps=10_000_000)) as database:
        ((count,),) = rows_of(database, question.gold)
        other = f"SELECT {count}"
        assert same_result(
            database.query(other, most_rows=9), database.query(question.gold, most_rows=9), ordered=False
        )
        assert not is_right(question, database, other)
        assert is_right(question, database, "SELECT SUM(city = 'Lyon') FROM customers")


async def test_episodes_leave_no_connection_behind():
    def connections():
        gc.collect()
        return sum(type(instance) is sqlite3.Connection for instance in gc.get_objects())

    task = the_task()
    connections_before, threads = connections(), threading.active_count()
    env = make("sql")
    for _ in range(20):
        env.reset(task, seed=0)
    for _ in range(20):
        other = make("sql")
        other.reset(task, seed=0)
        await close_env(other)
    await close_env(env)
    await close_env(env)
    assert isinstance(env.database, Database)
    with pytest.raises(ToolError, match="closed"):
        env.database.query("SELECT 1", most_rows=1)
    del env, other
    assert connections() == connections_before
    assert threading.active_count() == threads


async def test_equal_seeds_give_equal_episodes():
    one, other = make("sql"), make("sql")
    for seed in range(6):
        assert await reset_env(one, None, seed=seed) == await reset_env(other, None, seed=seed)
        assert one.question == other.question
    assert (await play_solution(one))[-1][1].reward == 1.0
    for env in (one, other):
        await close_env(env)


async def test_database_file_passes_the_checker(files):
    data = {"database": str(files / "one.sqlite"), "check_database": str(files / "two.sqlite"), "gold": GOLD}
    report = await check_env("sql", tasks=[Task("t", "What is the largest n?", data), the_task()])
    assert report.ok, str(report)


def test_a_file_is_opened_by_any_name(files):
    (files / "one.sqlite").rename(files / "a b?c#d%20.sqlite")
    with closing(open_file(str(files / "a b?c#d%20.sqlite"), "here")) as database:
        assert rows_of(database, GOLD) == [(2,)]


async def test_the_training_example_can_start(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_dir("qwen3"), model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 32_768}))
    # A dry run looks for weights and reads none.
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    changes = [f"policies.main.model.path={model}", f"runs={tmp_path}/runs", "tasks=sql_env:tasks?n=40"]
    config = load_config(TrainConfig, ROOT / "examples/sql/train.yaml", changes)
    report = await dry_run(config)
    assert [check for check in report.checks if check.outcome != "ok"] == []
    assert "200 steps of 32 tasks x 8 episodes" in "\n".join(report.plan)
    assert not (tmp_path / "runs").exists()


async def run(task, script, executor, **env):
    renderer = ToyRenderer()
    config = RolloutConfig(env=SpecConfig(name="sql", config=env))
    runner = EpisodeRunner(
        config, ScriptedClient(renderer, script), renderer, context_length=100_000, executor=executor
    )
    outcome = await runner.run(EpisodeSpec(task, task.id))
    assert outcome.error is None
    return outcome.trajectories[0]


async def test_episodes_that_run_at_once_in_few_threads_keep_their_databases_apart():
    env, rows, scripts = make("sql"), list(tasks(24, split="test")), []
    for task in rows:
        await reset_env(env, task, seed=0)
        scripts.append([message for message, _ in await play_solution(env)])
    await close_env(env)
    wrong = [says(rows[n - 1].data["gold"]) for n in range(len(rows))]
    with ThreadPoolExecutor(3) as executor:
        right = [run(task, script, executor) for task, script in zip(rows, scripts, strict=True)]
        # Each ends with the answer to another question.
        other = [
            run(task, [*script[:-1], end], executor) for task, script, end in zip(rows, scripts, wrong, strict=True)
        ]
        trajectories = await asyncio.gather(*right, *other)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 24 + [0.0] * 24
    assert {trajectory.metrics["tool_errors"] for trajectory in trajectories} == {0.0}
