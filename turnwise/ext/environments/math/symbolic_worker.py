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
        equal = equal and _is_consistent(attempt, [parsed[0] for _, parsed in right], verify)
        return {"verdict": "equal" if equal else "different", "found": bool(attempt)}
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"verdict": "undecided", "text": type(error).__name__}


def _is_consistent(attempt: Any, gold: list[Any], verify: Any) -> bool:
    """Whether an answer is no chain of equations of which one does not hold: of ``1 = 2`` the last side would count."""
    from sympy import And, Eq, Number
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    equations = attempt[0].args if isinstance(attempt[0], And) else attempt[:1]
    if any(isinstance(right, Relational) for right in gold) or not all(isinstance(part, Eq) for part in equations):
        # Of an equation that cannot be parsed, the last number would count.
        return not (isinstance(attempt[0], Number) and "=" in str(attempt[-1]))
    *sides, last = equations[0].lhs, *(equation.rhs for equation in equations)
    defined = [side.free_symbols - last.free_symbols or side.atoms(AppliedUndef) for side in sides]
    return all(new or verify([side], [last], timeout_seconds=0) for new, side in zip(defined, sides, strict=True))


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
