"""Prints how the code keeps the rules of the house: ``python tests/house.py [RULE]...``, or ``[FILE]...``.

Without arguments it prints every figure with its limit, and what breaks any rule; with paths of files, their vague
names and phrases.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from support.naming import wording
from support.structure import ROOT, RULES, figures, read_tree


def report_words(paths: Sequence[str]) -> list[str]:
    """Return the vague names and phrases of some files, a line each."""
    files = [(path, wording(Path(path).read_text(encoding="utf-8"))) for path in paths]
    return [f"{path}:{line}: {text}" for path, words in files for line, text in sorted(words.vague + words.phrases)]


def report_rules(rules: Sequence[str]) -> list[str]:
    """Return what breaks some rules, a line each."""
    tree = read_tree()
    return [f"{name}: {finding}" for name in rules for finding in RULES[name](tree)]


def report_house() -> list[str]:
    """Return every figure with its limit, then what breaks rules and where the figures above their limits come from."""
    tree = read_tree()
    broken = {name: rule(tree) for name, rule in RULES.items()}
    counted = figures(tree)
    lines = [f"{figure.count:7d}  {name}, at most {figure.limit}" for name, figure in counted.items()]
    lines += [f"{len(findings):7d}  {name}" for name, findings in broken.items()]
    for name, findings in broken.items():
        lines += ["", name, *(f"  {finding}" for finding in findings)] if findings else []
    for name, figure in counted.items():
        lines += ["", name, *(f"  {line}" for line in figure.detail)] if figure.count > figure.limit else []
    return lines


def main(arguments: Sequence[str]) -> None:
    """Print what the arguments ask for."""
    sys.path.insert(0, str(ROOT))
    if not arguments:
        lines = report_house()
    elif arguments[0] in RULES:
        lines = report_rules(arguments)
    else:
        lines = report_words(arguments)
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
