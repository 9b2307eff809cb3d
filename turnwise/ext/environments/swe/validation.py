"""Making of a row's twins: they are kept where the reference solution passes the test and fails the twin.

The repository as it is tells which check fails without a solution, since earlier ones tell a test from its twins: any
program that leaves the bug passes them. Results are cached per row, in memory and beside the row's repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from turnwise.ext.environments.swe.checks import Altered, alterations
from turnwise.ext.environments.swe.contradictions import counts
from turnwise.ext.environments.swe.judge import Judge, TestRun, decide
from turnwise.ext.environments.swe.rows import Instance
from turnwise.ext.environments.swe.snapshot import checkout, state_folder
from turnwise.ext.environments.swe.twins import VERSION, Family, Roll, TestFile, TwinPlan, enroll, obstacle
from turnwise.ext.environments.swe.workspace import Place
from turnwise.sandboxes.core import Sandbox

_MOST: Final = (15, 7)
"""Twins of each test that must be fixed where there is one, or two, of these."""
_MOST_OF_MANY: Final = 3
_MOST_KEPT: Final = 2
"""Tests with twins among those that must keep passing, one of each: a solution that is not right fails others."""
_SHARE: Final = 0.1
"""Most time of the twins, as a share of the tests' own, above a tenth of a second."""
_ATTEMPTS: Final = 8
_PLANS: Final[dict[str, TwinPlan]] = {}
_LOCKS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]]] = WeakKeyDictionary()


def why_none(instance: Instance, *, reports: bool) -> str:
    """Return why a row's tests can have no twins, or ""."""
    if not reports:
        return f"twins are made of tests that pytest reports, and it runs {instance.framework}"
    if instance.script or instance.expected:
        return "its tests are run by a script of its own"
    if not instance.patch:
        return "it has no reference solution"
    return obstacle(instance.command, instance.files)


@dataclass(slots=True)
class Plans:
    """The cached plans of rows.

    Args:
        folder: Cache folder on this machine; None: the default.
    """

    folder: Path | None = None

    def held(self, instance: Instance) -> TwinPlan | None:
        """Return a plan that was made before."""
        key = self._key(instance)
        if key not in _PLANS:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                _PLANS[key] = TwinPlan.from_json(json.loads(self._path(key).read_text("utf-8")))
        return _PLANS.get(key)

    def keep(self, instance: Instance, plan: TwinPlan) -> None:
        """Record a plan; one without twins for this process alone, since this machine may be to blame."""
        key = self._key(instance)
        _PLANS[key] = plan
        if not plan.families:
            return
        path = self._path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = path.with_suffix(f".{secrets.token_hex(4)}")
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(plan.to_json(), file)
        made.replace(path)

    def lock(self, instance: Instance) -> asyncio.Lock:
        """Return the lock under which a row's plan is made."""
        return _LOCKS.setdefault(asyncio.get_running_loop(), {}).setdefault(self._key(instance), asyncio.Lock())

    def _path(self, key: str) -> Path:
        return (self.folder or state_folder()) / "twins" / f"{key}.json"

    def _key(self, instance: Instance) -> str:
        start = instance.image or ""
        if instance.snapshot is not None:
            setup = {"commit": instance.commit, "setup_patch": instance.setup_patch}
            start += checkout(instance.snapshot, folder=self.folder, **setup).name
        facts = {**asdict(instance), "start": start, "version": VERSION, "python": sys.version}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


async def make_plan(judge: Judge, before: Sandbox, after: Sandbox) -> TwinPlan:
    """Make the twins of a row.

    Args:
        judge: One of the row, without twins.
        before: A fresh sandbox with the row's repository, for its tests without a solution.
        after: Another one, for its tests with the reference solution.

    Raises:
        EnvError: The row is broken.
        SandboxError: A sandbox failed.
    """
    instance = judge.instance
    staged = await judge.stage(before, b"")
    solved = await judge.stage(after, instance.patch.encode(), reverse=instance.reversed)
    if isinstance(staged, str) or isinstance(solved, str):
        return TwinPlan(reason=f"its own solution does not apply: {solved}")
    without = await judge.run(before, staged[0])
    solution = await judge.run(after, solved[0])
    verdict = decide(instance, solution.statuses, reason=solution.reason)
    if not verdict.resolved:
        return TwinPlan(reason=f"its own solution does not resolve it: {verdict.reason}")
    return await _Making(judge, after, solved[0], without, solution).plan()


@dataclass(slots=True)
class _Making:
    judge: Judge
    box: Sandbox
    place: Place
    without: TestRun
    solution: TestRun
    files: dict[str, TestFile] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.SystemRandom)

    async def plan(self) -> TwinPlan:
        instance = self.judge.instance
        await self._read()
        options = self._options()
        families, clean = self._families(options), 0
        for _ in range(_ATTEMPTS):
            if not families or clean == 2:
                break
            tests, twins, failure = await self._try(families)
            if failure:
                return TwinPlan(lacking=instance.fail_to_pass, reason=f"its tests do not run beside twins: {failure}")
            kept = self._kept(options, families, tests, twins)
            clean = clean + 1 if kept == families and all(self._good(tests)) else 0
            families = kept
        if clean < 2:
            families = ()
        used = {family.path for family in families}
        covered = {family.node(case) for family in families for case in family.cases if case not in family.void}
        covered |= {node.split()[0] for node in covered}
        lacking = tuple(name for name in instance.fail_to_pass if name not in covered)
        reason = "" if families else "none of its tests has a check that can be altered"
        return TwinPlan(families, {path: self.digests[path] for path in sorted(used)}, lacking, reason)

    async def _read(self) -> None:
        paths = {node.partition("::")[0] for node in self.solution.statuses}
        for path in sorted(each for each in paths if each.endswith(".py")):
            content = await self.box.read_file(f"{self.place.workdir}/{path}")
            with contextlib.suppress(ValueError):
                self.files[path] = TestFile(path, content.decode())
                self.digests[path] = hashlib.sha256(content).hexdigest()

    def _required(self, node: str, names: Sequence[str]) -> bool:
        return counts(node, names) and self.solution.statuses[node].good

    def _options(self) -> dict[tuple[str, str], tuple[list[Altered], tuple[str, ...]]]:
        """Return for each test the ways to alter it, and its cases."""
        instance = self.judge.instance
        fix, keep = instance.fail_to_pass, instance.pass_to_pass
        cases: dict[tuple[str, str], list[str]] = {}
        for node in self.solution.statuses:
            head, mark, case = node.partition("[")
            path, _, test = head.partition("::")
            if path in self.files and test in self.files[path].tests:
                cases.setdefault((path, test), []).append(f"{mark}{case}")
        named = {key: [f"{key[0]}::{key[1]}{case}" for case in found] for key, found in cases.items()}
        first = [key for key, nodes in named.items() if any(self._required(node, fix) for node in nodes)]
        others = [
            key for key, nodes in named.items() if key not in first and all(self._required(n, keep) for n in nodes)
        ]
        self.rng.shuffle(others)
        # Of the same files, which are written anyway.
        others.sort(key=lambda key: key[0] not in {path for path, _ in first})
        took = self.solution.seconds
        left = max(0.1, _SHARE * sum(took.values()))
        found = {}
        for key in [*first, *others[:_MOST_KEPT]]:
            seconds = sum(took.get(node, 0.0) for node in named[key])
            most = (_MOST[len(first) - 1] if len(first) <= len(_MOST) else _MOST_OF_MANY) if key in first else 1
            room = int(left / max(1, len(first)) / max(seconds, 1e-6))
            if key not in first and seconds > left / _MOST_KEPT:
                continue
            lines = [self.without.lines[node] for node in named[key] if node in self.without.lines]
            function = self.files[key[0]].tests[key[1]]
            most, since, makers = max(1, min(most, room)), min(lines, default=0), self.files[key[0]].makers
            ways = alterations(function, most, self.rng, makers=makers, since=since)
            if ways:
                found[key] = (ways, tuple(cases[key]))
        return found

    def _families(self, options: Mapping[tuple[str, str], tuple[list[Altered], tuple[str, ...]]]) -> tuple[Family, ...]:
        return tuple(self._family(key, ways[0], cases) for key, (ways, cases) in options.items() if ways)

    def _family(self, key: tuple[str, str], way: Altered, cases: tuple[str, ...]) -> Family:
        return Family(*key, way.kind, tuple(way.twins), way.reversal, cases, way.rows)

    async def _try(self, families: Sequence[Family]) -> tuple[Any, Any, str]:
        """Run the tests beside twins, with the reference solution."""
        roll = Roll()
        paths = {family.path for family in families}
        texts = {
            path: enroll(self.files[path], [each for each in families if each.path == path], self.rng, roll)
            for path in sorted(paths)
        }
        for path, text in texts.items():
            await self.box.write_file(f"{self.place.workdir}/{path}", text.encode())
        run = await self.judge.run(self.box, self.place, written=texts)
        return (*roll.read(run.statuses), run.reason)

    def _good(self, tests: Any) -> list[bool]:
        instance = self.judge.instance
        names = (*instance.fail_to_pass, *instance.pass_to_pass)
        nodes = [node for node in self.solution.statuses if self._required(node, names)]
        return [node in tests and tests[node].good for node in nodes]

    def _kept(self, options: Any, families: Sequence[Family], tests: Any, twins: Any) -> tuple[Family, ...]:
        """Return the families that hold after a run: its test passed, and its twins failed."""
        kept = []
        for family in families:
            key = (family.path, family.test)
            nodes = {case: family.node(case) for case in family.cases}
            must = [case for case, node in nodes.items() if self.solution.statuses[node].good]
            if not all(nodes[case] in tests and tests[nodes[case]].good for case in must):
                options[key][0].clear()  # twins leave something behind that the test cannot bear
                continue
            passed = {
                twin: {case for case in must if (nodes[case], twin) not in twins or twins[nodes[case], twin].good}
                for twin in range(len(family.twins))
            }
            void = {case for case in family.cases if case not in must} | set(family.void)
            good = [
                twin for twin, cases in passed.items() if not cases or (2 * len(cases) <= len(must) and len(must) > 1)
            ]
            void |= {case for twin in good for case in passed[twin]}
            if not good or len(void) == len(family.cases):
                options[key][0].pop(0)
                if options[key][0]:
                    kept.append(self._family(key, options[key][0][0], family.cases))
                continue
            held = tuple(family.twins[twin] for twin in good)
            order = tuple(case for case in family.cases if case in void)
            kept.append(replace(family, twins=held, void=order))
        return tuple(kept)
