"""Rows of published SWE datasets in one form."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

from turnwise.errors import TaskError, shown
from turnwise.ext.environments.swe.logs import PARSERS
from turnwise.ext.environments.swe.paths import touched_files
from turnwise.tasks import Task
from turnwise.tasks.sources import JsonlRows

PYTEST: Final = "python -m pytest -rA --tb=short -p no:cacheprovider"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Test recipe of a repository.

    Attributes:
        command: The command; test files, or their equivalent, are appended.
        protected: Patterns of further files that run tests.
        files: What is appended: ``paths``, Django's ``labels``, or mypy's ``cases``.
    """

    command: str = PYTEST
    framework: str = "pytest"
    setup: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    files: str = "paths"


def _read_recipes(dataset: str) -> dict[str, Recipe]:
    file = Path(__file__).with_name("shipped") / "recipes.toml"
    recipes: dict[str, dict[str, Any]] = tomllib.loads(file.read_text("utf-8"))[dataset]
    for fields in recipes.values():
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return {repo: Recipe(**fields) for repo, fields in recipes.items()}


_SWE_BENCH: Final = _read_recipes("swe_bench")
_SWE_GYM: Final = _read_recipes("swe_gym")


def recipe_of(repo: str) -> Recipe:
    """Return a repository's recipe; pytest by default."""
    return _SWE_BENCH.get(repo) or _SWE_GYM.get(repo) or Recipe()


def image_of(repo: str, name: str) -> str | None:
    """Return the published image of a row that names none, or None.

    Args:
        repo: ``owner/name``.
        name: The row's ``instance_id``.
    """
    if repo in _SWE_BENCH:
        return f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest".lower()
    if repo in _SWE_GYM:
        return f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest".lower()
    return None


IMAGE_WORKDIR: Final = "/testbed"
"""Where published images have the repository."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONDA_ENV: Final = {
    "PATH": f"/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:{_PATH}",
    "CONDA_DEFAULT_ENV": "testbed",
    "CONDA_PREFIX": "/opt/miniconda3/envs/testbed",
}
"""What activating the environment of SWE-bench's images sets."""
R2E_ENV: Final = {"PATH": f"/testbed/.venv/bin:{_PATH}", "VIRTUAL_ENV": "/testbed/.venv"}
"""The same of R2E-Gym's images."""


WORKDIR: Final = IMAGE_WORKDIR
_NO_TESTS: Final = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".rst")


@dataclass(frozen=True, slots=True)
class Instance:
    """One SWE task.

    Attributes:
        name: Its ``instance_id``.
        repo: ``owner/name``, or the snapshot's name.
        patch: The reference solution, as a diff, or "".
        reversed: Whether ``patch`` is the bug, and the solution reverts it (SWE-smith).
        tests_commit: Commit of the hidden tests, where no patch holds them, or "".
        fail_to_pass: Tests that fail before and pass after.
        pass_to_pass: Tests that pass before and after.
        expected: The status of every test, for R2E rows; else empty.
        snapshot: Source of the repository; None: in the image.
        image: The sandbox's image; None: the backend's default.
        commit: Initial commit; "": the present one.
        script: A complete test script, in place of ``command`` and ``files``.
        applies_tests: Whether ``script`` applies the test patch.
        setup: Shell lines before the command.
    """

    name: str
    repo: str
    problem: str
    patch: str = ""
    reversed: bool = False
    test_patch: str = ""
    tests_commit: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    image: str | None = None
    commit: str = ""
    setup_patch: str = ""
    script: str = ""
    applies_tests: bool = False
    command: str = PYTEST
    files: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    framework: str = "pytest"
    env: Mapping[str, str] = field(default_factory=dict)
    protected: tuple[str, ...] = ()


def row(record: Mapping[str, Any]) -> Task:
    """Return the task of a published row, for ``map`` of a source of tasks."""
    if not isinstance(record, Mapping):
        raise TaskError(f"a row of an SWE dataset has columns, but this is {shown(record)}")
    name = record.get("instance_id") or _r2e_name(record)
    problem = record.get("problem_statement")
    if not isinstance(name, str) or not isinstance(problem, str):
        raise TaskError(f"columns instance_id and problem_statement must be strings (columns: {', '.join(record)})")
    # "prompt" of R2E's rows, from which their problem statement was written, reveals the solution.
    data = {key: value for key, value in record.items() if key not in ("id", "prompt", "env", "agent", "data")}
    return Task(name, problem, data)


def checked_row(record: Mapping[str, Any]) -> Task:
    """Return the task of a published row that can be graded; raise TaskError for one that cannot."""
    task = row(record)
    instance_of(task)
    return task


def nemo_gym_row(record: Mapping[str, Any]) -> Task:
    """Return the task of a row of NVIDIA's SWE datasets for NeMo Gym.

    Args:
        record: ``responses_create_params.metadata`` holds ``instance_id``, ``problem_statement`` and, as JSON in
            ``instance_dict``, the row of the dataset that it was made of (SWE-bench, SWE-Gym, R2E-Gym, ...).
    """
    params = record.get("responses_create_params")
    metadata = params.get("metadata") if isinstance(params, Mapping) else None
    if not isinstance(metadata, Mapping):
        raise TaskError(f"column 'responses_create_params' is {shown(params)}: it must have the field 'metadata'")
    instance = _decoded(metadata.get("instance_dict"))
    if not isinstance(instance, Mapping):
        raise TaskError(
            f"field 'responses_create_params.metadata.instance_dict' is {shown(instance)}: it must hold, as JSON, the "
            "row with the tests"
        )
    columns = {key: metadata[key] for key in ("instance_id", "problem_statement", "base_commit") if metadata.get(key)}
    return checked_row({**columns, **instance})


def instance_of(task: Task) -> Instance:
    """Parse a task."""
    data = task.data
    where = f"task {task.id!r}"
    if "expected_output_json" in data:
        return _r2e(data, where)
    name = _text(data, "instance_id", where, task.id)
    repo = _text(data, "repo", where)
    problem = _text(data, "problem_statement", where) or (task.prompt if isinstance(task.prompt, str) else "")
    fail, keep = _tests(data, "FAIL_TO_PASS", where), _tests(data, "PASS_TO_PASS", where)
    if not fail:
        raise TaskError(f"{where}: FAIL_TO_PASS is empty: grading needs a test that fails before the patch")
    snapshot = _text(data, "snapshot", where) or None
    image = _first(data, ("image_name", "docker_image", "image"), where) or None
    smith = image is not None and "swesmith" in image
    if snapshot is None and image is None:
        image = image_of(repo, name)
        if image is None:
            raise TaskError(
                f"{where}: {repo or 'its repository'} has no source: give the row image_name (an image with it "
                "in /testbed) or snapshot (a folder, bundle or archive)"
            )
    patch, tests = _text(data, "patch", where), _text(data, "test_patch", where)
    recipe = _recipe(data, repo, where)
    script = _text(data, "eval_script", where)
    return Instance(
        name=name,
        repo=repo or (snapshot or ""),
        problem=problem,
        patch=patch,
        reversed=smith,
        test_patch=tests,
        # Its last commit removes the tests that fail.
        tests_commit="HEAD~1" if smith else "",
        fail_to_pass=fail,
        pass_to_pass=keep,
        snapshot=snapshot,
        image=image,
        # An image of SWE-smith has a branch per row, with the bug that the row's patch describes.
        commit=name if smith else _text(data, "base_commit", where) if snapshot is not None else "",
        setup_patch=_text(data, "setup_patch", where),
        script=script,
        applies_tests="git apply" in script,
        command=recipe.command,
        files=_files(recipe, tests, (*fail, *keep)),
        setup=recipe.setup,
        framework=recipe.framework,
        env={**(CONDA_ENV if image is not None and snapshot is None else {}), **_variables(data, where)},
        protected=recipe.protected,
    )


def _variables(data: Mapping[str, Any], where: str) -> dict[str, str]:
    variables = _decoded(data.get("sandbox_env")) or {}
    if not isinstance(variables, Mapping) or not all(isinstance(value, str) for value in variables.values()):
        raise TaskError(f"{where}: sandbox_env is {shown(variables)}: it must be an object from names to strings")
    return {str(name): value for name, value in variables.items()}


def _recipe(data: Mapping[str, Any], repo: str, where: str) -> Recipe:
    published = recipe_of(repo)
    install = data.get("install_config")
    install = json.loads(install) if isinstance(install, str) and install else install or {}
    if not isinstance(install, Mapping):
        raise TaskError(f"{where}: install_config is {shown(install)}: it must be an object")
    command = (
        _first(data, ("test_command", "test_cmd"), where) or str(install.get("test_cmd") or "") or published.command
    )
    framework = _first(data, ("framework", "test_framework"), where) or published.framework
    if framework not in PARSERS:
        raise TaskError(f"{where}: framework is {framework!r}: supported are {', '.join(PARSERS)}")
    return Recipe(command, framework, published.setup, published.protected, published.files)


def _files(recipe: Recipe, test_patch: str, names: Sequence[str]) -> tuple[str, ...]:
    changed = sorted(path for path in touched_files(test_patch) if not path.endswith(_NO_TESTS))
    if recipe.files == "cases":
        cases = re.findall(r"^[+ ]\[case ([^\]]+)\]", test_patch, re.MULTILINE)
        return ("-k", " or ".join(cases)) if cases else ()
    if recipe.files == "labels":
        labels = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in changed]
        return tuple(label for label in labels if "test" in label)
    if recipe.framework in ("pytest", "tox"):
        by_name = {name.partition("::")[0] for name in names if "::" in name}
        return tuple(sorted(by_name)) or tuple(changed)
    return () if recipe.framework in ("jest", "vitest", "mocha", "go", "cargo") else tuple(changed)


def _r2e_name(record: Mapping[str, Any]) -> str | None:
    repo, commit = record.get("repo_name"), record.get("commit_hash")
    return f"{repo}-{commit}" if isinstance(repo, str) and isinstance(commit, str) else None


def _r2e(data: Mapping[str, Any], where: str) -> Instance:
    image = _first(data, ("docker_image", "image_name"), where)
    expected = _decoded(data["expected_output_json"])
    if not image or not isinstance(expected, Mapping) or not expected:
        raise TaskError(f"{where}: rows of R2E-Gym have docker_image and expected_output_json, an object of statuses")
    return Instance(
        name=_r2e_name(data) or _text(data, "instance_id", where, "r2e"),
        repo=_text(data, "repo_name", where),
        problem=_text(data, "problem_statement", where),
        expected={str(name): str(status) for name, status in expected.items()},
        image=image,
        # The images keep their tests out of the repository until it is judged.
        script="ln -sfn /r2e_tests /testbed/r2e_tests 2>/dev/null || true\nbash /testbed/run_tests.sh",
        framework="pytest",
        env=R2E_ENV,
        protected=("run_tests.sh", "r2e_tests", "r2e_tests/*"),
    )


def _tests(data: Mapping[str, Any], column: str, where: str) -> tuple[str, ...]:
    value = _decoded(data.get(column, data.get(column.lower())))
    if value is None or value == "":
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise TaskError(f"{where}: {column} is {shown(value)}: it must be a list of test names, or such a list as JSON")


def _decoded(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _first(data: Mapping[str, Any], columns: Sequence[str], where: str) -> str:
    return next((text for text in (_text(data, column, where) for column in columns) if text), "")


def _text(data: Mapping[str, Any], column: str, where: str, default: str = "") -> str:
    value = data.get(column)
    if value is None:
        return default
    if not isinstance(value, str):
        raise TaskError(f"{where}: {column} is {shown(value)}: it must be a string")
    return value


def tasks(n: int | None = None, *, path: str | None = None, repo: str | None = None) -> Iterator[Task]:
    """Yield SWE tasks.

    Args:
        n: Most tasks.
        path: A ``.jsonl`` file of published rows; by default the built-in ones.
        repo: Only those of one repository, such as ``ledgerly`` or ``django/django``.
    """
    yielded = 0
    for task in _rows(path):
        name = str(task.data.get("repo") or task.data.get("repo_name") or "")
        if repo is not None and repo not in (name, name.rpartition("/")[2]):
            continue
        if n is not None and yielded >= n:
            return
        yielded += 1
        yield task
    if not yielded:
        raise TaskError(f"there is no row{'' if repo is None else f' of repository {repo!r}'} in {path or 'turnwise'}")


def _rows(path: str | None) -> Iterator[Task]:
    shipped = resources.files("turnwise.ext.environments.swe") / "shipped" / "rows.jsonl"
    for line in JsonlRows(Path(str(shipped) if path is None else path).expanduser()).read():
        try:
            yield row(line.value)
        except TaskError as error:
            raise TaskError(f"{line.where}: {error}") from error
