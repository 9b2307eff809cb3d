"""The search environment: its encyclopedia, its index, its answers, and a corpus of one's own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_env import bm25
from search_env.bm25 import Index, index_of_encyclopedia, index_of_file
from search_env.encyclopedia import Passage, encyclopedia, read_corpus
from search_env.tasks import exact_match, last_answer, qa_tasks, questions, tasks, word_f1, words

from turnwise.envs import close_env, make, play_solution, reset_env, schemas, score_env, step_env
from turnwise.errors import ConfigError, TaskError
from turnwise.ext.checks.environment import check_env
from turnwise.tasks import Task, load_tasks
from turnwise.tasks.seeded import SPLITS
from turnwise.types import ToolCall


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", name, arguments)]}


def says(text):
    return {"role": "assistant", "content": text}


async def answer(env, name, **arguments):
    return (await step_env(env, call(name, **arguments))).observation[0]["content"]


def lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


# The encyclopedia.


def test_an_encyclopedia_is_drawn_from_its_seed():
    first = encyclopedia("train", 3)
    encyclopedia.cache_clear()
    assert encyclopedia("train", 3) == first
    assert encyclopedia("train", 4) != first
    assert len(first.passages) == 40 + 120 + 240 + 480
    assert len({passage.title for passage in first.passages}) == len({passage.id for passage in first.passages}) == 880


def test_splits_share_no_person_and_no_town():
    def names(split, seed):
        book = encyclopedia(split, seed)
        parts = {part for work in book.works for part in work.maker.name.split()}
        return parts | {town.name for town in book.towns} | {town.region for town in book.towns}

    train = names("train", 0) | names("train", 1)
    test = names("test", 0) | names("test", 1)
    assert len(test) > 300
    assert not train & test


def test_last_article_of_the_path_answers_the_question():
    book = encyclopedia("test", 0)
    texts = {passage.title: passage.text for passage in book.passages}
    test_questions = questions("test", 0)
    assert len(test_questions) >= 1_000
    assert len({question.text for question in test_questions}) == len(test_questions)
    assert {len(question.path) for question in test_questions} == {2, 3}
    for question in test_questions:
        assert words(question.answer)
        article = words(texts[question.path[-1]])
        answer = words(question.answer)
        assert any(article[at : at + len(answer)] == answer for at in range(len(article))), question
        assert not set(answer) <= set(words(question.text)), "the question tells its answer"
        assert question.path[0].casefold() in question.text.casefold(), "the question must say where to begin"
        for title in question.path[1:]:
            assert title.casefold() not in question.text.casefold(), "the question tells the next step"


def test_first_article_seldom_holds_the_answer():
    """The first article, which the question names, seldom holds the answer: two years may be the same by chance."""
    texts = {passage.title: passage.text for passage in encyclopedia("train", 0).passages}
    train_questions = questions("train", 0)
    answered = sum(question.answer in texts[question.path[0]] for question in train_questions)
    assert answered <= len(train_questions) // 100


def test_tasks_are_stable_and_different():
    first = list(tasks(50, split="test"))
    assert first == list(tasks(50, split="test")) == load_tasks("search_env:tasks?n=50&split=test")
    assert first[:7] == list(tasks(7, split="test"))
    assert first[3].id == "search-test-0-3"
    many = list(tasks(2_100))
    assert len({(task.prompt, task.data["encyclopedia"]) for task in many}) == 2_100
    assert len({task.data["encyclopedia"] for task in many}) == 3
    with pytest.raises(TaskError, match="split 'dev'"):
        next(tasks(split="dev"))


@pytest.mark.parametrize("split", SPLITS)
async def test_solution_scores_1_and_other_texts_score_0(split):
    env = make("search")
    for task in tasks(40, split=split):
        await reset_env(env, task, seed=0)
        played = await play_solution(env)
        assert played[-1][1].reward == 1.0
        contents = [message["content"] for _, step in played for message in step.observation]
        assert not [content for content in contents if "error" in content]
        for text in ("", task.prompt, "I do not know.", f"It is {env.accepted[0]}, I think", contents[-1]):
            assert await score_env(env, says(text)) == {"score": 0.0}
        assert await score_env(env, None) == {"score": 0.0}


# Searching.


def test_the_best_come_first_and_ties_in_the_order_of_the_corpus():
    corpus = [
        Passage("1", "Cats", "A cat sleeps."),
        Passage("2", "Dogs", "A dog barks at a cat."),
        Passage("3", "Birds", "Birds sing."),
        Passage("4", "Birds", "Birds sing."),
    ]
    index = Index(corpus)
    assert [passage.id for passage in index.search("sing birds", 5)] == ["3", "4"]
    assert [passage.id for passage in index.search("cat", 5)] == ["1", "2"]
    assert [passage.id for passage in index.search("CAT!", 1)] == ["1"]
    assert [passage.id for passage in index.search("dogs", 5)] == ["2"]
    for nothing in ("", "the", "?", "zebra", "\ud800"):
        assert index.search(nothing, 5) == []


def test_the_best_of_a_large_corpus_are_the_first_of_all_that_fit():
    corpus = [Passage(str(n), "", f"word{n % 7} word{n % 11} filler") for n in range(3_000)]
    index = Index(corpus)
    # Longer ones, with both words, come before those with one; among equals the order is the corpus's.
    matching = [str(n) for n in range(3_000) if {n % 7, n % 11} == {3, 5}]
    everything = [passage.id for passage in index.search("word3 word5", 5_000)]
    assert everything[: len(matching)] == matching
    for k in (1, 5, 20, 100, 1_000):
        assert [passage.id for passage in index.search("word3 word5", k)] == everything[:k]
    assert len(everything) == sum(bool({n % 7, n % 11} & {3, 5}) for n in range(3_000))


def test_threads_share_one_index_of_a_corpus(monkeypatch, tmp_path):
    builds = Counter()

    class Counted(Index):
        def __init__(self, passages):
            builds[len(passages)] += 1
            super().__init__(passages)

    monkeypatch.setattr(bm25, "Index", Counted)
    path = lines(tmp_path / "c.jsonl", *({"text": f"passage {n}"} for n in range(50)))
    with ThreadPoolExecutor(8) as threads:
        indexes = list(threads.map(index_of_file, [path] * 40))
        books = list(threads.map(lambda _: index_of_encyclopedia("train", 987), range(16)))
    assert len(set(map(id, indexes))) == len(set(map(id, books))) == 1
    assert builds == {50: 1, 880: 1}
    lines(tmp_path / "c.jsonl", *({"text": f"passage {n}"} for n in range(51)))
    assert len(index_of_file(path).passages) == 51
    bm25._file_index.cache_clear()
    bm25._encyclopedia_index.cache_clear()


async def test_the_tools_tell_ids_and_errors():
    env = make("search")
    (task,) = tasks(1, split="test")
    await reset_env(env, task, seed=0)
    assert [schema.name for schema in schemas(env)] == ["search", "open"]
    k = schemas(env)[0].parameters["properties"]["k"]
    assert (k["minimum"], k["maximum"], k["default"]) == (1, 20, 5)
    passages = await answer(env, "search", query=task.data["path"][0], k=2)
    first, second = passages.splitlines()
    assert f"] {task.data['path'][0]}: " in first
    name = first[1 : first.index("]")]
    for written in (name, f"[{name}]", f" {name} "):
        assert (await answer(env, "open", id=written)).startswith(f"{task.data['path'][0]}\n\n")
    assert second.startswith("[a")
    assert "there is no passage 'nowhere'" in await answer(env, "open", id="nowhere")
    assert await answer(env, "search", query="the") == "nothing was found: use other words"
    assert "invalid_arguments" in await answer(env, "search", query="x", k=21)
    await close_env(env)


# Answers.


@pytest.mark.parametrize(
    ("text", "accepted", "right"),
    [
        ("Answer: Kagul", "Kagul", True),
        ("**Answer:** kagul.", "Kagul", True),
        ("I looked.\nAnswer: Fifel\nNo,\nfinal answer: The  KAGUL!", "Kagul", True),
        ("the Kopios", "Kopios", True),
        ("1,408", "1408", True),
        ("Answer: 1408 or 1409", "1408", False),
        ("Answer: Kagul Fifel", "Kagul", False),
        ("Answer: Kagulu", "Kagul", False),
        ("Answer:", "Kagul", False),
        ("Kagul, Fifel, Timor", "Kagul", False),
        ("\uff4b\uff41\uff47\uff55\uff4c", "Kagul", True),
        ("", "Kagul", False),
        ("A", "A", True),
        ("", "A", False),
        ("The", "A", False),
        ("**Final answer:**\n\nKagul", "Kagul", True),
    ],
)
def test_answers_are_compared_by_their_words(text, accepted, right):
    assert exact_match(last_answer(text), [accepted, "something else"]) == float(right)


@pytest.mark.parametrize("piece", ["\n", "\n.", "#### \n", "Answer:\n", "answer\n"])
def test_no_answer_costs_more_than_its_length(piece):
    # In the square of it, each of these takes 10 to 60 s of processor time.
    started = time.process_time()
    last_answer(piece * 20_000)
    assert time.process_time() - started < 2


def test_f1_is_the_share_of_common_words():
    # 2 common words of 3 and 2: 2 * 2 / 5.
    assert word_f1("Weamurt Gobrith Senior", ["Weamurt Gobrith"]) == pytest.approx(0.8)
    assert word_f1("nothing", ["Weamurt Gobrith"]) == 0.0
    assert word_f1("", ["the"]) == 0.0
    assert word_f1("the Weamurt", ["the"]) == 0.0
    # A word said twice is common once: 2 * 1 / 3.
    assert word_f1("x x", ["x"]) == pytest.approx(2 / 3)


@given(st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_f1_is_1_exactly_where_the_words_are_the_same_up_to_their_order(text, accepted):
    value = word_f1(text, accepted)
    assert 0.0 <= value <= 1.0
    same = any(
        words(accepted_text) and Counter(words(text)) == Counter(words(accepted_text)) for accepted_text in accepted
    )
    assert (value == 1.0) == same
    if exact_match(text, accepted) and words(text):
        assert value == 1.0


# A corpus of one's own.


@pytest.fixture
def own_corpus(tmp_path):
    corpus = lines(
        tmp_path / "corpus.jsonl",
        {"id": "p1", "title": "Rivers", "text": "The Elbe flows through Dresden."},
        "",
        {"id": 7, "text": "Dresden has a famous opera."},
        {"text": "An untitled passage without an id."},
    )
    rows = lines(
        tmp_path / "rows.jsonl",
        {"question": "Which river flows through Dresden?", "answer": ["Elbe", "the river Elbe"], "level": 1},
        {"id": "q7", "question": "How many operas?", "answer": 1},
    )
    return corpus, rows


async def test_questions_and_passages_of_files_are_played(own_corpus):
    corpus, rows = own_corpus
    assert read_corpus(corpus) == [
        Passage("p1", "Rivers", "The Elbe flows through Dresden."),
        Passage("7", "", "Dresden has a famous opera."),
        Passage("2", "", "An untitled passage without an id."),
    ]
    first, second = load_tasks(f"search_env:qa_tasks?path={rows}")
    assert (first.id, first.data) == ("rows-1", {"level": 1, "answer": ["Elbe", "the river Elbe"]})
    assert (second.id, second.prompt, second.data) == ("q7", "How many operas?", {"answer": 1})
    env = make("search", corpus=corpus)
    await reset_env(env, first, seed=0)
    assert "[p1] Rivers: The Elbe" in await answer(env, "search", query="river dresden")
    assert (await step_env(env, says("Answer: The River Elbe"))).reward == 1.0
    await reset_env(env, second, seed=0)
    assert (await step_env(env, says("1"))).reward == 1.0
    part = make("search", corpus=corpus, metric="f1")
    await reset_env(part, first, seed=0)
    assert (await step_env(part, says("Elbe river probably"))).reward == pytest.approx(2 * 2 / 5)
    with pytest.raises(TaskError, match=r"tasks: search_env:qa_tasks"):
        await reset_env(env, None, seed=0)
    assert (await check_env(lambda: make("search", corpus=corpus), tasks=[first])).ok


@pytest.mark.parametrize(
    ("rows", "words_"),
    [
        ([{"text": "x"}, "{"], r"c.jsonl:2: this line is not JSON"),
        (["[]"], r"c.jsonl:1: a passage is an object"),
        ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], r"c.jsonl:2: the id 'a' is used in line 1"),
        ([{"body": "x"}], r"c.jsonl:1: field 'text' is None \(fields here: 'body'\)"),
        ([{"text": "  "}], r"field 'text'"),
        ([{"text": "x", "title": 3}], r"field 'title' is 3"),
        ([{"text": "x", "id": True}], r"field 'id' is True"),
        ([""], "holds no passages"),
        ([{"text": "the of a"}], "no passage with a word"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named_when_the_environment_is_made(tmp_path, rows, words_):
    with pytest.raises(ConfigError, match=words_):
        make("search", corpus=lines(tmp_path / "c.jsonl", *rows))


def test_missing_file_or_unknown_metric_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        make("search", corpus=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"metric is 'bleu'.*'f1'"):
        make("search", metric="bleu")
    with pytest.raises(TaskError, match=r"there is no such file.*'question'"):
        next(qa_tasks(str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    ("row", "words_"),
    [
        ("{", r"r.jsonl:2: this line is not JSON"),
        ("3", "a row is an object"),
        ({"question": "q"}, r"field 'answer' is missing \(fields here: 'question'\)"),
        ({"answer": "a"}, r"field 'question' is missing"),
        ({"question": "q", "answer": ["a", "?"]}, "has no letter and no digit to compare"),
        ({"question": 3, "answer": "a"}, "field 'question' is 3"),
        ({"question": "q", "answer": None}, "field 'answer' is None"),
        ({"question": "q", "answer": []}, "field 'answer'"),
        ({"question": "q", "answer": ["a", " "]}, "accepted answer is empty"),
    ],
)
def test_a_row_that_is_no_question_is_named(tmp_path, row, words_):
    path = lines(tmp_path / "r.jsonl", {"question": "q", "answer": "a"}, row)
    with pytest.raises(TaskError, match=words_):
        list(qa_tasks(path))


def test_the_fields_of_a_row_may_have_other_names(tmp_path):
    path = lines(tmp_path / "r.jsonl", {"q": "What?", "gold": ["this"]})
    (task,) = qa_tasks(path, question="q", answer="gold")
    assert (task.prompt, task.data) == ("What?", {"answer": ["this"]})


@pytest.mark.parametrize(
    ("data", "words_"),
    [
        ({}, "field 'answer' is None"),
        ({"answer": "x"}, r"\['encyclopedia'\] is missing.*corpus"),
        ({"answer": "x", "encyclopedia": "one", "split": "train"}, "the encyclopedia 'one'"),
        ({"answer": "x", "encyclopedia": 1, "split": "dev"}, "the split 'dev'"),
    ],
)
async def test_a_task_that_cannot_be_judged_is_named(data, words_):
    with pytest.raises(TaskError, match=f"^task 't': data.*{words_}"):
        await reset_env(make("search"), Task("t", "p", data), seed=0)


def run_code(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_missing_package_names_the_extra_to_install():
    code = (
        "import sys\n"
        "sys.modules['bm25s'] = None\n"
        "import turnwise.envs as envs\n"
        "from turnwise.errors import MissingExtraError\n"
        "try:\n"
        "    envs.make('search_env:SearchEnv')\n"
        "except MissingExtraError as error:\n"
        "    print(error)\n"
    )
    output = run_code(code)
    assert "pip install 'turnwise-rl[search]'" in output
    assert "'search'" in output


def test_importing_the_environment_does_not_import_bm25s():
    code = "import sys, search_env.env; print('bm25s' in sys.modules)"
    output = run_code(code)
    assert output.strip() == "False"


async def test_episodes_share_one_index_and_leave_no_thread():
    def indexes():
        gc.collect()
        return sum(type(instance) is Index for instance in gc.get_objects())

    (task,) = tasks(1)
    env = make("search")
    env.reset(task, seed=0)
    indexes_before, threads = indexes(), threading.active_count()
    for _ in range(50):
        other = make("search")
        other.reset(task, seed=0)
        assert other.index is env.index
        await close_env(other)
    assert indexes() == indexes_before
    assert threading.active_count() == threads


async def test_equal_seeds_give_equal_episodes():
    one, other = make("search"), make("search")
    prompts = set()
    for seed in range(6):
        first = await reset_env(one, None, seed=seed)
        assert first == await reset_env(other, None, seed=seed)
        prompts.add(first[0][-1]["content"])
    assert len(prompts) == 6
