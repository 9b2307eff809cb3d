#!/bin/bash
# A test says what holds; the reward is 1 where all of it does. Nothing in the workdir is imported or configures pytest.
here="${TEST_DIR:-/tests}" logs="${VERIFIER_DIR:-/logs/verifier}"
mkdir -p "$logs"
if PYTHONSAFEPATH=1 python3 -m pytest -c /dev/null -p no:cacheprovider --rootdir "$here" -rA "$here/test_outputs.py"; then
  echo 1 > "$logs/reward.txt"
else
  echo 0 > "$logs/reward.txt"
fi
