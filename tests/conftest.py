"""Makes ``tests/support`` importable as ``support``, and settles what differs between the shells that start tests.

It also keeps garbage collections short: millions of objects are loaded with the tests, and none of them is garbage. Nor
is any looked for while they are loaded.
"""

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
gc.disable()

from support.envs import shipped, unshipped  # noqa: E402, F401
from support.parts import in_part  # noqa: E402
from support.processes.warm import WarmPopen, warm_process  # noqa: E402
from support.property_tests import examples  # noqa: E402
from turnwise.placement.local import LocalPlacement  # noqa: E402
from turnwise.rollout import producer  # noqa: E402

# Servers that tests start are forked from a process that has imported torch and transformers.
LocalPlacement.launcher = WarmPopen

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that. Tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As nohup does hangups.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine is not a failing test. Where CI is set, hypothesis has a profile of its own that is repeatable, too.
MOST = examples(settings().max_examples)
if settings.get_current_profile_name() == "ci":
    settings.register_profile("turnwise", settings(), max_examples=MOST)
else:
    settings.register_profile(
        "turnwise", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=MOST
    )
settings.load_profile("turnwise")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other runs of .ci/run take."""
    items[:], deselected = in_part(items)
    if deselected:
        config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish() -> None:
    """Begin when every test module is loaded."""
    if "support.trainer.lookup_run" in sys.modules:
        # It gets ready while the first tests run.
        warm_process()
    # Collections pass over all that is loaded, as in a server of ours once it has started, and are seldom.
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture
def python_s_own_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of the collections themselves: nothing is passed over when they begin."""
    # The last one has seen that objects are frozen.
    monkeypatch.setattr(producer, "_SETTLED", producer._SettledObjects())
    gc.unfreeze()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def settled_objects() -> None:
    """For tests of what collects garbage many times: what earlier tests left is passed over."""
    gc.collect()
    gc.freeze()
