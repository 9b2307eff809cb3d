# The command as arguments: a text is for bash, or for sh without one.
if [ "$1" = text ]; then shift; if command -v bash >/dev/null 2>&1; then set -- bash -c "$@"; else set -- sh -c "$@"; fi
else shift; fi
