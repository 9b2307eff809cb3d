"""Makes ``tests/support`` importable as ``support``, and settles what differs between the shells that start tests."""

import signal
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that. Tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is not a failing test. Where CI is set, hypothesis has a profile of its own that is repeatable, too.
if settings.get_current_profile_name() != "ci":
    settings.register_profile("turnwise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("turnwise")
