"""docs/environment-library.md says what is there: settings and their defaults, scores, and task sources that load."""

from __future__ import annotations

import inspect
import re
from itertools import islice

import pytest
import yaml

from support.doc_pages import ROOT, page
from turnwise.envs.basic.guess_number import GuessNumberEnv
from turnwise.envs.registration import env_class
from turnwise.tasks import SourceConfig, iter_tasks

TEXT = page("environment-library.md")
SECTIONS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def settings(section: str) -> dict[str, str]:
    """The keys of a section's table of settings, with what it says of their defaults."""
    table = section.partition("| Key | Meaning | Default |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[1:]]
    return {name: default for row in rows for name, default in zip(
        re.findall(r"`(\w+)`", row[0]), row[2].split(", ") if "," in row[0] else [row[2]], strict=True
    )}  # fmt: skip


@pytest.mark.parametrize("name", ["calculator", "code", "guess_number", "math"])
def test_the_settings_are_those_of_the_constructor(name):
    parameters = inspect.signature(env_class(name)).parameters
    described = settings(SECTIONS[name])
    assert list(described) == list(parameters)
    for key, default in described.items():
        if default.isdigit():
            assert parameters[key].default == int(default), key


@pytest.mark.parametrize(
    ("name", "folder"), [("nim", "two_player"), ("tool_calls", "tool_calls"), ("trail", "long_task")]
)
def test_the_settings_of_an_example_are_those_of_its_constructor(name, folder):
    described = settings((ROOT / "examples" / folder / "README.md").read_text())
    assert list(described) == list(inspect.signature(env_class(name)).parameters)


def test_the_sections_of_environments_with_a_score_are_in_the_table():
    table = TEXT.partition("| Name |")[2].partition("\n\n")[0]
    for name in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE):
        assert name in SECTIONS
        cls = env_class(name)
        assert cls.score_range is not None
        assert cls.default_tasks is not None


def test_task_sources_load():
    sources = re.findall(r"--tasks '(turnwise\.[^']+)'", TEXT)
    assert len(sources) >= 2
    loadable = [source for source in sources if "path=" not in source]
    assert loadable
    for source in loadable:
        assert next(islice(iter_tasks(source), 1)).prompt


def test_the_rows_of_a_configuration(tmp_path):
    [block] = re.findall(r"```yaml\n(.*?)```", SECTIONS["math"], re.DOTALL)
    rows = yaml.safe_load(block)["tasks"]
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    [task] = iter_tasks(SourceConfig(**{**rows, "source": str(file)}))
    assert task.data["answer"] == "2"


def test_step_to_read_has_the_stated_length():
    assert "a `step` of 19 lines" in SECTIONS["guess_number"]
    assert len(inspect.getsource(GuessNumberEnv.step).splitlines()) == 19
