# $1: the folder, $2: whether there is input, then the command. The first line of the input is a marker that only this
# shell knows; with it, both streams report that the command has ended. The reported end is thus the command's, not that
# of background processes that hold its streams; the two `cat` keep the streams open for those, which a broken pipe
# would end. A command that kills the shells above it reports nothing, and counts as ended.
IFS= read -r mark
if ! cd -- "$1" 2>/dev/null; then printf '%s:cwd\n' "$mark"; printf '%s:cwd\n' "$mark" >&2; exit 0; fi
input=$2; shift 2
%words%
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
