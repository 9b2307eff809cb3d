"""Patches and edits are exact, or an error names what to write instead."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.errors import ToolError
from turnwise.tools.sandboxed.editor import insert_text, lines_of, replace_text
from turnwise.tools.sandboxed.patches import apply_hunks, new_file_text, parse_patch

LINES = st.lists(st.sampled_from(["a", "b", "", " c", "-- x", "++ y", "@@ z", "\\ w", "é\x0c1"]), max_size=12)
FILE = "def f(x):\n    y = x + 1\n    return y\n\n\ndef g(x):\n    y = x + 1\n    return y\n"


def diff(old: str, new: str, context: int = 3) -> str:
    diff_lines = list(
        difflib.unified_diff(old.splitlines(), new.splitlines(), "a/f.py", "b/f.py", lineterm="", n=context)
    )
    return "\n".join(diff_lines) + "\n"


@settings(max_examples=examples(15), deadline=None)
@given(LINES, LINES, st.integers(0, 3))
def test_unified_diff_turns_old_text_into_new(old: list[str], new: list[str], context: int) -> None:
    old_lines, new_lines = ["first", *old], ["first", *new]
    if old_lines == new_lines:
        return
    diff_lines = list(difflib.unified_diff(old_lines, new_lines, "a/f", "b/f", lineterm="", n=context))
    [change] = parse_patch("\n".join(diff_lines) + "\n")
    assert apply_hunks(change, "\n".join(old_lines) + "\n") == "\n".join(new_lines) + "\n"


@settings(max_examples=examples(12), deadline=None)
@given(LINES, st.data())
def test_envelope_hunk_replaces_the_line_its_context_names(lines: list[str], data: st.DataObject) -> None:
    numbered = [f"{number} {line}" for number, line in enumerate([*lines, "end"])]
    at = data.draw(st.integers(0, len(numbered) - 1))
    body = [*(f" {line}" for line in numbered[:at]), f"-{numbered[at]}", "+new"]
    patch = "\n".join(["*** Begin Patch", "*** Update File: f", "@@", *body, "*** End Patch"])
    [change] = parse_patch(patch)
    expected = [*numbered[:at], "new", *numbered[at + 1 :]]
    assert apply_hunks(change, "\n".join(numbered) + "\n") == "\n".join(expected) + "\n"


@settings(max_examples=examples(12), deadline=None)
@given(st.text(alphabet="ab\n\r", max_size=30), st.text(alphabet="ab\n", min_size=1, max_size=3), st.text(max_size=4))
def test_replacement_changes_the_only_occurrence(text: str, old: str, new: str) -> None:
    try:
        changed, line = replace_text(text, old, new)
    except ToolError:
        return
    native = old.replace("\n", "\r\n") if "\r\n" in text else old
    if native not in text:
        native = old
    assert text.count(native) == 1
    assert line == text[: text.index(native)].count("\n") + 1
    windows = "\r\n" in text and (native != old or "\n" not in old)
    assert len(changed) - len(text) == len(new.replace("\n", "\r\n") if windows else new) - len(native)


def test_mixed_line_ends_are_kept() -> None:
    text = "a\r\nb\nc\nd"
    assert replace_text(text, "b\nc", "x\ny")[0] == "a\r\nx\ny\nd"
    [change] = parse_patch("--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n-b\n+x\n c\n")
    assert apply_hunks(change, text) == "a\r\nx\nc\nd"
    assert apply_hunks(change, "a\r\nb\r\nc\r\n") == "a\r\nx\r\nc\r\n"
    no_newline = "\\ No newline at end of file\n"
    [change] = parse_patch(f"--- a/f\n+++ b/f\n@@ -1,2 +1,3 @@\n a\n-b\n{no_newline}+b\n+c\n{no_newline}")
    assert apply_hunks(change, "a\r\nb") == "a\r\nb\r\nc"


def test_empty_files_of_git_are_added_and_deleted() -> None:
    head = "diff --git a/p/__init__.py b/p/__init__.py\n{} file mode 100644\nindex 0000000..e69de29\n"
    full = "diff --git a/p/x.py b/p/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/p/x.py\n@@ -0,0 +1 @@\n+1\n"
    for patch in (head.format("new") + full, full + head.format("new")):
        assert {(change.kind, change.path, new_file_text(change)) for change in parse_patch(patch)} == {
            ("add", "p/__init__.py", ""),
            ("add", "p/x.py", "1\n"),
        }
    [deletion] = parse_patch(head.format("deleted"))
    assert (deletion.kind, deletion.path) == ("delete", "p/__init__.py")


def test_line_numbers_are_hints_and_context_must_match() -> None:
    patch = diff(FILE, FILE.replace("return y\n\n\n", "return 2 * y\n\n\n"))
    [change] = parse_patch(patch)
    assert "return 2 * y" in apply_hunks(change, "import os\n\n" + FILE)
    with pytest.raises(ToolError, match=r"its first 1 lines do at line 1, but then .*y = x \+ 1.*'    y = x \+ 2'"):
        apply_hunks(change, FILE.replace("x + 1", "x + 2"))
    short = "--- a/f.py\n+++ b/f.py\n@@ -90,2 +90,2 @@\n     y = x + 1\n-    return y\n+    return 0\n"
    [change] = parse_patch(short)
    with pytest.raises(ToolError, match=r"fits at 2 positions, at lines 2, 7: .*not fit at line 90"):
        apply_hunks(change, FILE)


def test_wrong_counts_and_bare_blank_lines_are_accepted() -> None:
    patch = "--- a/f.py\n+++ b/f.py\n@@ -3,9 +3,1 @@\n     return y\n\n\n-def g(x):\n+def h(x):\n"
    [change] = parse_patch(patch)
    assert apply_hunks(change, FILE) == FILE.replace("def g", "def h")


def test_anchors_distinguish_equal_lines() -> None:
    body = "*** Update File: f\n@@ def g(x):\n     y = x + 1\n-    return y\n+    return -y\n"
    [change] = parse_patch(f"*** Begin Patch\n{body}*** End Patch")
    assert apply_hunks(change, FILE).endswith("return -y\n")
    [change] = parse_patch(f"*** Begin Patch\n{body.replace('def g', 'def k')}*** End Patch")
    with pytest.raises(ToolError, match=r"no line 'def k\(x\):'"):
        apply_hunks(change, FILE)


def test_files_are_added_deleted_and_moved() -> None:
    patch = (
        "diff --git a/old.py b/new.py\nsimilarity index 90%\nrename from old.py\nrename to new.py\n"
        "--- a/old.py\n+++ b/new.py\n@@ -1 +1 @@\n-a\n+b\n"
        "--- /dev/null\n+++ b/made.py\n@@ -0,0 +1,2 @@\n+x\n+y\n\\ No newline at end of file\n"
        "--- a/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-z\n"
    )
    renamed, new, deleted = parse_patch(patch)
    assert (renamed.kind, renamed.path, renamed.move_to) == ("update", "old.py", "new.py")
    assert apply_hunks(renamed, "a\n") == "b\n"
    assert (new.kind, new_file_text(new)) == ("add", "x\ny")
    assert (deleted.kind, apply_hunks(deleted, "z\n")) == ("delete", "")
    envelope = (
        "*** Begin Patch\n*** Add File: a\n+1\n*** Delete File: b\n*** Update File: c\n*** Move to: d\n@@\n-1\n+2\n"
        "*** End of File\n*** End Patch\n"
    )
    addition, deletion, move = parse_patch(envelope)
    assert (new_file_text(addition), deletion.kind, move.move_to, apply_hunks(move, "1\n1\n")) == (
        "1\n",
        "delete",
        "d",
        "1\n2\n",
    )


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("hello", "this is not a patch"),
        ("*** Begin Patch\n*** Update File: f\n@@\n-a\n+b", r"no '\*\*\* End Patch'"),
        ("*** Begin Patch\n*** Update File: f\nxyz\n*** End Patch", "line 3 of the patch is 'xyz'"),
        ("*** Begin Patch\n*** Add File: f\nxyz\n*** End Patch", r"begins with '\+'"),
        ("*** Begin Patch\n*** Add File: f\n+1\n*** Delete File: f\n*** End Patch", "f more than once"),
        ("*** Begin Patch\n*** Add File: f\n+1\n*** Delete File: ./f\n*** End Patch", "f more than once"),
        ("@@ -1 +1 @@\n-a\n+b\n", "no '--- a/file'"),
        ("Binary files a/x and b/x differ\n", "binary files cannot"),
    ],
)
def test_malformed_line_is_quoted(patch: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        parse_patch(patch)


def test_line_ends_of_the_file_are_kept() -> None:
    [change] = parse_patch("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n")
    assert apply_hunks(change, "a\r\nb\r\n") == "a\r\nc\r\n"
    assert replace_text("a\r\nb\r\n", "a\nb", "x\ny") == ("x\r\ny\r\n", 1)
    assert insert_text("a\r\nb", 2, "c\n") == "a\r\nb\r\nc"
    assert insert_text("a\n", 0, "b") == "b\na\n"
    assert lines_of("a\x0cb\r\nc") == ["a\x0cb", "c"]


def test_replacement_errors_name_the_remedy() -> None:
    with pytest.raises(ToolError, match="occurs 2 times, at lines 2, 7"):
        replace_text(FILE, "y = x + 1", "y = 0")
    with pytest.raises(ToolError, match=r"different whitespace it does, at line 2:\n +2\t    y = x \+ 1"):
        replace_text(FILE, "y=x+1\n\treturn y\n\n\ndef g(x):", "y = 0")
    with pytest.raises(ToolError, match=r"The nearest is at line 6:\n +6\tdef g\(x\):"):
        replace_text(FILE, "def g(z):", "def g():")
    with pytest.raises(ToolError, match="nor anything like it"):
        replace_text(FILE, "%%%%%%%%%%%%%", "y")
    for old, new in (("", "a"), ("def f", "def f")):
        with pytest.raises(ToolError):
            replace_text(FILE, old, new)
    with pytest.raises(ToolError, match="from 0 to 8"):
        insert_text(FILE, 9, "x")
