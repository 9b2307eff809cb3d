# $1: the path, $2: its permissions or empty. Parent folders are created.
case $1 in */*) mkdir -p -- "${1%/*}/" || exit 1;; esac
[ ! -e "$1" ] || [ -f "$1" ] || exit %NOT_A_FILE%
cat >"$1" || exit 1
[ -z "$2" ] || chmod "$2" "$1"
