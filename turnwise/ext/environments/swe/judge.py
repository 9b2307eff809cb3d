"""Grading of SWE solutions in a clean copy of the repository, in a sandbox that the agent never touched.

A solution runs in its tests' process. Pytest results come from a plugin (``guard/``) through a separate process, with a
MAC keyed for the run: forged logs, early exits and a modified pytest pass nothing. Other frameworks' logs are read
between marks that are fresh for each run.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Final

from turnwise.errors import EnvError, SandboxFileError, SandboxFileNotFound
from turnwise.ext.environments.swe.contradictions import (
    ConfirmationRun,
    Finding,
    Suspect,
    find_suspects,
    findings,
    rounds,
)
from turnwise.ext.environments.swe.logs import Statuses, TestStatus, parser_of
from turnwise.ext.environments.swe.paths import SETTINGS, is_protected, settings_differ, shadowed_module, touched_files
from turnwise.ext.environments.swe.rows import Instance
from turnwise.ext.environments.swe.twins import NO_TWINS, Family, Roll, TestFile, TwinPlan, enroll, select
from turnwise.ext.environments.swe.workspace import GIT, RepositoryPaths, git, prepare
from turnwise.sandboxes.core import ExecResult, Sandbox


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of grading a solution.

    Attributes:
        resolved: Whether every required test passes.
        reason: Why not, in a few words; "" if it is resolved.
        fail_to_pass: Status of each test that must be fixed; ``ERROR`` if none was reported.
        pass_to_pass: Status of each test that must keep passing.
        dropped: Changed files that were restored, since they decide how tests run.
        tampered: Evidence that the solution changed how tests run or report, or "": a test that passes together with
            its contradictory twin, with both names, or the guard's complaint.
        seconds: Duration of applying the solution and running the tests.
    """

    resolved: bool
    reason: str = ""
    fail_to_pass: Mapping[str, TestStatus] = field(default_factory=dict)
    pass_to_pass: Mapping[str, TestStatus] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    log: str = ""
    tampered: str = ""
    seconds: float = 0.0

    @property
    def fixed(self) -> float:
        """Share of the FAIL_TO_PASS tests that pass."""
        return _share(self.fail_to_pass)

    @property
    def kept(self) -> float:
        """Share of the PASS_TO_PASS tests that pass."""
        return _share(self.pass_to_pass)

    @property
    def partial(self) -> float:
        """Partial credit: the share of fixed tests, 0 where a PASS_TO_PASS test fails."""
        return self.fixed if self.kept == 1.0 else 0.0

    def tests(self) -> dict[str, dict[str, str]]:
        """Return the status of every test as JSON values."""
        return {
            "FAIL_TO_PASS": {name: str(status) for name, status in self.fail_to_pass.items()},
            "PASS_TO_PASS": {name: str(status) for name, status in self.pass_to_pass.items()},
        }


def _share(tests: Mapping[str, TestStatus]) -> float:
    return sum(status.passes for status in tests.values()) / len(tests) if tests else 1.0


def decide(
    instance: Instance, statuses: Statuses, *, dropped: Sequence[str] = (), log: str = "", reason: str = ""
) -> Verdict:
    """Compare the statuses of a run with a row's expectations.

    Args:
        instance: The row.
        statuses: Reported statuses, by test.
        dropped: Files that were restored.
        log: Tail of the output.
        reason: Failure of the run as a whole, which voids its statuses; "": none.
    """
    if reason:
        statuses = {}
    if instance.expected:
        return _as_expected(instance, statuses, dropped, log, reason)
    by_name: Statuses = {}
    for name, status in statuses.items():
        # Published names end at the first blank, since they were read from logs.
        by_name[name.split()[0] if "::" in name else name] = status
    by_name.update(statuses)
    required = [
        {name: by_name.get(name, TestStatus.ERROR) for name in names}
        for names in (instance.fail_to_pass, instance.pass_to_pass)
    ]
    failing = [[name for name, status in group.items() if not status.passes] for group in required]
    if not reason and failing[0]:
        reason = f"{len(failing[0])} of {len(required[0])} tests still fail: {failing[0][0]}"
    elif not reason and failing[1]:
        reason = f"{len(failing[1])} of {len(required[1])} tests that passed fail now: {failing[1][0]}"
    return Verdict(not reason, reason, required[0], required[1], tuple(dropped), log)


def _as_expected(instance: Instance, statuses: Statuses, dropped: Sequence[str], log: str, reason: str) -> Verdict:
    """Compare a run with the status of every test: rows of R2E-Gym name tests without their files."""
    run = {_r2e_name(name): status for name, status in statuses.items()}
    outcomes = {}
    for name, expected in instance.expected.items():
        status = run.get(_r2e_name(name), TestStatus.ERROR)
        outcomes[name] = TestStatus.PASSED if str(status) == expected else TestStatus.FAILED
    failing = [name for name, status in outcomes.items() if not status.passes]
    if not reason and failing:
        reason = f"{len(failing)} of {len(outcomes)} tests do not end as expected: {failing[0]}"
    return Verdict(not reason, reason, outcomes, {}, tuple(dropped), log)


def _r2e_name(name: str) -> str:
    name = name.split(" - ")[0]
    return ".".join(name.split("::")[1:]) if "::" in name else name


@dataclass(frozen=True, slots=True)
class TestRun:
    """Result of running tests once.

    Attributes:
        reason: Failure of the run as a whole, or "".
        tampered: Whether the guard complained.
        lines: The failed line of each failed test.
        seconds: Duration of each test; processor time for quick ones.
    """

    __test__ = False

    statuses: Statuses
    reason: str = ""
    log: str = ""
    tampered: bool = False
    lines: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


MOST_LOG: Final = 8 * 2**20
_TAIL: Final = 4_000
_TAMPERED: Final = "the run was tampered with: "
_RNG: Final = random.SystemRandom()
_MOST_FILES: Final = 200
_WORDS: Final = (
    *("settrace", "setprofile", "get_objects", "get_referrers", "get_referents"),
    *("ctypes", "/mem", "__eq__", "_getframe", "tb_frame", "gi_frame", "cr_frame", "ag_frame"),
)
"""Words of cheats, rarely of honest code: allowed in files whose base version or reference solution has them."""


class Judge:
    """Grades solutions of one row.

    Args:
        fresh: Opens a sandbox with the row's repository.
        plan: The twins of the row's tests.
    """

    def __init__(
        self,
        instance: Instance,
        fresh: Callable[[], AbstractAsyncContextManager[Sandbox]],
        *,
        timeout: float = 600.0,
        plan: TwinPlan = NO_TWINS,
    ) -> None:
        self.instance = instance
        self.fresh = fresh
        self.plan = plan
        self.timeout = timeout
        # The results of others are read from their log.
        self.reports = instance.framework == "pytest"

    async def judge(self, patch: bytes, *, reverse: bool = False) -> Verdict:
        """Grade a patch; an empty one grades the repository as it is.

        Args:
            patch: A git diff.
            reverse: Whether it is reverted instead of applied.

        Raises:
            EnvError: The row is broken: its tests cannot be applied, or its folder is no repository.
            SandboxError: The sandbox failed.
        """
        began = time.monotonic()
        async with self.fresh() as box:
            staged = await self.stage(box, patch, reverse=reverse)
            if isinstance(staged, str):
                return decide(self.instance, {}, reason=staged)
            try:
                verdict, tests, files, suspects = await self._verdict(box, *staged)
            except SandboxFileError as error:
                if not patch.strip():
                    raise
                return decide(self.instance, {}, reason=f"the patch leaves no room for the tests: {error}")
        if suspects:
            observed = await self._confirm(files, suspects, patch, reverse)
            tests |= {finding.node: TestStatus.FAILED for finding in observed}
            proof = next((finding.reason for finding in observed if finding.tampered), "")
            reason = _TAMPERED + proof if proof else ""
            verdict = decide(self.instance, tests, dropped=verdict.dropped, log=verdict.log, reason=reason)
            verdict = replace(verdict, tampered=proof)
        return replace(verdict, seconds=time.monotonic() - began)

    async def stage(
        self, box: Sandbox, patch: bytes, *, reverse: bool = False
    ) -> tuple[RepositoryPaths, tuple[str, ...]] | str:
        """Apply a patch, restore the files that decide how tests run, and add the tests.

        Returns:
            The repository's paths and the restored files; or why the patch is rejected.

        Raises:
            EnvError: As :meth:`judge`.
        """
        paths = await prepare(box, self.instance)
        if patch.strip():
            problem = await self._apply(box, paths, patch, reverse)
            if problem is not None:
                return f"the patch does not apply: {problem}"
        try:
            dropped = await self._restore_protected(box, paths)
            await self._add_tests(box)
        except EnvError as error:
            if not await self._patch_at_fault(box, patch):
                raise
            return f"the patch conflicts with the tests: {error}"
        return paths, dropped

    async def _apply(self, box: Sandbox, paths: RepositoryPaths, patch: bytes, reverse: bool) -> str | None:
        """Apply a patch; return git's error, or None."""
        path = f"{paths.temporary}/{secrets.token_hex(8)}.diff"
        await box.write_file(path, patch if patch.endswith(b"\n") else patch + b"\n")
        options = ["--reverse"] if reverse else []
        # Files that were copied in have other times than the index says.
        await git(box, "update-index", "-q", "--refresh")
        done = first = await git(box, "apply", "--index", "--binary", "--whitespace=nowarn", *options, path)
        if not done.ok:
            # Model-written diffs have wrong line numbers, which patch(1) tolerates. It works in a copy, since it would
            # also write to .git and to ignored files.
            copy, flags = f"{path}.copy", "-p1 --batch --fuzz=5 --forward --silent" + (" -R" if reverse else "")
            command = (
                f"export GIT_INDEX_FILE={path}.index; {GIT} read-tree HEAD && "
                f"{GIT} checkout-index --all --prefix={copy}/ && (cd {copy} && patch {flags} -i {path}) && "
                f"{GIT} --work-tree={copy} add --all --force . && "
                f"{GIT} diff --cached --binary --full-index --no-renames HEAD > {path}.made && unset GIT_INDEX_FILE && "
                f"{GIT} apply --index --binary --whitespace=nowarn {path}.made"
            )
            done = await box.exec(command, timeout=120.0)
        return None if done.ok else first.text.strip()[-300:]

    async def _restore_protected(self, box: Sandbox, paths: RepositoryPaths) -> tuple[str, ...]:
        """Restore the files that decide how tests run, and return them."""
        changed = await self._changed_files(box)
        base = {name for name, (status, _) in changed.items() if status != "A"}
        links = {name for name, (_, mode) in changed.items() if mode in ("120000", "160000")}
        allowed = touched_files(self.instance.patch) - touched_files(self.instance.test_patch)
        extra = (*self.instance.protected, *touched_files(self.instance.test_patch), *self.plan.files)
        wrong = {name for name in changed if is_protected(name, allowed=allowed, extra=extra)}
        new = {name: shadowed_module(name) for name in changed if name not in base and name not in allowed}
        tops = [top for top in set(new.values()) if top and not (await git(box, "cat-file", "-e", f"HEAD:{top}")).ok]
        wrong |= {name for name, top in new.items() if top in tops} | links
        for name in set(changed) - wrong - allowed:
            if name.rpartition("/")[2] in SETTINGS and await self._settings_changed(box, paths, name):
                wrong.add(name)
        await self._git_for_files(box, "rm --quiet -r -f", wrong - base)
        # Attributes first: they decide how git writes the others.
        attributes = {name for name in wrong & base if name.endswith(".gitattributes")}
        await self._git_for_files(box, "checkout --quiet HEAD", attributes)
        await self._git_for_files(box, "checkout --quiet HEAD", (wrong & base) - attributes)
        return tuple(sorted(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in wrong))

    async def _git_for_files(self, box: Sandbox, command: str, names: Collection[str]) -> None:
        """Run git for any number of files with any names."""
        if names:
            stdin = "\0".join(sorted(names)).encode("utf-8", "surrogateescape")
            done = await box.exec(f"xargs -0 -n 500 {GIT} {command} --", timeout=120.0, stdin=stdin)
            await self._require(done, "putting files back")

    async def _patch_at_fault(self, box: Sandbox, patch: bytes) -> bool:
        """Whether the row's tests apply without the patch, so that the patch is at fault."""
        if not patch.strip():
            return False
        await git(box, "reset", "--quiet", "--hard", "HEAD")
        try:
            await self._add_tests(box)
        except EnvError:
            return False
        return True

    async def _changed_files(self, box: Sandbox) -> dict[str, tuple[str, str]]:
        done = await git(box, "diff", "--cached", "--raw", "-z", "--no-renames", "HEAD", max_output=MOST_LOG)
        await self._require(done, "listing what the patch changed")
        parts = done.stdout.decode("utf-8", "surrogateescape").split("\0")
        changes = {}
        for facts, name in zip(parts[::2], parts[1::2], strict=False):
            _, mode, _, _, status = facts.split()
            changes[name] = (status[:1], mode)
        return changes

    async def _settings_changed(self, box: Sandbox, paths: RepositoryPaths, name: str) -> bool:
        if not name.isprintable():
            return True
        done = await git(box, "show", f"HEAD:{name}", max_output=MOST_LOG)
        try:
            content: bytes | None = await box.read_file(f"{paths.workdir}/{name}")
        except SandboxFileError:
            content = None
        return settings_differ(name.rpartition("/")[2], done.stdout if done.ok else None, content)

    async def _add_tests(self, box: Sandbox) -> None:
        instance = self.instance
        if instance.tests_commit:
            names = sorted({name.partition("::")[0] for name in (*instance.fail_to_pass, *instance.pass_to_pass)})
            done = await git(box, "checkout", "--quiet", instance.tests_commit, "--", *names)
            await self._require(done, f"the tests of {instance.name}")
        if instance.test_patch and not instance.applies_tests:
            # Through stdin, so that the text of hidden tests is in no file.
            stdin = (instance.test_patch.rstrip("\n") + "\n").encode()
            command = f"{GIT} apply --binary --whitespace=nowarn -"
            await self._require(await box.exec(command, timeout=120.0, stdin=stdin), f"test_patch of {instance.name}")

    async def _verdict(
        self, box: Sandbox, paths: RepositoryPaths, dropped: tuple[str, ...]
    ) -> tuple[Verdict, Statuses, Mapping[str, TestFile], list[Suspect]]:
        """Run the tests together with their twins, and compare the outcomes.

        Returns:
            The verdict, the statuses of all tests, the files with twins, and the tests that must be confirmed.
        """
        roll, files = Roll(), await self.test_files(box, paths)
        if files:
            by_path = {path: [family for family in self.plan.families if family.path == path] for path in files}
            texts = {path: enroll(files[path], families, _RNG, roll) for path, families in by_path.items()}
            await self._write(box, paths, texts)
        run = await self.run(box, paths, written=files)
        tests, twins = roll.read(run.statuses)
        log = roll.named(run.log)
        verdict = decide(self.instance, tests, dropped=dropped, log=log, reason=roll.named(run.reason))
        if run.tampered:
            return replace(verdict, tampered=verdict.reason.removeprefix(_TAMPERED)), tests, files, []
        passed = {node for node, status in {**verdict.fail_to_pass, **verdict.pass_to_pass}.items() if status.passes}
        return verdict, tests, files, find_suspects(self.plan.families, tests, twins, passed)

    async def _confirm(
        self, files: Mapping[str, TestFile], suspects: Sequence[Suspect], patch: bytes, reverse: bool
    ) -> list[Finding]:
        """Run suspected tests and their twins again, each in a fresh sandbox; return the contradictory cases.

        All at the same time: a solution can neither count the runs nor tell them apart by a clock.
        """
        runs = (self._confirm_once(files, members, patch, reverse) for members in rounds(suspects, _RNG))
        seen = await asyncio.gather(*runs)
        complaint = next((run for run in seen if isinstance(run, str)), None)
        if complaint is not None:
            return [Finding(suspects[0].nodes[0], complaint, tampered=True)]
        return findings(suspects, [run for run in seen if isinstance(run, ConfirmationRun)])

    async def _confirm_once(
        self, files: Mapping[str, TestFile], members: Sequence[tuple[Family, int]], patch: bytes, reverse: bool
    ) -> ConfirmationRun | str:
        """Run one member of each suspected family in a fresh sandbox; return the guard's complaint if it has one."""
        async with self.fresh() as box:
            staged = await self.stage(box, patch, reverse=reverse)
            if isinstance(staged, str):
                raise EnvError(f"{self.instance.name}: a patch that applied does not apply again: {staged}")
            roll, texts = Roll(), {}
            for path, file in files.items():
                of_file = [(family, twin) for family, twin in members if family.path == path]
                if of_file:
                    texts[path] = select(file, of_file, roll)
            await self._write(box, staged[0], texts)
            run = await self.run(box, staged[0], files=tuple(texts), written=texts)
        if run.tampered:
            return roll.named(run.reason).removeprefix(_TAMPERED)
        return ConfirmationRun(dict(members), *roll.read(run.statuses))

    async def test_files(self, box: Sandbox, paths: RepositoryPaths) -> dict[str, TestFile]:
        """Return the files of tests with twins, as they were when the twins were made."""
        files = {}
        for path, digest in self.plan.files.items():
            content = await box.read_file(f"{paths.workdir}/{path}")
            if hashlib.sha256(content).hexdigest() == digest:
                files[path] = TestFile(path, content.decode())
        return files

    async def _write(self, box: Sandbox, paths: RepositoryPaths, texts: Mapping[str, str]) -> None:
        for path, text in texts.items():
            await box.write_file(f"{paths.workdir}/{path}", text.encode())

    async def run(
        self, box: Sandbox, paths: RepositoryPaths, *, files: tuple[str, ...] = (), written: Collection[str] = ()
    ) -> TestRun:
        """Run the tests once.

        Args:
            box: The sandbox.
            paths: The repository in it.
            files: Test files to run; by default the row's.
            written: Files written for this run; their compiled versions are removed.
        """
        instance = self.instance if not files else replace(self.instance, files=files)
        nonce, key = secrets.token_hex(16), secrets.token_bytes(32)
        folder = f"{paths.temporary}/turnwise-{secrets.token_hex(8)}"
        env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
        if self.reports:
            env |= await self._guard(box, paths, folder, nonce, key)
        script = _script(instance, paths.workdir, nonce, written)
        await box.write_file(f"{folder}/run.sh", script.encode())
        done = await box.exec(
            ["bash", f"{folder}/run.sh"], timeout=self.timeout, env={**instance.env, **env}, max_output=MOST_LOG
        )
        log = (done.stdout + done.stderr).decode("utf-8", "replace")
        between = log.partition(f"begin {nonce}\n")[2].partition(f"end {nonce}")[0]
        tail = between[-_TAIL:] or log[-_TAIL:]
        if done.timed_out:
            return TestRun({}, f"the tests took longer than {self.timeout:g} s", tail)
        if self.reports:
            return replace(await self._report(box, folder, key), log=tail)
        reason = "" if f"end {nonce}" in log else "the test script did not finish"
        return TestRun(parser_of(instance.framework)(between), reason, tail)

    async def _guard(self, box: Sandbox, paths: RepositoryPaths, folder: str, nonce: str, key: bytes) -> dict[str, str]:
        # Nothing in the repository can have these names.
        module = f"guard_{nonce}"
        for name, source in ((module, "plugin.py"), (f"comparisons_{nonce}", "comparisons.py")):
            text = (resources.files("turnwise.ext.environments.swe") / "guard" / source).read_bytes()
            await box.write_file(f"{folder}/{name}.py", text)
        files = {}
        for path in sorted(touched_files(self.instance.test_patch) | set(self.instance.files)):
            where = f"{paths.workdir}/{path}"
            try:
                files[where] = hashlib.sha256(await box.read_file(where)).hexdigest()
            except SandboxFileError:
                continue  # removed by the test patch
        settings = {"key": key.hex(), "report": f"{folder}/report.json", "files": files}
        settings["changed"] = await self._suspicious_words(box, paths)
        await box.write_file(f"{folder}/settings.json", json.dumps(settings).encode(), mode=0o600)
        python_path = self.instance.env.get("PYTHONPATH") or box.spec.env.get("PYTHONPATH")
        return {
            "PYTEST_ADDOPTS": f"-p {module}",
            "PYTHONPATH": f"{folder}:{python_path}" if python_path else folder,
            "TURNWISE_REPORT": f"{folder}/settings.json",
        }

    async def _suspicious_words(self, box: Sandbox, paths: RepositoryPaths) -> dict[str, list[str]]:
        """Return the solution's Python files, each with the suspicious words of its base version."""
        tests = touched_files(self.instance.test_patch) | set(self.instance.files)
        names = [name for name in await self._changed_files(box) if name.endswith(".py") and name not in tests]
        words = {}
        for name in names[:_MOST_FILES]:
            base = (await git(box, "show", f"HEAD:{name}", max_output=MOST_LOG)).text
            words[f"{paths.workdir}/{name}"] = [word for word in _WORDS if word in base or word in self.instance.patch]
        return words

    async def _report(self, box: Sandbox, folder: str, key: bytes) -> TestRun:
        try:
            sealed: Any = json.loads(await box.read_file(f"{folder}/report.json"))
            text, code = sealed["text"], sealed["code"]
            if not hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), code):
                return TestRun({}, "the report of the tests was forged", tampered=True)
            report = json.loads(text)
        except SandboxFileNotFound:
            return TestRun({}, "the tests ended without a report")
        except (SandboxFileError, ValueError, KeyError, TypeError, AttributeError):
            return TestRun({}, "the report of the tests cannot be read")
        statuses = {name: TestStatus(status) for name, status in report["tests"].items()}
        wrong = _TAMPERED + report["wrong"][0] if report["wrong"] else ""
        return TestRun(
            statuses, wrong, tampered=bool(wrong), lines=dict(report["line"]), seconds=dict(report["seconds"])
        )

    async def _require(self, done: ExecResult, what: str) -> None:
        if not done.ok:
            raise EnvError(f"{self.instance.name}: {what}: {done.text.strip()[-800:] or f'exit {done.exit_code}'}")


def _script(instance: Instance, workdir: str, nonce: str, written: Collection[str]) -> str:
    if instance.script:
        body = [instance.script]
    else:
        body = [*instance.setup, " ".join([instance.command, *map(shlex.quote, instance.files)])]
    # Python would use the compiled version of a file of the same second and size.
    compiled = [f"{head}{slash}__pycache__/{name[:-3]}." for head, slash, name in (p.rpartition("/") for p in written)]
    removed = [f"rm -f -- {shlex.quote(path)}*.pyc" for path in sorted(compiled)]
    header = ["exec 2>&1", f"cd {shlex.quote(workdir)}", *removed, f"echo begin {nonce}"]
    return "\n".join([*header, "(", *body, ")", f"echo end {nonce}", ""])
