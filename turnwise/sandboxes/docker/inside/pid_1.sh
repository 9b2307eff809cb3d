# $1: minutes. The first process reaps orphans, and ends the container when its time is over. A plain `sleep` would
# reap nothing, and zombies would fill the limit of processes.
trap 'exit 0' TERM; n=0; while [ $n -lt $1 ]; do sleep 60 & wait $!; n=$((n + 1)); done
