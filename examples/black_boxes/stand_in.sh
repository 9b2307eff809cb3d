#!/bin/sh
exec python3 "$(dirname "$0")/stand_in.py" "$@"
