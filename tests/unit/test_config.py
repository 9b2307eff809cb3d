"""The loader of configurations: merging, overrides, the words of every problem, and the way back."""

from __future__ import annotations

import contextlib
import enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from turnwise.config import (
    ConfigPath,
    ConfigReference,
    ConfigSource,
    dump_config,
    load_config,
    parse_overrides,
    read_yaml,
    write_yaml,
)
from turnwise.errors import ConfigError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Kind(enum.StrEnum):
    FAST = "fast"
    SLOW = "slow"


class Optim(Strict):
    lr: float = Field(default=1e-3, gt=0)
    name: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)


class EvalTask(Strict):
    path: ConfigPath
    n: int = 1


class Config(Strict):
    steps: int = Field(default=10, ge=1)
    name: str = "run"
    kind: Kind = Kind.FAST
    optim: Optim = Optim()
    evals: list[EvalTask] = []
    limit: int | Literal["auto"] | None = None
    out: ConfigPath = Path("runs")
    model: ConfigPath | None = None
    custom: dict[str, Any] = {}
    greedy: bool = False


class Required(Strict):
    path: str = Field(description="a folder with a model")
    steps: int


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def problem(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return str(caught.value)


def test_later_sources_win_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path, "steps: 3\noptim: {lr: 0.1, name: muon}\n", "a.yaml")
    second = write(tmp_path, "optim:\n  lr: 0.2\n", "b.yaml")
    config = load_config(Config, [first, second], ["steps=5"], defaults={"name": "d", "steps": 1})
    assert (config.steps, config.name, config.optim.lr, config.optim.name) == (5, "d", 0.2, "muon")


def test_overrides_reach_into_sections_and_lists(tmp_path: Path) -> None:
    file = write(tmp_path, "evals:\n- {path: a}\n- {path: b}\n")
    config = load_config(
        Config, file, ["evals.1.n=4", "evals[0].n=3", "evals.2.path=/c", "optim.betas=[0.5, 0.6]", "custom.a.b={x: 1}"]
    )
    assert [task.n for task in config.evals] == [3, 4, 1]
    assert config.evals[2].path == Path("/c")
    assert config.optim.betas == (0.5, 0.6)
    assert config.custom == {"a": {"b": {"x": 1}}}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("5E3", 5e3), ("no", "no"), ("on", "on"), ("010", 10), ("1:30", "1:30"), ("null", None),
     ("2024-01-01", "2024-01-01"), ("true", True), ("", None), ("'5'", "5"), (".5", 0.5), ("1_000", "1_000")],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    assert load_config(Config, overrides=[f"custom.x={text}"]).custom["x"] == value
    assert type(load_config(Config, overrides=[f"custom.x={text}"]).custom["x"]) is type(value)


def test_unknown_key_names_path_value_place_and_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, "optim:\n  lrr: 0.5\n")
    message = problem(Config, file)
    for part in ("optim.lrr", "config.yaml:2", "0.5", "optim.lr?"):
        assert part in message


def test_key_of_another_section_is_pointed_to() -> None:
    assert "did you mean optim.lr?" in problem(Config, overrides=["lr=1"])


def test_unknown_key_without_a_near_key_lists_the_known_keys() -> None:
    message = problem(Config, overrides=["optim.zzzzzz=1"])
    assert "known keys here: lr, name, betas" in message


def test_unknown_key_inside_a_list_item(tmp_path: Path) -> None:
    file = write(tmp_path, "evals:\n- path: a\n  m: 3\n")
    message = problem(Config, file)
    assert "evals.0.m (config.yaml:3)" in message
    assert "evals.0.n" in message or "known keys here: path, n" in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("steps=abc", ["steps", "'abc'", "an integer"]),
        ("steps=0", ["0", "at least 1"]),
        ("steps=1.5", ["1.5", "no fraction"]),
        ("optim.lr=0", ["optim.lr", "more than 0"]),
        ("optim.lr=fast", ["'fast'", "a number"]),
        ("optim.name=sgd", ["'sgd'", "'adamw' or 'muon'"]),
        ("kind=quick", ["'quick'", "'fast' or 'slow'"]),
        ("limit=never", ["limit", "'never'", "an integer or 'auto'"]),
        ("greedy=7", ["greedy", "7", "true or false"]),
        ("name=5", ["name", "5", "text"]),
        ("evals=3", ["evals", "3", "a list"]),
        ("optim=3", ["optim", "3", "a section"]),
        ("out=''", ["out", "a path"]),
    ],
)
def test_wrong_value_names_path_value_and_what_is_allowed(override: str, parts: list[str]) -> None:
    message = problem(Config, overrides=[override])
    for part in [*parts, f"override {override}"]:
        assert part in message, message
    assert "pydantic" not in message


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "steps: x\noptim: {lr: -1}\nnme: a\n")
    message = problem(Config, file, ["greedy=q"])
    assert message.startswith("4 problems")
    for part in (
        "steps (config.yaml:1)",
        "optim.lr (config.yaml:2)",
        "nme (config.yaml:3)",
        "did you mean name?",
        "greedy",
    ):
        assert part in message


def test_missing_keys_are_explained() -> None:
    message = problem(Required)
    assert "path: missing; it is required (a folder with a model)" in message
    assert "steps: missing" in message


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("a: [1, 2\nb: 3\n", "config.yaml:2"),
        ("a: 1\na: 2\n", "config.yaml:2"),
        ("\tx: 1\n", "config.yaml:1"),
        ("- 1\n", "config.yaml"),
        ("name: a\n? [x, y]\n: 1\n", "config.yaml:2"),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path: Path, text: str, position: str) -> None:
    assert position in problem(Config, write(tmp_path, text))


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    assert "not YAML" in problem(Config, write(tmp_path, "name: !!python/object/apply:os.getcwd []\n"))


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in problem(Config, tmp_path / "none.yaml")


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"name: \xff\xfe")
    assert "c.yaml is not UTF-8" in problem(Config, tmp_path / "c.yaml")


@pytest.mark.parametrize("override", ["steps", "=3", ".=3", ""])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    assert "key=value" in problem(Config, overrides=[override])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("evals.5.n=1", "0 to 1"),
        ("evals.x.n=1", "0 to 1"),
        ("steps.x=1", "not a section"),
        ("custom.a.0=1", "whole list"),
    ],
)
def test_an_override_into_nothing_is_refused(tmp_path: Path, override: str, part: str) -> None:
    file = write(tmp_path, "evals:\n- {path: a}\nsteps: 3\n")
    assert part in problem(Config, file, [override])


def test_overrides_alone_become_plain_values() -> None:
    values = parse_overrides(["n=3", "a.b=x", "a.c=[1, y]"])
    assert values == {"n": 3, "a": {"b": "x", "c": [1, "y"]}}
    assert type(values["a"]["b"]) is str


def test_paths_are_relative_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = write(tmp_path, "evals: [{path: data/a}]\nout: ../out\n")
    config = load_config(Config, file, ["model=m"])
    assert config.evals[0].path == tmp_path / "data/a"
    assert config.out.resolve() == (tmp_path / "../out").resolve()
    assert config.model == tmp_path / "here/m"
    assert load_config(Config).out == tmp_path / "here/runs"


@pytest.mark.parametrize("rest", ["", ":make", ":make?n=3&split=a:b"])
def test_file_in_a_reference_is_relative_to_its_file(tmp_path: Path, rest: str) -> None:
    class Source(Strict):
        tasks: ConfigReference

    (tmp_path / "lookup").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "rows.py").touch()
    file = write(tmp_path, f"tasks: 'sub/rows.py{rest}'\n")
    assert load_config(Source, file).tasks == f"{tmp_path}/sub/rows.py{rest}"
    for other in ("lookup", "pkg.mod:make?n=1", "missing.jsonl", f"{tmp_path}/sub/rows.py{rest}"):
        assert load_config(Source, write(tmp_path, f"tasks: '{other}'\n")).tasks == other
    assert "tasks" in problem(Source, overrides=["tasks=3"])


def test_a_source_may_be_a_folder_of_any_name(tmp_path: Path) -> None:
    class Where(Strict):
        tasks: ConfigSource

    (tmp_path / "rows").mkdir()
    assert load_config(Where, write(tmp_path, "tasks: rows\n")).tasks == f"{tmp_path}/rows"
    for other in ("pkg.mod:make?n=1", "other", ":", ""):
        assert load_config(Where, write(tmp_path, f"tasks: '{other}'\n")).tasks == other


def test_free_sections_hold_plain_text(tmp_path: Path) -> None:
    file = write(tmp_path, "custom: {a: x, b: [y, {c: z}]}\n")
    custom = load_config(Config, file).custom
    assert [type(custom["a"]), type(custom["b"][0]), type(custom["b"][1]["c"])] == [str, str, str]


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "data: rows\n", "my.yaml")
    names: dict[str, Any] = {}
    exec(compile(code, "docs/configuration.md", "exec", dont_inherit=True), names)
    assert names["config"].size == 5
    assert names["config"].data == tmp_path / "rows"


def test_the_caller_data_is_left_alone() -> None:
    defaults: dict[str, Any] = {"custom": {"a": {"b": 1}}, "evals": [{"path": "/x"}]}
    load_config(Config, overrides=["custom.a.b=2", "evals.0.n=5"], defaults=defaults)
    assert defaults == {"custom": {"a": {"b": 1}}, "evals": [{"path": "/x"}]}


_texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts
_json = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3), max_leaves=8
)
_configs = st.builds(
    Config,
    steps=st.integers(min_value=1),
    name=_texts,
    kind=st.sampled_from(Kind),
    optim=st.builds(
        Optim,
        lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        name=st.sampled_from(["adamw", "muon"]),
        betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    ),
    evals=st.lists(st.builds(EvalTask, path=st.just(Path("/data/a b: c.jsonl")), n=st.integers()), max_size=2),
    limit=st.none() | st.integers() | st.just("auto"),
    out=st.just(Path("/runs/x")),
    model=st.none() | st.just(Path("/m")),
    custom=st.dictionaries(_texts, _json, max_size=4),
    greedy=st.booleans(),
)


@given(_configs)
def test_a_config_dumps_and_loads_equal(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(Config, file) == config


@given(st.dictionaries(_texts, _json, max_size=4))
def test_written_values_are_read_back_equal(value: dict[str, Any]) -> None:
    assert read_yaml(write_yaml(value)) == value


def test_texts_that_yaml_1_1_takes_for_something_else_stay_texts() -> None:
    texts = ["yes", "off", "12:30", "2026-01-31", "0o17", "1_000", "a\x85b", "\u2028", "~", "1e5", "=", "<<"]
    assert read_yaml(write_yaml({"each": texts})) == {"each": texts}


def test_a_dumped_config_means_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(Config)
    (tmp_path / "run").mkdir()
    reloaded = load_config(Config, write(tmp_path / "run", dump_config(config)))
    assert reloaded == config


@given(st.lists(_texts, max_size=4))
def test_no_override_raises_anything_but_a_config_error(overrides: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        load_config(Config, overrides=overrides)
