# $1: the path, then names in it. Packs a folder's content or those names of it, or a file. Files that grow or vanish
# meanwhile are no failure. (GNU tar's exit code for those is 1, BusyBox's is always 1.)
[ -e "$1" ] || exit %NOT_FOUND%
if [ -d "$1" ]; then above=$1; shift; [ $# -gt 0 ] || set -- .
else [ -f "$1" ] || exit %NOT_A_FILE%; [ -r "$1" ] || exit %UNREADABLE%
  name=${1##*/}; above=${1%"$name"}; set -- "./$name"
fi
exec 3>&1
messages=$(LC_ALL=C tar -cf - -C "$above" "$@" 2>&1 >&3)
code=$?
[ $code = 0 ] && exit
printf '%s\n' "$messages" | grep -v -e ': file changed as we read it$' -e ': File removed before we read it$' \
  -e ': No such file or directory$' -e ': error exit delayed from previous errors$' >&2
[ $? = 1 ] && [ $code = 1 ] && exit
exit 1
