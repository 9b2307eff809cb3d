"""What a forked process does to become a sandbox: the steps of a plan, in their order."""

from __future__ import annotations

import os
import subprocess

from . import groups, landlock, seccomp, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def become(plan: dict[str, Any], control: int) -> None:
    """Do a plan's steps and execute its program.

    Raises:
        OSError: A step failed; its message says which.
    """
    for group in plan["groups"]:
        groups.join(group)
    folders = plan["folders"]
    if plan["stage"] is not None:
        stage(plan["stage"], folders)
    else:
        make_folders(folders)
    if plan["reveal"]:
        reveal(plan["reveal"], plan["uid"], plan["stage"] is not None)
    for copy in plan["copies"]:
        copy_tree(copy["source"], copy["target"], copy["owner"])
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    if plan["nested"]:
        # A change of user, or of its namespace, takes the wish back that the parent's end ends this.
        syscalls.die_with(plan["parent"])
    if plan["landlock"] is not None:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(plan["landlock"])
    argv = [word.replace("{control}", str(control)) for word in plan["argv"]]
    os.set_inheritable(control, True)
    if plan["seccomp"] == "inherit":
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(seccomp.program(os.uname().machine, shared=True))
    elif plan["seccomp"] == "pass":
        program = seccomp.program(os.uname().machine)
        if program is not None:
            fd = os.memfd_create("seccomp", 0)
            os.write(fd, program)
            os.lseek(fd, 0, os.SEEK_SET)
            argv = [word.replace("{seccomp}", str(fd)) for word in argv]
    if plan["cwd"]:
        os.chdir(plan["cwd"])
    os.execve(argv[0], argv, plan["env"])


def make_folders(folders: dict[str, Any]) -> None:
    """Make the folders that a sandbox writes to, for the user that runs in it."""
    for name, mode in folders["names"]:
        path = os.path.join(folders["at"], name)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
        if folders["owner"] is not None:
            os.chown(path, folders["owner"], folders["owner"])


def stage(plan: dict[str, Any], folders: dict[str, Any]) -> None:
    """Make a private file system that holds all that may be written, and show in it what will be seen inside."""
    user, group = os.geteuid(), os.getegid()
    owner = folders["owner"]
    if plan["userns"] and owner is not None:
        syscalls.enter_user_namespace()
        syscalls.unshare(syscalls.CLONE_NEWNS)
    elif plan["userns"]:
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    at = plan["at"]
    syscalls.mount("turnwise", at, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, f"size={plan['size']},mode=755")
    make_folders(folders)
    for source, name in plan["binds"]:
        target = os.path.join(at, name)
        make_target(target, os.path.isdir(source))
        syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)
    for overlay in plan["overlays"]:
        overlaid(at, overlay, owner, plan["userns"])


def overlaid(at: str, overlay: dict[str, Any], owner: int | None, userns: bool) -> None:
    """Mount folders on each other, the last of them to be written to; those below never change."""
    # Relative names: a path may hold what separates options, and all of them have to fit into one page of memory.
    os.chdir(at)
    lowers = []
    for number, (source, foreign) in enumerate(overlay["lowers"]):
        lower = f"{overlay['name']}.{number}"
        os.mkdir(lower)
        if owner is not None and foreign != owner:
            namespace = syscalls.user_namespace(foreign, owner)
            syscalls.bind_as(source, lower, namespace)
            os.close(namespace)
        else:
            syscalls.mount(source, lower, None, syscalls.MS_BIND)
        lowers.append(lower)
    top = str(overlay["name"])
    options = f"lowerdir={':'.join(lowers)},upperdir={top}.upper,workdir={top}.ovl,index=off,metacopy=off"
    options += ",userxattr" if userns else ",redirect_dir=on"
    syscalls.mount("turnwise", top, "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    os.chdir("/")


def reveal(paths: list[str], uid: int, private: bool) -> None:
    """Show paths to another user where it may not pass a folder above them: alone, with nothing else of that folder.

    Args:
        paths: What it shall see.
        uid: The user.
        private: Whether this process already has its own view of the mounts.

    Raises:
        OSError: Something has to be shown, and no private view is allowed.
    """
    closed = [
        (path, [above for above in _above(os.path.realpath(path)) if not _passable(above, uid)]) for path in paths
    ]
    hidden = [(path, above[0]) for path, above in closed if above]
    if hidden and not private:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
        except OSError as error:
            names = ", ".join(path for path, _ in hidden)
            raise OSError(error.errno, f"user {uid} cannot reach {names}, and no private view is allowed") from error
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    covered: dict[str, list[tuple[str, int]]] = {}
    for path, cover in hidden:
        # Held open, it can be shown although what is above it is covered.
        held = os.open(os.path.realpath(path), os.O_PATH | os.O_CLOEXEC)
        # A link outside of what is covered stays, and leads to where its goal is shown.
        above = os.path.realpath(os.path.dirname(path))
        own = os.path.join(above, os.path.basename(path))
        covered.setdefault(cover, []).append(
            (own if f"{own}/".startswith(f"{cover}/") else os.path.realpath(path), held)
        )
    for cover, found in covered.items():
        syscalls.mount("turnwise", cover, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,mode=755")
        for path, fd in found:
            source = f"/proc/self/fd/{fd}"
            make_target(path, os.path.isdir(source))
            syscalls.mount(source, path, None, syscalls.MS_BIND | syscalls.MS_REC)
            os.close(fd)


def _above(path: str) -> list[str]:
    """Return the folders above a path, from the top."""
    found = []
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found[::-1]


def _passable(folder: str, uid: int) -> bool:
    status = os.stat(folder)
    return bool(status.st_mode & (0o100 if status.st_uid == uid else 0o001))


def make_target(path: str, folder: bool) -> None:
    """Make what something is mounted on."""
    if folder:
        os.makedirs(path, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a"):
        pass


def copy_tree(source: str, target: str, owner: int | None) -> None:
    """Copy a folder's content, all of it to one owner.

    Raises:
        OSError: It cannot be copied; the message is the copying program's.
    """
    done = subprocess.run(
        ["cp", "-R", "--preserve=mode,timestamps,links", "--", f"{source}/.", target],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode and owner is not None:
        done = subprocess.run(
            ["chown", "-R", "-h", f"{owner}:{owner}", "--", target], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise OSError(5, f"copying {source}: {done.stderr.strip()[:400]}")
