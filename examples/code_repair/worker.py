"""The worker inside the sandbox: it reads a program and the inputs of its tests, runs them, and writes the outputs.

A line of JSON comes in, ``{"file": text, "inputs": [[1, 2], ...]}``, and one goes out: a list with what ``f`` returned
for each of them, as text, or the name of what it raised. Expected values never come in here: whatever a program does to
this process, it cannot make it say what it does not know.
"""

import json
import os
import signal
import sys

SECONDS = 2.0
LONGEST = 40


def outcomes(file, inputs):
    scope = {}
    try:
        exec(compile(file, "program.py", "exec"), scope)
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is what came out of it
        return [type(error).__name__] * len(inputs)
    results = []
    for arguments in inputs:
        try:
            results.append(repr(scope["f"](*arguments))[:LONGEST])
        except BaseException as error:  # noqa: BLE001 - the same
            results.append(type(error).__name__)
    return results


def too_long(*_):
    raise TimeoutError


# What a program prints goes nowhere: this line of answers is the worker's alone.
answers = os.fdopen(os.dup(1), "w")
silence = os.open(os.devnull, os.O_RDWR)
os.dup2(silence, 1)
os.dup2(silence, 2)
signal.signal(signal.SIGALRM, too_long)
for line in sys.stdin:
    work = json.loads(line)
    with open("program.py", "w") as file:
        file.write(work["file"])
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        results = outcomes(work["file"], work["inputs"])
    except BaseException as error:  # noqa: BLE001 - its time ran out just after it was done
        results = [type(error).__name__] * len(work["inputs"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(results), file=answers, flush=True)
