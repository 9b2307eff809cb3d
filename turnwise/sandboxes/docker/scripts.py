"""Shell scripts that run inside containers.

An image needs ``/bin/sh``, ``cat``, ``head``, ``tr``, ``grep``, ``mkdir``, ``chmod`` and ``tar``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnwise.sandboxes.core import Command

ID_VARIABLE: Final = "TURNWISE_EXEC"
"""Names, in the environment of the processes of a command, which command they belong to."""

# $1: how many minutes. The first process reaps what loses its parent, and ends with the container when its time is
# over. It is no plain `sleep`: that reaps nothing, and the dead would fill the limit of processes.
PID_1: Final = "trap 'exit 0' TERM; n=0; while [ $n -lt $1 ]; do sleep 60 & wait $!; n=$((n + 1)); done"

_CHOOSE: Final = r"""
if [ "$1" = text ]; then shift; if command -v bash >/dev/null 2>&1; then set -- bash -c "$@"; else set -- sh -c "$@"; fi
else shift; fi
"""

# $1: where, $2: whether there is input, then the command. The first line of the input is a word that only this shell
# knows; with it, both streams say that the command has ended. So the end is the command's own, and not that of
# whatever else holds its streams; the two `cat` hold them open for those, which a broken pipe would end. A command
# that ends the shells above it instead reports nothing, and counts as ended itself.
_RUN: Final = (
    r"""
IFS= read -r mark
if ! cd -- "$1" 2>/dev/null; then printf '%s:cwd\n' "$mark"; printf '%s:cwd\n' "$mark" >&2; exit 0; fi
input=$2; shift 2
"""
    + _CHOOSE
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

# $1: where, $2: a word that tells its own line from the command's; then the command, which takes this shell's place.
_SPAWN: Final = (
    r"""
if ! cd -- "$1" 2>/dev/null; then printf '%s:cwd\n' "$2"; exit 0; fi
word=$2; shift 2
"""
    + _CHOOSE
    + r"""
if ! command -v -- "$1" >/dev/null 2>&1; then printf '%s:program\n' "$word"; exit 0; fi
printf '%s:ok\n' "$word"
exec "$@" 2>&1
"""
)

# `look PID` sets state, parent, group and start (in ticks since the boot) of a process. A name may hold anything, line
# ends and brackets too, so what counts begins behind the last bracket. `root` is set to the process that the engine
# started for a command: it alone has no parent in here, which cannot be faked.
_LOOK: Final = (
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
for each in /proc/[0-9]*; do
  each=${each#/proc/}
  if look "$each" && [ "$parent" = 0 ] && [ "$each" != 1 ] && [ "$each" != $$ ] && claims "$each" "$id"; then
    root=$each since=$start
  fi
done
"""
).replace("ID_VARIABLE", ID_VARIABLE)

# $1: which command, $2: ticks since before it began, then other commands that have been running since. Ends what
# descends from it, and what has lost its parent and began after it: unless that says to be of one of the others.
# Stopped first, so that what multiplies does not while it is being ended.
KILL: Final = (
    _LOOK
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
  again=0 found= round=$((round + 1))
  for each in /proc/[0-9]*; do
    each=${each#/proc/}
    [ "$each" = 1 ] || [ "$each" = $$ ] || ! belongs "$each" || found="$found $each"
  done
  if [ -n "$found" ]; then again=1; kill -STOP $found 2>/dev/null; kill -KILL $found 2>/dev/null; fi
done
[ $again = 0 ] && echo ended
"""
)

# $1: which command. As Ctrl-C does: to its process group.
INTERRUPT: Final = _LOOK + r"""[ -z "$root" ] || { look "$root" && kill -INT "-$group"; }"""

NOT_FOUND: Final = 90
NOT_A_FILE: Final = 91
UNREADABLE: Final = 92

# $1: the path, $2: how many bytes at most.
READ_FILE: Final = f"""
[ -e "$1" ] || exit {NOT_FOUND}; [ -f "$1" ] || exit {NOT_A_FILE}; [ -r "$1" ] || exit {UNREADABLE}
head -c "$2" <"$1"
"""

# $1: the path, $2: its permissions or nothing. The folders above it are made.
WRITE_FILE: Final = f"""
case $1 in */*) mkdir -p -- "${{1%/*}}/" || exit 1;; esac
[ ! -e "$1" ] || [ -f "$1" ] || exit {NOT_A_FILE}
cat >"$1" || exit 1
[ -z "$2" ] || chmod "$2" "$1"
"""

# $1: where. Owners are not looked up, and no permissions beyond the usual are given.
UNPACK: Final = r"""mkdir -p -- "$1" && tar -xof - -C "$1" """

# $1: what, then what of it. The content of a folder, or those names of it; else the file alone. That something grew or
# went away meanwhile is not a failure: it is as it was at one moment. (GNU's tar ends with 1 for that alone, BusyBox's
# always.)
PACK: Final = f"""
[ -e "$1" ] || exit {NOT_FOUND}
if [ -d "$1" ]; then above=$1; shift; [ $# -gt 0 ] || set -- .
else [ -f "$1" ] || exit {NOT_A_FILE}; [ -r "$1" ] || exit {UNREADABLE}
  name=${{1##*/}}; above=${{1%"$name"}}; set -- "./$name"
fi
exec 3>&1
said=$(LC_ALL=C tar -cf - -C "$above" "$@" 2>&1 >&3)
code=$?
[ $code = 0 ] && exit
printf '%s\\n' "$said" | grep -v -e ': file changed as we read it$' -e ': File removed before we read it$' \\
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
