"""Published rows of SWE datasets, and what of a repository a solution may not change."""

from __future__ import annotations

import json
import subprocess

import pytest

from turnwise.errors import TaskError
from turnwise.ext.environments.swe import row, tasks
from turnwise.ext.environments.swe.paths import is_protected, settings_differ, shadowed_module, touched_files
from turnwise.ext.environments.swe.rows import instance_of
from turnwise.ext.environments.swe.snapshot import checkout, read_archive

DIFF = """\
diff --git a/{0} b/{0}
--- a/{0}
+++ b/{0}
@@ -1 +1 @@
-a
+b
"""
BENCH = {
    "repo": "django/django",
    "instance_id": "django__django-11099",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "patch": DIFF.format("django/contrib/auth/validators.py"),
    "test_patch": DIFF.format("tests/auth_tests/test_validators.py") + DIFF.format("docs/a.txt"),
    "problem_statement": "UsernameValidator allows trailing newline",
    "hints_text": "",
    "created_at": "2019-03-20T03:46:18Z",
    "version": "3.0",
    "FAIL_TO_PASS": '["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"]',
    "PASS_TO_PASS": '["test_help_text (auth_tests.test_validators.UserAttributeSimilarityValidatorTest)"]',
    "environment_setup_commit": "419a78300f7cd27611196e1e464d50fd0385ff27",
}


def read(record):
    return instance_of(row(record))


def test_swe_bench():
    task = row(BENCH)
    assert (task.id, task.prompt) == ("django__django-11099", BENCH["problem_statement"])
    instance = instance_of(task)
    assert instance.image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert instance.framework == "django"
    assert instance.command.startswith("./tests/runtests.py --verbosity 2")
    assert instance.files == ("auth_tests.test_validators",)
    assert instance.fail_to_pass == ("test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)",)
    assert instance.env["CONDA_DEFAULT_ENV"] == "testbed"
    assert instance.commit == ""


def test_swe_bench_pytest_lists():
    record = BENCH | {
        "repo": "pallets/flask",
        "instance_id": "pallets__flask-4045",
        "FAIL_TO_PASS": ["tests/test_a.py::test_x[a"],
        "PASS_TO_PASS": [],
        "image_name": "mine/flask:1",
        "eval_script": "git apply -v - <<'EOF'\nEOF\npytest -rA tests",
    }
    instance = read(record)
    assert (instance.image, instance.framework, instance.files) == ("mine/flask:1", "pytest", ("tests/test_a.py",))
    assert instance.applies_tests
    assert instance.script.endswith("pytest -rA tests")


def test_swe_gym_and_rebench():
    gym = BENCH | {"repo": "getmoto/moto", "instance_id": "getmoto__moto-5752"}
    assert read(gym).image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    assert read(gym).command == "pytest -n0 -rA --color=no"
    mypy = BENCH | {"repo": "python/mypy", "instance_id": "python__mypy-1", "test_patch": "+[case one]\n [case two]\n"}
    assert read(mypy).files == ("-k", "one or two")
    rebench = BENCH | {
        "repo": "owner/lib",
        "instance_id": "owner__lib-7",
        "docker_image": "swerebench/x:latest",
        "install_config": {"test_cmd": "pytest --no-header -rA", "python": "3.9"},
        "FAIL_TO_PASS": ["tests/test_a.py::test_x"],
    }
    assert read(rebench).command == "pytest --no-header -rA"
    assert read(rebench).image == "swerebench/x:latest"


def test_swe_smith():
    instance = read(
        {
            "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
            "repo": "swesmith/oauthlib__oauthlib.1fd52536",
            "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
            "patch": DIFF.format("oauthlib/common.py"),
            "problem_statement": "It is broken",
            "FAIL_TO_PASS": ["tests/test_common.py::test_a"],
            "PASS_TO_PASS": ["tests/test_other.py::test_b"],
        }
    )
    assert instance.reversed
    assert instance.commit == instance.name
    assert instance.tests_commit == "HEAD~1"


def test_r2e():
    instance = read(
        {
            "repo_name": "pillow",
            "docker_image": "namanjain12/pillow_final:abc",
            "commit_hash": "abc",
            "prompt": "tells the solution",
            "problem_statement": "It is broken",
            "expected_output_json": json.dumps({"TestA.test_b": "PASSED"}),
        }
    )
    assert instance.name == "pillow-abc"
    assert instance.expected == {"TestA.test_b": "PASSED"}
    assert "run_tests.sh" in instance.script


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "one test"}, "FAIL_TO_PASS is 'one test': it must be a list of test names"),
        ({"repo": "nobody/knows"}, "give the row image_name"),
        ({"patch": 3}, "patch is 3: it must be a string"),
        ({"framework": "tap"}, "framework is 'tap': supported are"),
        ({"sandbox_env": "x"}, "sandbox_env is 'x'"),
    ],
)
def test_invalid_row_names_the_column(change, message):
    with pytest.raises(TaskError, match=message.replace("[", r"\[")):
        read(BENCH | change)
    with pytest.raises(TaskError, match="columns instance_id and problem_statement"):
        row({"a": 1})


def test_shipped_rows(tmp_path):
    rows = list(tasks())
    assert len(rows) >= 20
    assert len({task.data["repo"] for task in rows}) >= 5
    assert len({task.data["kind"] for task in rows}) >= 8
    for task in rows:
        instance = instance_of(task)
        # The solution is the bug taken back, and tests are not part of it.
        assert touched_files(instance.patch) == touched_files(instance.setup_patch)
        assert not any(is_protected(path) for path in touched_files(instance.patch))
        assert all(is_protected(path) for path in touched_files(instance.test_patch))
        assert set(instance.files) >= touched_files(instance.test_patch)
    assert [task.id for task in tasks(n=2, repo="textkit")] == [task.id for task in rows[-5:-3]]
    with pytest.raises(TaskError, match="no row of repository 'gold'"):
        list(tasks(repo="gold"))


def test_a_snapshot_is_the_same_everywhere(tmp_path):
    instance = instance_of(next(tasks()))
    folders = [checkout(instance.snapshot, setup_patch=instance.setup_patch, folder=tmp_path / name) for name in "ab"]
    heads = [(folder / ".git" / "refs" / "heads" / "main").read_text() for folder in folders]
    assert heads[0] == heads[1]
    assert checkout(instance.snapshot, setup_patch=instance.setup_patch, folder=tmp_path / "a") == folders[0]
    assert (folders[0] / "ledgerly" / "money.py").exists()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.py").write_text("x = 1\n")
    assert (checkout(str(tmp_path / "own"), folder=tmp_path / "a") / "a.py").read_text() == "x = 1\n"
    with pytest.raises(TaskError, match="setup_patch: "):
        checkout(instance.snapshot, setup_patch=DIFF.format("gone.py"), folder=tmp_path / "a")
    with pytest.raises(TaskError, match="no repository of that name"):
        checkout("shipped:../x", folder=tmp_path)


@pytest.mark.parametrize("path", ["../a", "/a", ".git/config"])
def test_archives_stay_inside(path):
    with pytest.raises(TaskError, match="not a path inside"):
        read_archive(f"-- {path} --\nx\n")


@pytest.mark.parametrize(
    "path",
    [
        *("tests/test_a.py", "a/tests/helper.py", "test_a.py", "a_test.py", "conftest.py", "sub/conftest.py"),
        *(
            "pytest.ini",
            ".pytest.ini",
            "sitecustomize.py",
            "x.pth",
            "a/__pycache__/b.pyc",
            "src/a.test.ts",
            "x_test.go",
            "a.test.mjs",
            "sitecustomize/__init__.py",
            "src/sitecustomize.cpython-311-x86_64-linux-gnu.so",
            "x.egg-info/entry_points.txt",
            "src/X-1.dist-info/METADATA",
            "src/.gitattributes",
        ),
        "bin/test",
    ],
)
def test_test_and_startup_files_are_protected(path):
    assert is_protected(path, extra=("bin/test",))
    assert not is_protected(path, allowed=(path,), extra=("bin/test",))


@pytest.mark.parametrize("path", ["src/a.py", "contest.py", "attest/x.py", "README.md", "setup.py", "latest.py"])
def test_source_files_are_not_protected(path):
    assert not is_protected(path)
    assert not shadowed_module(path)


@pytest.mark.parametrize(
    "path",
    [
        "pytest.py",
        "pytest/__main__.py",
        "json.py",
        "src/_pytest/x.py",
        "decimal/__init__.py",
        "attr/x.py",
        "pytest_cov.py",
    ],
)
def test_modules_that_would_be_imported_instead(path):
    assert path.startswith(shadowed_module(path))
    assert shadowed_module(path)


@pytest.mark.parametrize(
    ("name", "old", "new", "differ"),
    [
        ("pyproject.toml", b"[project]\nname='a'\n", b"[project]\nname='b'\n", False),
        ("pyproject.toml", b"[project]\n", b"[project]\n[tool.pytest.ini_options]\naddopts='-x'\n", True),
        ("pyproject.toml", b"[project]\n", b"[project", True),
        ("setup.cfg", b"[metadata]\n", b"[metadata]\nname=a\n", False),
        ("setup.cfg", b"[tool:pytest]\na=1\n", b"[tool:pytest]\na=2\n", True),
        ("tox.ini", None, b"[pytest]\naddopts=-x\n", True),
        ("setup.cfg", b"[tool:pytest]\na=1\n", None, True),
        ("tox.ini", b"[testenv]\ncommands=pytest\n", b"[testenv]\ncommands=echo\n", True),
        ("setup.cfg", b"[tox:tox]\n", b"[tox:tox]\na=1\n", True),
        ("package.json", b'{"scripts": {"test": "jest"}}', b'{"scripts": {"test": "echo"}}', True),
        ("package.json", b'{"version": "1"}', b'{"version": "2"}', False),
        ("package.json", b"[]", b"[1]", True),
    ],
)
def test_settings_of_the_runner(name, old, new, differ):
    assert settings_differ(name, old, new) is differ


def test_files_of_a_diff():
    renamed = "diff --git a/old name.py b/new.py\nsimilarity index 100%\nrename from old name.py\nrename to new.py\n"
    binary = "diff --git a/x.png b/x.png\nnew file mode 100644\nGIT binary patch\nliteral 1\nIcmZQ\n"
    assert touched_files(renamed + binary + DIFF.format("a/b.py")) == {"old name.py", "new.py", "x.png", "a/b.py"}


def test_checkout_holds_no_later_commits(tmp_path):
    def git(*words):
        base = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path / "repo")]
        return subprocess.run([*base, *words], check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "repo").mkdir()
    git("init", "--quiet", "--initial-branch=main")
    commits = []
    for text in ("before", "after"):
        (tmp_path / "repo" / "a").write_text(text)
        git("add", "a")
        git("commit", "--quiet", "--message", text)
        commits.append(git("rev-parse", "HEAD"))
    repository = checkout(str(tmp_path / "repo"), commit=commits[0], folder=tmp_path / "cache")
    listed = subprocess.run(
        ["git", "cat-file", "--batch-all-objects", "--batch-check"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert commits[0] in listed
    assert commits[1] not in listed
    assert (repository / "a").read_text() == "before"
