"""QuixBugs folders: programs with a bug on one line, their corrections, and tests as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from turnwise.errors import TaskError, shown

_QUESTION: Final = """\
The function {name} has a bug on one line. Answer with the whole program, corrected on that line.

```python
{program}
```"""
# Results are tuples or come from generators in some programs, and are lists in the tests.
_PLAIN: Final = """\
def _plain(value):
    if isinstance(value, dict) or isinstance(value, str) or not hasattr(type(value), "__iter__"):
        return value
    return [_plain(each) for each in value]"""


def rows(path: str) -> Iterator[dict[str, Any] | None]:
    """Yield a row for each program of a folder, None for one without tests as data (those of graphs).

    Args:
        path: A folder with ``python_programs/NAME.py``, ``correct_python_programs/NAME.py`` and
            ``json_testcases/NAME.json``, whose lines are ``[arguments, result]``.

    Raises:
        TaskError: One of its folders or files is missing or malformed; the message names it.
    """
    folder = Path(path).expanduser()
    for needed in ("python_programs", "correct_python_programs", "json_testcases"):
        if not (folder / needed).is_dir():
            raise TaskError(f"{folder}: there is no folder {needed!r}, which folders of format quixbugs have")
    for program in sorted((folder / "python_programs").glob("*.py")):
        name = program.stem
        tests = folder / "json_testcases" / f"{name}.json"
        if name.endswith("_test") or name in ("node", "__init__"):
            continue
        yield _row(folder, program, tests) if tests.is_file() else None


def _row(folder: Path, program: Path, tests: Path) -> dict[str, Any]:
    correct = folder / "correct_python_programs" / program.name
    if not correct.is_file():
        raise TaskError(f"{correct}: there is no such file, the correction of {program}")
    pairs = [
        _pair(line, f"{tests}:{number}") for number, line in enumerate(_read(tests).splitlines(), 1) if line.strip()
    ]
    if not pairs:
        raise TaskError(f"{tests} has no tests: write lines such as [[3, 12], 3]")
    return {
        "name": program.stem,
        "question": _QUESTION.format(name=program.stem, program=_read(program).strip()),
        "code": _read(correct),
        "test_setup_code": _PLAIN,
        "test_list": [],
        "challenge_test_list": [
            f"assert _plain({program.stem}({', '.join(map(repr, arguments))})) == {expected!r}"
            for arguments, expected in pairs
        ],
    }


def _pair(line: str, where: str) -> tuple[list[Any], Any]:
    try:
        pair = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: this line is not JSON: {error}") from error
    if not isinstance(pair, list) or len(pair) != 2:
        raise TaskError(f"{where}: {shown(pair)} is no test: write [arguments, result]")
    arguments, expected = pair
    # The only argument may stand without a list.
    return (arguments if isinstance(arguments, list) else [arguments]), expected


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file}: cannot be read: {error}") from error
