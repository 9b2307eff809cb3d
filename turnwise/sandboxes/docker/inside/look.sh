# `look PID` sets state, parent, group, threads and start (in ticks since the boot) of a process. A process name may
# contain line ends and brackets, so the fields are read after the last bracket. `root` is set to the process that the
# engine started for a command: it alone has no parent in the container, which cannot be faked.
id=$1
look() {
  line=
  { while IFS= read -r part || [ -n "$part" ]; do line="$line$part "; done <"/proc/$1/stat"; } 2>/dev/null
  [ -n "$line" ] || return 1
  set -f; set -- ${line##*) }; set +f
  state=$1 parent=$2 group=$3 threads=${18} start=${20}
}
# The first thread may have ended before the others, and shows no environment then.
claims() { { cat "/proc/$1/task/"*/environ | tr '\0' '\n' | grep -qx "%ID_VARIABLE%=$2"; } 2>/dev/null; }
root=
for path in /proc/[0-9]*; do
  pid=${path#/proc/}
  if look "$pid" && [ "$parent" = 0 ] && [ "$pid" != 1 ] && [ "$pid" != $$ ] && claims "$pid" "$id"; then
    root=$pid since=$start
  fi
done
