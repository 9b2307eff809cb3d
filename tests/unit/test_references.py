"""References such as ``pkg.mod:Class``: every form is found, and what is wrong with one is said."""

from __future__ import annotations

import collections
import importlib
import sys
from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise.plugins import load_class_from_fqn, load_object, module_label


def write(folder: Path, text: str, name: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize("reference", ["collections:OrderedDict", "collections.OrderedDict"])
def test_a_class_is_found_by_either_form(reference: str) -> None:
    assert load_class_from_fqn(reference, "thing") is collections.OrderedDict


def test_a_class_is_found_in_a_file_and_only_loaded_once(tmp_path: Path) -> None:
    file = write(tmp_path, "class Outer:\n    class Inner:\n        pass\n", "mine.py")
    cls = load_class_from_fqn(f"{file}:Outer", "env")
    assert cls is load_class_from_fqn(f"{file}:Outer", "env")
    assert load_object(f"{file}:Outer.Inner", "env") is cls.Inner
    assert (module_label(cls.__module__), module_label("collections"), module_label("turnwise_file_no")) == (
        "mine.py", "collections", "turnwise_file_no",
    )  # fmt: skip


def test_a_file_that_was_imported_as_a_module_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "class Mine:\n    pass\n", "imported_before.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("imported_before")
    assert [load_object(f"{file}:Mine", "env") for _ in range(2)] == [module.Mine] * 2
    # Imported anew, as notebooks do: the new one counts.
    del sys.modules["imported_before"]
    reimported = importlib.import_module("imported_before")
    assert load_object(f"{file}:Mine", "env") is reimported.Mine is not module.Mine
    del sys.modules["imported_before"]


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("Lonely", ["env 'Lonely'", "pkg.mod:Name"]),
        ("file.py", ["pkg.mod:Name"]),
        (":X", ["pkg.mod:Name"]),
        ("no_such_pkg.mod:X", ["no module named 'no_such_pkg'"]),
        ("collections.nope:X", ["no module named 'collections.nope'"]),
        ("collections:OrderdDict", ["collections has no 'OrderdDict'", "did you mean 'OrderedDict'"]),
        ("collections:namedtuple", ["function", "not a class"]),
        ("/no/such/file.py:X", ["no such file: /no/such/file.py"]),
    ],
)
def test_wrong_reference_raises_with_the_reason(reference: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_class_from_fqn(reference, "env")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("reference", ["my_calendar:Month", "my_calender:Month", "my_calendar.Month"])
def test_a_file_of_this_folder_that_is_named_as_a_module_is_named_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    write(tmp_path, "class Month: ...\n", "my_calendar.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"is written with its path: \./my_calendar\.py:Month"):
        load_class_from_fqn(reference, "env")


@pytest.mark.parametrize(
    ("text", "part"),
    [("import no_such_thing\n", "no_such_thing"), ("x = 1 / 0\n", "ZeroDivisionError"), ("def (\n", "SyntaxError")],
)
def test_a_file_that_cannot_run_is_named_and_tried_again(tmp_path: Path, text: str, part: str) -> None:
    file = write(tmp_path, text, "broken.py")
    for _ in range(2):
        with pytest.raises(ConfigError, match=part):
            load_object(f"{file}:X", "env")
    write(tmp_path, "X = 1\n", "broken.py")
    assert load_object(f"{file}:X", "env") == 1
