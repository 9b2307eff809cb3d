# $1: the folder, then the command, which replaces this shell. The first line of the input is a marker that distinguishes
# this shell's lines from the command's output: one for each line of input before the line `go`. An engine may hold the
# first output of a command back until there is more.
IFS= read -r word
if ! cd -- "$1" 2>/dev/null; then printf '%s:cwd\n' "$word"; exit 0; fi
shift
%words%
if ! command -v -- "$1" >/dev/null 2>&1; then printf '%s:program\n' "$word"; exit 0; fi
printf '%s:ok\n' "$word"
while IFS= read -r line && [ "$line" != go ]; do printf '%s:ok\n' "$word"; done
exec "$@" 2>&1
