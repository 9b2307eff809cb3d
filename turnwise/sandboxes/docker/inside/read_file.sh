# $1: the path, $2: the maximum number of bytes.
[ -e "$1" ] || exit %NOT_FOUND%; [ -f "$1" ] || exit %NOT_A_FILE%; [ -r "$1" ] || exit %UNREADABLE%
head -c "$2" <"$1"
