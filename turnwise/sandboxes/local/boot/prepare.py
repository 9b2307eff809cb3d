"""The steps by which a forked process becomes a sandbox, in the order of a plan."""

from __future__ import annotations

import os

from . import file_copy, groups, landlock, seccomp, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def run_plan(plan: dict[str, Any], control: int) -> None:
    """Perform a plan's steps and execute its program.

    Raises:
        OSError: A step failed; its message says which.
    """
    for group in plan["groups"]:
        groups.join(group)
    folders = plan["folders"]
    if plan["stage"] is not None:
        mount_stage(plan["stage"], folders)
    else:
        make_folders(folders)
    if plan["reveal"]:
        reveal(plan["reveal"], plan["uid"], plan["stage"] is not None)
    for copy in plan["copies"]:
        owner = os.geteuid() if copy["owner"] is None else copy["owner"]
        file_copy.FolderCopy(None, owner).copy_folder(os.path.realpath(copy["source"]), copy["target"])
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    if plan["nested"]:
        # A change of user or user namespace resets the parent-death signal.
        syscalls.die_with(plan["parent"])
    if plan["landlock"] is not None:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(plan["landlock"])
    argv = [word.replace("{control}", str(control)) for word in plan["argv"]]
    os.set_inheritable(control, True)
    if plan["seccomp"] == "inherit":
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        unix_only = plan["landlock"] is not None and not plan["landlock"]["network"]
        seccomp.install(seccomp.program(os.uname().machine, shared=True, unix_only=unix_only))
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
    """Create a sandbox's writable folders, owned by its user."""
    for name, mode in folders["names"]:
        path = os.path.join(folders["at"], name)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
        if folders["owner"] is not None:
            os.chown(path, folders["owner"], folders["owner"])


def mount_stage(plan: dict[str, Any], folders: dict[str, Any]) -> None:
    """Mount a private file system for all writable files, and bind in it what will be visible inside."""
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
    options = f"size={plan['size']},nr_inodes={plan['inodes']},mode=755"
    syscalls.mount("turnwise", at, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    make_folders(folders)
    for source, name in plan["binds"]:
        target = os.path.join(at, name)
        make_target(target, os.path.isdir(source))
        syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)
    for overlay in plan["overlays"]:
        mount_overlay(at, overlay, owner, plan["userns"])


def mount_overlay(at: str, overlay: dict[str, Any], owner: int | None, userns: bool) -> None:
    """Mount an overlay: a writable upper layer over folders that never change."""
    # Relative names: a path may contain a separator of options, and all options have to fit into one page of memory.
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
    """Show paths to another user who cannot traverse a folder above them, with nothing else of that folder.

    Args:
        paths: The paths to show.
        uid: The user.
        private: Whether this process already has its own view of the mounts.

    Raises:
        OSError: A path has to be shown, and no private view is allowed.
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
        # An open descriptor can be mounted even after a folder above the path is covered.
        path_fd = os.open(os.path.realpath(path), os.O_PATH | os.O_CLOEXEC)
        # A link outside the covered folder remains, and leads to where its target is mounted.
        above = os.path.realpath(os.path.dirname(path))
        shown_path = os.path.join(above, os.path.basename(path))
        covered.setdefault(cover, []).append(
            (shown_path if f"{shown_path}/".startswith(f"{cover}/") else os.path.realpath(path), path_fd)
        )
    for cover, entries in covered.items():
        syscalls.mount("turnwise", cover, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=1m,mode=755")
        for path, fd in entries:
            source = f"/proc/self/fd/{fd}"
            make_target(path, os.path.isdir(source))
            syscalls.mount(source, path, None, syscalls.MS_BIND | syscalls.MS_REC)
            os.close(fd)


def _above(path: str) -> list[str]:
    """Return the folders above a path, from the top."""
    folders = []
    while path != "/":
        path = os.path.dirname(path)
        folders.append(path)
    return folders[::-1]


def _passable(folder: str, uid: int) -> bool:
    status = os.stat(folder)
    return bool(status.st_mode & (0o100 if status.st_uid == uid else 0o001))


def make_target(path: str, folder: bool) -> None:
    """Create a mount point."""
    if folder:
        os.makedirs(path, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a"):
        pass
