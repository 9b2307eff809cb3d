"""Worker process of symbolic comparison. Imports nothing of this package, to start within a second."""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from typing import Any

_MEMORY = 4 * 2**30


def main() -> None:
    """Answer requests until the end of standard input."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (_MEMORY if hard_limit == resource.RLIM_INFINITY else min(_MEMORY, hard_limit), hard_limit)
    )
    logging.disable(logging.CRITICAL)
    from math_verify import parse

    # The grammar is compiled at first use; that CPU time must not count for an answer.
    parse("$x$", parsing_timeout=0)
    _write_verdict({"verdict": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        verdict = _compare(request["gold"], request["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_verdict(verdict)


def _compare(gold: list[str], answer: str) -> dict[str, Any]:
    from math_verify import parse, verify

    try:
        right = [(text, _parse_gold(parse, text)) for text in gold]
        unreadable = [text for text, parsed in right if not parsed]
        if unreadable:
            return {"verdict": "gold", "text": unreadable[0]}
        attempt = parse(answer, parsing_timeout=0)
        equal = any(verify(parsed, attempt, timeout_seconds=0) for _, parsed in right)
        return {"verdict": "equal" if equal else "different", "found": bool(attempt)}
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"verdict": "undecided", "text": type(error).__name__}


def _parse_gold(parse: Any, text: str) -> Any:
    """Parse a gold answer as written, else as bare LaTeX."""
    bare = text.strip()
    marked = any(mark in bare for mark in ("$", "\\boxed", "\\(", "\\["))
    return parse(bare if marked else f"${bare}$", parsing_timeout=0) or parse(bare, parsing_timeout=0)


def _write_verdict(verdict: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
