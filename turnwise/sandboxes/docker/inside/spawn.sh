# $1: the folder, $2: a marker that distinguishes this shell's line from the command's output; then the command, which
# replaces this shell.
if ! cd -- "$1" 2>/dev/null; then printf '%s:cwd\n' "$2"; exit 0; fi
word=$2; shift 2
%words%
if ! command -v -- "$1" >/dev/null 2>&1; then printf '%s:program\n' "$word"; exit 0; fi
printf '%s:ok\n' "$word"
exec "$@" 2>&1
