"""The table of the sandbox checker: all checks of the contract and all attacks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from turnwise.ext.checks.sandbox import attacks, commands, files, lifecycle, link_attacks, processes
from turnwise.ext.checks.sandbox.attacks import connection, program
from turnwise.ext.checks.sandbox.context import CheckContext
from turnwise.sandboxes.core import Sandbox


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the contract, or one attack on what the capabilities claim to contain.

    Attributes:
        name: ``group: what``; attacks begin with ``attack``.
        run: What it does; it raises CheckFailed for a violation. An attack returns its findings, none if contained.
        containment: Of an attack, the capability that claims to contain it, or ``always``; empty for a check.
        needs: The capability without which it is skipped.
        refused: A call that a backend without that capability must refuse.
    """

    name: str
    run: Callable[[CheckContext], Awaitable[list[str] | None]]
    containment: str = ""
    needs: str = ""
    refused: Callable[[Sandbox], Awaitable[object]] | None = None


_ROWS: Final = (
    Check("exec: exit codes", commands.exit_codes),
    Check("exec: signals", commands.signals),
    Check("exec: missing program", commands.missing_program),
    Check("exec: streams", commands.streams),
    Check("exec: binary output", commands.binary),
    Check("exec: arguments", commands.arguments),
    Check("exec: long arguments", commands.long_argument),
    Check("exec: folders", commands.folders),
    Check("exec: bad folder", commands.bad_folder),
    Check("exec: variables", commands.variables),
    Check("exec: host environment", commands.host_environment),
    Check("exec: input", commands.standard_input),
    Check("exec: long input", commands.long_stdin),
    Check("exec: cut output", commands.cut_output),
    Check("exec: uncut output", commands.uncut),
    Check("exec: much output", commands.much_output),
    Check("exec: together", commands.concurrent),
    Check("exec: duration", commands.duration),
    Check("exec: user", commands.unprivileged_user),
    Check("time-out: result", processes.timeout_result),
    Check("time-out: tree", processes.timeout_tree),
    Check("time-out: endless output", processes.timeout_endless_output),
    Check("time-out: spares others", processes.timeout_spares),
    Check("cancellation", processes.cancellation),
    Check("background: lives on", processes.background_survives),
    Check("background: output", processes.background_output),
    Check("spawn: interactive", processes.spawn_interactive),
    Check("spawn: streams", processes.spawn_streams),
    Check("spawn: folder and variables", processes.spawn_arguments),
    Check("spawn: missing program", processes.spawn_missing),
    Check("spawn: interrupt", processes.spawn_interrupt),
    Check("spawn: kill", processes.spawn_kill),
    Check("spawn: volume", processes.spawn_volume),
    Check("files: round trip", files.round_trip),
    Check("files: large", files.large_file),
    Check("files: overwriting", files.overwriting),
    Check("files: places", files.paths),
    Check("files: owner", files.owner),
    Check("files: names", files.unusual_names),
    Check("files: modes", files.modes),
    Check("files: missing", files.missing_file),
    Check("files: no file", files.not_regular),
    Check("files: too large", files.too_large),
    Check("files: forbidden", files.forbidden),
    Check("files: links", files.links),
    Check("files: size limit", files.size_limit),
    Check("trees: upload", files.upload),
    Check("trees: merge", files.merge),
    Check("trees: upload of what is missing", files.upload_missing),
    Check("trees: download", files.download),
    Check("trees: many files", files.many_files),
    Check("trees: download of what is missing or large", files.download_missing),
    Check("trees: what changes", files.changing_files),
    Check("trees: workspace", files.workspace),
    Check("trees: missing workspace", lifecycle.workspace_missing),
    Check("trees: mounts", files.mounts, needs="images"),
    Check("life: identity", lifecycle.identity),
    Check("life: close", lifecycle.close_twice),
    Check("life: close during a command", lifecycle.close_during),
    Check("life: close ends all", lifecycle.close_ends_all),
    Check("life: cancelled start", lifecycle.start_cancelled),
    Check("life: refused start", lifecycle.start_refused),
    Check("life: workdir", lifecycle.workdir, needs="images"),
    Check("life: snapshot", lifecycle.snapshot, needs="snapshots", refused=lambda sandbox: sandbox.snapshot()),
    Check("life: fork", lifecycle.fork, needs="snapshots", refused=lambda sandbox: sandbox.fork()),
    Check("life: fork processes", lifecycle.fork_processes, needs="snapshots"),
    Check("life: fork a deep tree", lifecycle.fork_deep_tree, needs="snapshots"),
    Check("life: fork limits", lifecycle.fork_limits, needs="snapshots"),
    Check("life: expose", lifecycle.expose, needs="expose", refused=lambda sandbox: sandbox.expose("127.0.0.1", 9)),
    Check("life: reap", lifecycle.reap_spares_live),
    Check("limits: orphans", lifecycle.reaped_orphans),
    Check("limits: processor time", lifecycle.cpu_limit),
    Check("attack: environment", program("environment"), "always"),
    Check("attack: environments in /proc", program("process_environments"), "processes"),
    Check("attack: read a host file (0644)", program("read_file", file="world"), "filesystem"),
    Check("attack: read a host file (0600)", program("read_file", file="private"), "filesystem"),
    Check("attack: write to the host", attacks.write_outside, "filesystem"),
    Check("attack: change a host file's mode", program("change_mode", file="open"), "filesystem"),
    Check("attack: see host processes", program("see_processes"), "processes"),
    Check("attack: signal a host process", attacks.signal_host, "processes"),
    Check("attack: trace a host process", program("trace"), "processes"),
    Check("attack: forge the agent's messages", attacks.forge_messages, "processes"),
    Check("attack: TCP to the host's loopback", connection("tcp"), "network"),
    Check("attack: MPTCP to the host's loopback", connection("tcp", protocol=262), "network"),
    Check("attack: fast open to the host's loopback", connection("tcp", flags=0x20000000), "network"),
    Check("attack: UDP to the host's loopback", connection("udp"), "network"),
    Check("attack: abstract unix socket", connection("unix", kind="abstract"), "network"),
    Check("attack: unix socket by its path", connection("unix", kind="path"), "network"),
    Check("attack: network interfaces", program("interfaces"), "network"),
    Check("attack: fork bomb", attacks.fork_bomb, "pids"),
    Check("attack: memory in one process", attacks.one_process, "memory"),
    Check("attack: memory in several processes", attacks.several_processes, "memory"),
    Check("attack: one large file", attacks.large_file, "always"),
    Check("attack: fill the disk", attacks.many_files, "disk"),
    Check("attack: starve a sibling", attacks.starve_sibling, "siblings"),
    Check("attack: kernel settings", program("settings"), "kernel"),
    Check("attack: keyrings", program("keyrings"), "kernel"),
    Check("attack: nested namespaces", program("namespaces"), "kernel"),
    Check("attack: mounts", program("mounts"), "kernel"),
    Check("attack: sockets of the machine", program("machine_sockets"), "kernel"),
    Check("attack: devices", program("devices"), "kernel"),
    Check("attack: outlive the time-out", attacks.outlive_timeout, "always"),
    Check("attack: thread that outlives the time-out", attacks.outlive_by_thread, "always"),
    Check("attack: outlive the host", attacks.outlive_host, "always"),
    Check("attack: read through a link", link_attacks.read_link, "filesystem"),
    Check("attack: write through a link", link_attacks.write_link, "filesystem"),
    Check("attack: upload through a link", link_attacks.upload_link, "filesystem"),
    Check("attack: links in a download", link_attacks.download_links, "always"),
    Check("attack: download through an earlier link", link_attacks.download_twice, "always"),
    Check("attack: change while downloading", link_attacks.download_race, "always"),
)

CHECKS: Final[dict[str, Check]] = {check.name: check for check in _ROWS}
"""All checks and attacks by name, in the order in which they run; ``check-sandbox --only`` selects by prefix."""
