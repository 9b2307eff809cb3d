# $1: the command's id, $2: ticks since before it began, then the ids of concurrent commands. Kills its descendants, and
# orphans that began after it, except those that claim one of the other ids. All are stopped first, so that none forks
# while it is killed.
%look%
look $$
[ -n "$root" ] || since=$((start - $2 - 100))
shift 2
belongs() {
  look "$1" || return 1
  case $state in Z|X) [ "$threads" -gt 1 ] || return 1;; esac
  [ "$start" -ge "$since" ] || return 1
  at=$1
  while [ "$parent" != 0 ]; do
    if [ "$parent" = 1 ]; then
      [ "$start" -ge "$since" ] || return 1
      for other in $others; do claims "$at" "$other" && return 1; done
      return 0
    fi
    at=$parent
    look "$at" || { again=1; return 1; }
  done
  [ "$at" = "$root" ]
}
others=$*
round=0 again=1
while [ $again = 1 ] && [ $round -lt 200 ]; do
  again=0 alive= round=$((round + 1))
  for path in /proc/[0-9]*; do
    pid=${path#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] || ! belongs "$pid" || alive="$alive $pid"
  done
  if [ -n "$alive" ]; then again=1; kill -STOP $alive 2>/dev/null; kill -KILL $alive 2>/dev/null; fi
done
[ $again = 0 ] && echo ended
