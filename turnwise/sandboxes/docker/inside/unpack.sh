# $1: the folder. Owners and special permission bits of the archive are ignored.
mkdir -p -- "$1" && tar -xof - -C "$1"
