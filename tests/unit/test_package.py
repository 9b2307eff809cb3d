"""The package as a whole: what importing it costs, what its wheel holds, and what its files may say."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
import tomllib
import zipfile
from pathlib import Path

import pytest

import turnwise

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "turnwise"
HEAVY = ("torch", "transformers", "renderers", "ray", "datasets", "pyarrow", "gymnasium", "aiohttp", "rich")


def child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = json.loads(child("import turnwise, sys, json; print(json.dumps(sorted(sys.modules)))"))
    assert not [name for name in loaded if name.split(".")[0] in HEAVY]
    assert [name for name in loaded if name.startswith("turnwise")] == ["turnwise", "turnwise.version"]


def test_importing_the_package_takes_under_three_tenths_of_a_second() -> None:
    # CPU seconds: wall time says how busy the machine is. One of three is enough: the first one may compile.
    code = "import time; t = time.process_time(); import turnwise; print(time.process_time() - t)"
    assert any(float(child(code)) < 0.3 for _ in range(3))


def test_rooms_without_torch_import_none() -> None:
    names = ["Env", "ToolEnv", "function_tool", "Task", "Session", "RolloutConfig", "check_env"]
    code = (
        "import json, sys, turnwise\n"
        f"loaded = {{name: (getattr(turnwise, name), sorted(sys.modules))[1] for name in {names}}}\n"
        "print(json.dumps(loaded))"
    )
    loaded = json.loads(child(code))
    assert list(loaded) == names
    for name, modules in loaded.items():
        assert not {"torch", "transformers", "renderers", "ray"} & set(modules), name


def test_the_public_names_are_there_and_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    names = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.name == alias.asname for alias in names), "a stub exports what it imports under its name"
    assert {alias.name for alias in names} == {*turnwise.__all__, "__version__"}
    assert set(turnwise.__all__) <= set(dir(turnwise))
    for name in turnwise.__all__:
        assert getattr(turnwise, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'turnwise' has no attribute 'Enviroment'"):
        turnwise.Enviroment  # noqa: B018


def test_no_name_of_the_lookup_environment_stands_outside_its_file() -> None:
    # "lookup" alone is an English word and the environment's registered name; these are what is special to it.
    special = re.compile(r"lookup[_ ]?env|LookupEnv|team_of|manager_of|[\"']lookup[\"']", re.IGNORECASE)
    registration = PACKAGE / "envs" / "registration.py"
    allowed = {PACKAGE / "envs" / "basic" / "lookup.py"}
    for file in sorted(PACKAGE.rglob("*.py")):
        if file in allowed:
            continue
        text = file.read_text()
        if file == registration:
            # The table of shipped environments names each of them once.
            text = re.sub(r"\"lookup\": f\"{_BASIC}\.lookup:LookupEnv\"", "", text)
        match = special.search(text)
        assert match is None, f"{file.relative_to(ROOT)} says {match and match.group()!r}"


def test_every_module_has_a_docstring() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        with file.open() as lines:
            tokens = tokenize.generate_tokens(lines.readline)
            first = next(token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL))
        docstring = first.string if first.type == tokenize.STRING else ""
        assert docstring.strip("\"' "), f"{file.relative_to(ROOT)} has no module docstring"
        assert "TODO" not in docstring, f"{file.relative_to(ROOT)}: {docstring}"


def test_code_has_no_open_todos() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        match = re.search(r"\b(TODO|FIXME|XXX)\b", file.read_text())
        assert match is None, f"{file.relative_to(ROOT)} says {match and match.group()}"


def test_the_version_is_that_of_the_project() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == turnwise.__version__


def test_every_extra_that_an_error_names_exists() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    # Metadata has names in this form, and pip before 23.3 installs nothing for another one.
    assert [extra for extra in extras if "_" in extra or extra != extra.lower()] == []
    texts = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "errors.py"}
    names = ("MissingExtraError", "requires_extra")
    raising = {file: text for file, text in texts.items() if any(f"{name}(" in text for name in names)}
    assert len(raising) > 10
    for file, text in raising.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                _, extra, _ = node.args
                # The loggers' extras stand in their classes.
                loggers = re.findall(r'^    extra = "([\w-]+)"', text, re.MULTILINE)
                named = loggers if ast.unparse(extra) == "cls.extra" else [ast.literal_eval(extra)]
                assert set(named) <= extras, f"{file}:{node.lineno} names the extras {named}"


def test_texts_recommend_this_distribution_only() -> None:
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "Makefile",
        *(file for file in (ROOT / ".ci").iterdir() if file.is_file()),
    ]
    kinds = (".md", ".py", ".jinja", ".toml", ".yaml", ".in", ".sh")
    for folder in ("docs", "turnwise", "examples", "benchmarks"):
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    installed = r"pip install[^\n]*[ '\"]turnwise(?![-\w./])"
    required = r"(?<![\w./-])turnwise\[[a-z]|[\"']turnwise *[>=~]="
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if re.search(f"{installed}|{required}", line)]
        assert lines == [], f"{file.relative_to(ROOT)}: turnwise is another project there, this one is turnwise-rl"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with the build backend of this environment: nothing is downloaded."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    for file in PACKAGE.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            target = source / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_the_whole_package_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    info = f"turnwise_rl-{turnwise.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"turnwise", info}
    expected = {str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*.py")} | {"turnwise/py.typed"}
    for kind in (".in", ".jinja", ".pyi", ".sh", ".toml"):
        files = {str(file.relative_to(ROOT)) for file in PACKAGE.rglob(f"*{kind}")}
        assert files, kind
        expected |= files
    data = [file for file in (PACKAGE / "ext").rglob("*") if {"assets", "shipped", "templates"} & set(file.parts)]
    expected |= {str(file.relative_to(ROOT)) for file in data if file.is_file() and file.suffix != ".pyc"}
    assert expected <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata


def test_the_licence_is_the_whole_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    for part in ("Apache License", "Version 2.0, January 2004", "9. Accepting Warranty", "END OF TERMS AND CONDITIONS"):
        assert part in text


def test_core_dependencies_are_small() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=!~\[ ]", requirement)[0] for requirement in dependencies}
    assert not names & {"torch", "transformers", "ray", "vllm", "datasets", "pyarrow", "safetensors"}
