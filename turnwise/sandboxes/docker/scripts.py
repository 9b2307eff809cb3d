"""Shell scripts that run inside containers.

An image needs ``/bin/sh``, ``cat``, ``head``, ``tr``, ``grep``, ``mkdir``, ``chmod`` and ``tar``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnwise.sandboxes.core import Command

ID_VARIABLE: Final = "TURNWISE_EXEC"
"""The environment variable that names the command that a process belongs to."""

# $1: minutes. The first process reaps orphans, and ends the container when its time is over. A plain `sleep` would
# reap nothing, and zombies would fill the limit of processes.
PID_1: Final = "trap 'exit 0' TERM; n=0; while [ $n -lt $1 ]; do sleep 60 & wait $!; n=$((n + 1)); done"

_AS_ARGV: Final = r"""
if [ "$1" = text ]; then shift; if command -v bash >/dev/null 2>&1; then set -- bash -c "$@"; else set -- sh -c "$@"; fi
else shift; fi
"""

# $1: the folder, $2: whether there is input, then the command. The first line of the input is a marker that only this
# shell knows; with it, both streams report that the command has ended. The reported end is thus the command's, not that
# of background processes that hold its streams; the two `cat` keep the streams open for those, which a broken pipe
# would end. A command that kills the shells above it reports nothing, and counts as ended.
_RUN: Final = (
    r"""
IFS= read -r mark
if ! cd -- "$1" 2>/dev/null; then printf '%s:cwd\n' "$mark"; printf '%s:cwd\n' "$mark" >&2; exit 0; fi
input=$2; shift 2
"""
    + _AS_ARGV
    + r"""
{
  {
    # This shell's own messages, such as the signal that ended the command, are not output of the command.
    {
      if [ "$input" = 1 ]; then (exec "$@" 2>&4 4>&-); else (exec "$@" 2>&4 4>&- </dev/null); fi
      code=$?
    } 4>&2 2>/dev/null
    printf '%s:%s\n' "$mark" "$code"; printf '%s:%s\n' "$mark" "$code" >&2
  } 2>&1 1>&3 3>&- | cat >&2
} 3>&1 | cat
exit 137
"""
)

# $1: the folder, $2: a marker that distinguishes this shell's line from the command's output; then the command, which
# replaces this shell.
_SPAWN: Final = (
    r"""
if ! cd -- "$1" 2>/dev/null; then printf '%s:cwd\n' "$2"; exit 0; fi
word=$2; shift 2
"""
    + _AS_ARGV
    + r"""
if ! command -v -- "$1" >/dev/null 2>&1; then printf '%s:program\n' "$word"; exit 0; fi
printf '%s:ok\n' "$word"
exec "$@" 2>&1
"""
)

# `look PID` sets state, parent, group and start (in ticks since the boot) of a process. A process name may contain line
# ends and brackets, so the fields are read after the last bracket. `root` is set to the process that the engine started
# for a command: it alone has no parent in the container, which cannot be faked.
_INSPECT: Final = (
    r"""
id=$1
look() {
  line=
  { while IFS= read -r part || [ -n "$part" ]; do line="$line$part "; done <"/proc/$1/stat"; } 2>/dev/null
  [ -n "$line" ] || return 1
  set -f; set -- ${line##*) }; set +f
  state=$1 parent=$2 group=$3 start=${20}
}
claims() { { tr '\0' '\n' <"/proc/$1/environ" | grep -qx "ID_VARIABLE=$2"; } 2>/dev/null; }
root=
for path in /proc/[0-9]*; do
  pid=${path#/proc/}
  if look "$pid" && [ "$parent" = 0 ] && [ "$pid" != 1 ] && [ "$pid" != $$ ] && claims "$pid" "$id"; then
    root=$pid since=$start
  fi
done
"""
).replace("ID_VARIABLE", ID_VARIABLE)

# $1: the command's id, $2: ticks since before it began, then the ids of concurrent commands. Kills its descendants, and
# orphans that began after it, except those that claim one of the other ids. All are stopped first, so that none forks
# while it is killed.
KILL: Final = (
    _INSPECT
    + r"""
look $$
[ -n "$root" ] || since=$((start - $2 - 100))
shift 2
belongs() {
  look "$1" || return 1
  case $state in Z|X) return 1;; esac
  [ "$start" -ge "$since" ] || return 1
  at=$1
  while [ "$parent" != 0 ]; do
    if [ "$parent" = 1 ]; then
      [ "$start" -ge "$since" ] || return 1
      for other in $others; do claims "$at" "$other" && return 1; done
      return 0
    fi
    at=$parent
    look "$at" || { again=1; return 1; }
  done
  [ "$at" = "$root" ]
}
others=$*
round=0 again=1
while [ $again = 1 ] && [ $round -lt 200 ]; do
  again=0 alive= round=$((round + 1))
  for path in /proc/[0-9]*; do
    pid=${path#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] || ! belongs "$pid" || alive="$alive $pid"
  done
  if [ -n "$alive" ]; then again=1; kill -STOP $alive 2>/dev/null; kill -KILL $alive 2>/dev/null; fi
done
[ $again = 0 ] && echo ended
"""
)

# $1: the command's id. Like Ctrl-C, to its process group.
INTERRUPT: Final = _INSPECT + r"""[ -z "$root" ] || { look "$root" && kill -INT "-$group"; }"""

NOT_FOUND: Final = 90
NOT_A_FILE: Final = 91
UNREADABLE: Final = 92

# $1: the path, $2: the maximum number of bytes.
READ_FILE: Final = f"""
[ -e "$1" ] || exit {NOT_FOUND}; [ -f "$1" ] || exit {NOT_A_FILE}; [ -r "$1" ] || exit {UNREADABLE}
head -c "$2" <"$1"
"""

# $1: the path, $2: its permissions or empty. Parent folders are created.
WRITE_FILE: Final = f"""
case $1 in */*) mkdir -p -- "${{1%/*}}/" || exit 1;; esac
[ ! -e "$1" ] || [ -f "$1" ] || exit {NOT_A_FILE}
cat >"$1" || exit 1
[ -z "$2" ] || chmod "$2" "$1"
"""

# $1: the folder. Owners and special permission bits of the archive are ignored.
UNPACK: Final = r"""mkdir -p -- "$1" && tar -xof - -C "$1" """

# $1: the path, then names in it. Packs a folder's content or those names of it, or a file. Files that grow or vanish
# meanwhile are no failure. (GNU tar's exit code for those is 1, BusyBox's is always 1.)
PACK: Final = f"""
[ -e "$1" ] || exit {NOT_FOUND}
if [ -d "$1" ]; then above=$1; shift; [ $# -gt 0 ] || set -- .
else [ -f "$1" ] || exit {NOT_A_FILE}; [ -r "$1" ] || exit {UNREADABLE}
  name=${{1##*/}}; above=${{1%"$name"}}; set -- "./$name"
fi
exec 3>&1
messages=$(LC_ALL=C tar -cf - -C "$above" "$@" 2>&1 >&3)
code=$?
[ $code = 0 ] && exit
printf '%s\\n' "$messages" | grep -v -e ': file changed as we read it$' -e ': File removed before we read it$' \\
  -e ': No such file or directory$' -e ': error exit delayed from previous errors$' >&2
[ $? = 1 ] && [ $code = 1 ] && exit
exit 1
"""


def run_command(command: Command, cwd: str, *, has_input: bool) -> list[str]:
    """Return the argv that runs a command to its end; the first input line is the end marker."""
    return ["/bin/sh", "-c", _RUN, "turnwise", cwd, "1" if has_input else "0", *_words(command)]


def spawn_command(command: Command, cwd: str, word: str) -> list[str]:
    """Return the argv that starts a long-running command."""
    return ["/bin/sh", "-c", _SPAWN, "turnwise", cwd, word, *_words(command)]


def script(text: str, *arguments: str) -> list[str]:
    """Return the argv of a script."""
    return ["/bin/sh", "-c", text, "turnwise", *arguments]


def _words(command: Command) -> Sequence[str]:
    return ["text", command] if isinstance(command, str) else ["words", *command]
