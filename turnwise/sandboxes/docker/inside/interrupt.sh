# $1: the command's id. Like Ctrl-C, to its process group.
%look%
[ -z "$root" ] || { look "$root" && kill -INT "-$group"; }
