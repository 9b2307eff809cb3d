"""Creation and validation of a row's twins: the reference solution must pass the test and fail the twin.

The unsolved repository shows which check of a test fails first. Earlier checks are useless for twins, since a program
with the bug passes them too. Plans are cached per row, in memory and beside the row's repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from turnwise.ext.environments.swe.checks import Alteration, alterations
from turnwise.ext.environments.swe.contradictions import is_listed
from turnwise.ext.environments.swe.judge import Judge, TestRun, decide
from turnwise.ext.environments.swe.rows import Instance
from turnwise.ext.environments.swe.snapshot import CachedTwins, checkout
from turnwise.ext.environments.swe.twins import VERSION, Family, Roll, TestFile, TwinPlan, command_obstacle, enroll
from turnwise.ext.environments.swe.workspace import RepositoryPaths
from turnwise.sandboxes.core import Sandbox

_MOST: Final = (15, 7)
"""Most twins per FAIL_TO_PASS test, in rows with one and with two such tests."""
_MOST_OF_MANY: Final = 3
_MOST_KEPT: Final = 2
"""Most PASS_TO_PASS tests with a twin, one twin each."""
_SHARE: Final = 0.1
"""Most time of the twins, as a share of the time of the tests; at least a tenth of a second."""
_ATTEMPTS: Final = 8
_PLANS: Final = CachedTwins(TwinPlan)
_LOCKS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]]] = WeakKeyDictionary()


def row_obstacle(instance: Instance, *, reports: bool) -> str:
    """Return why a row's tests can have no twins, or ""."""
    if not reports:
        return f"twins are made of tests that pytest reports, and it runs {instance.framework}"
    if instance.script or instance.expected:
        return "its tests are run by a custom script"
    if not instance.patch:
        return "it has no reference solution"
    return command_obstacle(instance.command, instance.files)


@dataclass(slots=True)
class PlanCache:
    """The cached plans of rows.

    Args:
        folder: Cache folder on this machine; None: the default.
    """

    folder: Path | None = None

    def get(self, instance: Instance) -> TwinPlan | None:
        """Return the cached plan, or None."""
        return _PLANS.get(self._key(instance), self.folder)

    def put(self, instance: Instance, plan: TwinPlan) -> None:
        """Record a plan; one without twins only in memory, since its cause may be this machine."""
        _PLANS.put(self._key(instance), plan, self.folder, in_memory=not plan.families)

    def lock(self, instance: Instance) -> asyncio.Lock:
        """Return the lock under which a row's plan is made."""
        return _LOCKS.setdefault(asyncio.get_running_loop(), {}).setdefault(self._key(instance), asyncio.Lock())

    def _key(self, instance: Instance) -> str:
        start = instance.image or ""
        if instance.snapshot is not None:
            setup = {"commit": instance.commit, "setup_patch": instance.setup_patch}
            start += checkout(instance.snapshot, folder=self.folder, **setup).name
        facts = {**asdict(instance), "start": start, "version": VERSION, "python": sys.version}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


async def make_plan(judge: Judge, unsolved: Sandbox, solved_box: Sandbox) -> TwinPlan:
    """Make the twins of a row.

    Args:
        judge: A judge of the row, without twins.
        unsolved: A fresh sandbox with the row's repository, for the run without a solution.
        solved_box: A second such sandbox, for the run with the reference solution.

    Raises:
        EnvError: The row is broken.
        SandboxError: A sandbox failed.
    """
    instance = judge.instance
    staged = await judge.stage(unsolved, b"")
    solved = await judge.stage(solved_box, instance.patch.encode(), reverse=instance.reversed)
    if isinstance(staged, str) or isinstance(solved, str):
        return TwinPlan(reason=f"its own solution does not apply: {solved}")
    without = await judge.run(unsolved, staged[0])
    solution = await judge.run(solved_box, solved[0])
    verdict = decide(instance, solution.statuses, reason=solution.reason)
    if not verdict.resolved:
        return TwinPlan(reason=f"its own solution does not resolve it: {verdict.reason}")
    return await _PlanBuilder(judge, solved_box, solved[0], without, solution).plan()


@dataclass(slots=True)
class _PlanBuilder:
    judge: Judge
    box: Sandbox
    paths: RepositoryPaths
    without: TestRun
    solution: TestRun
    files: dict[str, TestFile] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.SystemRandom)

    async def plan(self) -> TwinPlan:
        instance = self.judge.instance
        await self._read()
        options = self._options()
        families = tuple(self._family(key, alternatives[0], cases) for key, (alternatives, cases) in options.items())
        clean = 0
        for _ in range(_ATTEMPTS):
            if not families or clean == 2:
                break
            tests, twins, failure = await self._try(families)
            if failure:
                return TwinPlan(lacking=instance.fail_to_pass, reason=f"its tests do not run beside twins: {failure}")
            remaining = self._surviving(options, families, tests, twins)
            clean = clean + 1 if remaining == families and all(self._required_outcomes(tests)) else 0
            families = remaining
        if clean < 2:
            families = ()
        paths = {family.path for family in families}
        covered = {family.node(case) for family in families for case in family.cases if case not in family.void}
        covered |= {node.split()[0] for node in covered}
        lacking = tuple(name for name in instance.fail_to_pass if name not in covered)
        reason = "" if families else "none of its tests has a check that can be altered"
        return TwinPlan(families, {path: self.digests[path] for path in sorted(paths)}, lacking, reason)

    async def _read(self) -> None:
        paths = {node.partition("::")[0] for node in self.solution.statuses}
        for path in sorted(path for path in paths if path.endswith(".py")):
            content = await self.box.read_file(f"{self.paths.workdir}/{path}")
            with contextlib.suppress(ValueError):
                self.files[path] = TestFile(path, content.decode())
                self.digests[path] = hashlib.sha256(content).hexdigest()

    def _required(self, node: str, names: Sequence[str]) -> bool:
        return is_listed(node, names) and self.solution.statuses[node].passes

    def _options(self) -> dict[tuple[str, str], tuple[list[Alteration], tuple[str, ...]]]:
        """Return the alterations and cases of each test."""
        instance = self.judge.instance
        fix, keep = instance.fail_to_pass, instance.pass_to_pass
        cases: dict[tuple[str, str], list[str]] = {}
        for node in self.solution.statuses:
            head, mark, case = node.partition("[")
            path, _, test = head.partition("::")
            if path in self.files and test in self.files[path].tests:
                cases.setdefault((path, test), []).append(f"{mark}{case}")
        node_ids = {key: [f"{key[0]}::{key[1]}{case}" for case in suffixes] for key, suffixes in cases.items()}
        first = [key for key, nodes in node_ids.items() if any(self._required(node, fix) for node in nodes)]
        further = [
            key for key, nodes in node_ids.items() if key not in first and all(self._required(n, keep) for n in nodes)
        ]
        self.rng.shuffle(further)
        # Tests of the same files first, which are rewritten anyway.
        further.sort(key=lambda key: key[0] not in {path for path, _ in first})
        took = self.solution.seconds
        budget = max(0.1, _SHARE * sum(took.values()))
        options = {}
        for key in [*first, *further[:_MOST_KEPT]]:
            seconds = sum(took.get(node, 0.0) for node in node_ids[key])
            limit = (_MOST[len(first) - 1] if len(first) <= len(_MOST) else _MOST_OF_MANY) if key in first else 1
            room = int(budget / max(1, len(first)) / max(seconds, 1e-6))
            if key not in first and seconds > budget / _MOST_KEPT:
                continue
            lines = [self.without.lines[node] for node in node_ids[key] if node in self.without.lines]
            function = self.files[key[0]].tests[key[1]]
            limit, since, makers = max(1, min(limit, room)), min(lines, default=0), self.files[key[0]].makers
            alterations_of_test = alterations(function, limit, self.rng, makers=makers, since=since)
            if alterations_of_test:
                options[key] = (alterations_of_test, tuple(cases[key]))
        return options

    def _family(self, key: tuple[str, str], alteration: Alteration, cases: tuple[str, ...]) -> Family:
        return Family(*key, alteration.kind, tuple(alteration.twins), alteration.reversal, cases, alteration.rows)

    async def _try(self, families: Sequence[Family]) -> tuple[Any, Any, str]:
        """Run the tests together with their twins, with the reference solution."""
        roll = Roll()
        paths = {family.path for family in families}
        texts = {
            path: enroll(self.files[path], [family for family in families if family.path == path], self.rng, roll)
            for path in sorted(paths)
        }
        for path, text in texts.items():
            await self.box.write_file(f"{self.paths.workdir}/{path}", text.encode())
        run = await self.judge.run(self.box, self.paths, written=texts)
        return (*roll.read(run.statuses), run.reason)

    def _required_outcomes(self, tests: Any) -> list[bool]:
        instance = self.judge.instance
        names = (*instance.fail_to_pass, *instance.pass_to_pass)
        nodes = [node for node in self.solution.statuses if self._required(node, names)]
        return [node in tests and tests[node].passes for node in nodes]

    def _surviving(self, options: Any, families: Sequence[Family], tests: Any, twins: Any) -> tuple[Family, ...]:
        """Return the families whose test passed and whose twins failed in a run."""
        remaining = []
        for family in families:
            key = (family.path, family.test)
            nodes = {case: family.node(case) for case in family.cases}
            must = [case for case, node in nodes.items() if self.solution.statuses[node].passes]
            if not all(nodes[case] in tests and tests[nodes[case]].passes for case in must):
                options[key][0].clear()  # its twins leave state behind that makes the test fail
                continue
            passed = {
                twin: {case for case in must if (nodes[case], twin) not in twins or twins[nodes[case], twin].passes}
                for twin in range(len(family.twins))
            }
            void = {case for case in family.cases if case not in must} | set(family.void)
            effective = [
                twin for twin, cases in passed.items() if not cases or (2 * len(cases) <= len(must) and len(must) > 1)
            ]
            void |= {case for twin in effective for case in passed[twin]}
            if not effective or len(void) == len(family.cases):
                options[key][0].pop(0)
                if options[key][0]:
                    remaining.append(self._family(key, options[key][0][0], family.cases))
                continue
            twins_left = tuple(family.twins[twin] for twin in effective)
            order = tuple(case for case in family.cases if case in void)
            remaining.append(replace(family, twins=twins_left, void=order))
        return tuple(remaining)
