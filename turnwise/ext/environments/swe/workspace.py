"""A row's repository in a sandbox: initial state, and the agent's submission."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turnwise.errors import EnvError, SandboxFileError
from turnwise.ext.environments.swe.rows import WORKDIR, Instance
from turnwise.ext.environments.swe.snapshot import checkout
from turnwise.sandboxes.core import ExecResult, Sandbox, SandboxLimits, SandboxSpec
from turnwise.sandboxes.local import host_python
from turnwise.tasks.seeded import FIXED_HASHES

GIT: Final = (
    "git --literal-pathspecs -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.quotePath=false "
    "-c protocol.allow=never"
)
"""git without what a repository's own settings may start, and with file names taken literally."""
_GIT_ENV: Final = {
    # Commands may read the files regardless of their owner; an agent's commits need a name.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@example.org",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@example.org",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    **FIXED_HASHES,
}


def spec_of(instance: Instance, limits: SandboxLimits, folder: Path | None = None) -> SandboxSpec:
    """Return the spec of a sandbox with a row's repository.

    Args:
        instance: The row.
        limits: Resource limits.
        folder: Cache folder on this machine; None: the default.
    """
    labels = {"swe": instance.name}
    env = {**_GIT_ENV, **instance.env}
    if instance.snapshot is None:
        # The files of published images belong to root.
        return SandboxSpec(image=instance.image, workdir=WORKDIR, env=env, user="root", limits=limits, labels=labels)
    workspace = checkout(instance.snapshot, commit=instance.commit, setup_patch=instance.setup_patch, folder=folder)
    if instance.image is not None:
        return SandboxSpec(
            image=instance.image, workspace=workspace, workdir=WORKDIR, env=env, limits=limits, labels=labels
        )
    mounts, python = host_python()
    return SandboxSpec(
        workspace=workspace,
        workdir=WORKDIR,
        env={**python, "PYTHONDONTWRITEBYTECODE": "1", **env},
        mounts=tuple(mounts),
        limits=limits,
        labels=labels,
    )


async def git(box: Sandbox, *arguments: str, max_output: int = 65_536) -> ExecResult:
    """Run git in a sandbox's workdir."""
    return await box.exec([*GIT.split(), *arguments], timeout=120.0, max_output=max_output)


@dataclass(frozen=True, slots=True)
class RepositoryPaths:
    """Paths in a sandbox, which differ from the spec's in a backend without namespaces, and the base commit."""

    workdir: str
    temporary: str
    base: str


async def prepare(box: Sandbox, instance: Instance) -> RepositoryPaths:
    """Bring a repository to a row's initial state."""
    if instance.snapshot is None and instance.commit:
        done = await git(box, "checkout", "--quiet", "--force", instance.commit)
        if not done.ok:
            raise EnvError(f"{instance.name}: {instance.image} has no commit {instance.commit!r}: {done.text.strip()}")
    # Copied files differ from the index in their time, which "apply --index" would treat as a change.
    refresh = f"{GIT} update-index -q --refresh >/dev/null 2>&1"
    done = await box.exec(f'{refresh}; pwd; echo "${{TMPDIR:-/tmp}}"; {GIT} rev-parse HEAD')
    if not done.ok:
        raise EnvError(f"{instance.name}: {box.spec.workdir} holds no git repository: {done.stderr.decode().strip()}")
    workdir, temporary, base = done.stdout.decode().splitlines()
    return RepositoryPaths(workdir, temporary, base)


async def hide_history(box: Sandbox) -> None:
    """Remove refs to later commits: branches, tags, remotes and logs."""
    script = (
        "for remote in $(git remote); do git remote remove $remote; done; "
        "here=$(git symbolic-ref -q HEAD); "
        "git for-each-ref --format='delete %(refname)' | grep -vx \"delete ${here:-none}\" | git update-ref --stdin; "
        "git reflog expire --expire=now --all; rm -f .git/packed-refs.lock .git/ORIG_HEAD .git/FETCH_HEAD"
    )
    await box.exec(script, timeout=120.0)


async def submission(box: Sandbox, paths: RepositoryPaths, *, max_bytes: int) -> tuple[bytes, str]:
    """Return the diff since the base commit, and an error text or "".

    It includes commits, and new files unless ignored.
    """
    mark = secrets.token_hex(8)
    index, target = f"{paths.temporary}/{mark}.index", f"{paths.temporary}/{mark}.diff"
    script = (
        f"export GIT_INDEX_FILE={index}; {GIT} read-tree {paths.base} && {GIT} add --all . && "
        f"{GIT} diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames "
        f"--src-prefix=a/ --dst-prefix=b/ {paths.base} > {target}"
    )
    try:
        done = await box.exec(script, timeout=120.0, cwd=paths.workdir)
        if not done.ok:
            return b"", f"the repository returned no diff: {done.text.strip()[-300:]}"
        patch = await box.read_file(target, max_bytes=max_bytes)
    except SandboxFileError as error:
        return b"", f"the diff cannot be read: {error}"
    return patch, ""
