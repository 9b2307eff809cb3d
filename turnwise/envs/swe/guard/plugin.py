"""A plugin of pytest that reports what became of each test, past the log that tests can write to.

Owns: the report: a status per test, and a message code over it, keyed with what was read, and removed, before anything
of the repository was imported. A test has passed only if pytest says so and this plugin saw it run without an
exception, and if nothing of pytest, pluggy, unittest, ast and the builtins was replaced meanwhile, and no file of tests
was changed. It has failed as expected only if its own file or a ``conftest.py`` says that it may. Refuses: the
package: it is copied alone to where the tests run, and runs on Python 3.6 and newer.
"""

import builtins
import functools
import hashlib
import hmac
import json
import os
import sys
import types
from typing import Any

import pytest

_WATCHED = ("_pytest", "pytest", "pluggy", "unittest", "ast")
_HOOKS = (
    "pytest_pyfunc_call",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "pytest_runtest_logreport",
)


def _settings() -> Any:
    """Read and remove what the judge left for this run, so that nothing that is imported later finds it."""
    path = os.environ.pop("TURNWISE_REPORT", "")
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        os.unlink(path)
    except OSError:
        return None
    return found


def _functions() -> Any:
    """Return what may not change: functions and classes of the watched modules, and the functions' code."""
    found: Any = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] not in _WATCHED:
            continue
        found[name, "", ""] = (module, None)
        for key, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                found[name, "", key] = (value, value.__code__)
            elif isinstance(value, type) and str(value.__module__).split(".")[0] in _WATCHED:
                found[name, "", key] = (value, None)
                for part, inner in list(vars(value).items()):
                    plain = getattr(inner, "__func__", inner)
                    if isinstance(plain, types.FunctionType):
                        found[name, key, part] = (inner, plain.__code__)
    return found


def _held(name: str, owner: str, key: str) -> Any:
    module = sys.modules.get(name)
    if not key:
        return module
    place = vars(module) if module is not None else {}
    if owner:
        place = vars(place[owner]) if isinstance(place.get(owner), type) else {}
    return place.get(key)


class _Guard:
    """Keeps what it saw of each test; made once, before the repository is imported."""

    def __init__(self, settings: Any) -> None:
        self._sign = functools.partial(hmac.new, bytes.fromhex(settings["key"]), digestmod=hashlib.sha256)
        self._target = settings["report"]
        self._files = settings["files"]
        self._functions: Any = {}
        self._builtins: Any = {}
        self._own: Any = set()
        self._hooks: Any = {}
        self._seen: Any = {}
        self._statuses: Any = {}
        self._wrong: Any = []
        self._pid = os.getpid()
        self._distributed = False
        self._codes: Any = {}
        self._may_fail: Any = set()

    def _complain(self, what: str) -> None:
        if what not in self._wrong:
            self._wrong.append(what)

    def _look(self, everything: bool) -> None:
        for (name, owner, key), (value, code) in self._functions.items():
            held = _held(name, owner, key)
            plain = getattr(held, "__func__", held)
            if id(held) in self._own:
                continue
            if held is not value or (code is not None and plain.__code__ is not code):
                self._complain("replaced: " + ".".join(part for part in (name, owner, key) if part))
        for impls in self._hooks.values():
            for impl, function in impls:
                if impl.function is not function:
                    self._complain("replaced: a hook of pytest")
        if everything:
            for name, value in self._builtins.items():
                if name != "_" and vars(builtins).get(name, self) is not value:
                    self._complain("replaced: builtins." + name)
            for path, digest in self._files.items():
                if _digest(path) != digest:
                    self._complain("changed: " + path)

    def watch(self) -> None:
        """Take what is there as what has to stay."""
        self._functions = _functions()
        self._builtins = dict(vars(builtins))
        # One part of pytest replaces methods of others while it starts.
        self._own = {id(value) for (name, _, _), (value, _) in self._functions.items() if name == "_pytest.legacypath"}

    def _impls(self, config: Any, name: str) -> Any:
        caller = getattr(config.hook, name)
        return [(impl, impl.function) for impl in caller.get_hookimpls()] if hasattr(caller, "get_hookimpls") else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: Any) -> None:
        self._distributed = session.config.pluginmanager.hasplugin("dsession")
        self._hooks = {name: self._impls(session.config, name) for name in _HOOKS}

    def pytest_collectreport(self, report: Any) -> None:
        self._look(everything=True)
        if report.failed:
            self._statuses.setdefault(report.nodeid, "ERROR")

    @pytest.hookimpl(tryfirst=True)
    def pytest_itemcollected(self, item: Any) -> None:
        self._codes[item.nodeid] = list(_code_of(getattr(item, "function", None)))
        # Whoever is imported by a file of tests can write to its names.
        injected = hasattr(getattr(item, "module", None), "pytestmark") and "pytestmark" not in _text(_file_of(item))
        if _marked(item) and not injected:
            self._may_fail.add(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: Any) -> None:
        late = [item.nodeid for item in session.items if item.nodeid not in self._may_fail and _marked(item)]
        plugins = session.config.pluginmanager.get_plugins() if late else ()
        files = [str(getattr(plugin, "__file__", None) or "") for plugin in plugins]
        if any("xfail" in _text(path) for path in files if os.path.basename(path) == "conftest.py"):
            self._may_fail.update(late)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None or item.nodeid in self._may_fail:
            return
        if isinstance(call.excinfo.value, pytest.xfail.Exception):
            said = _is_of_tests(_raised_in(call.excinfo.tb))
        else:
            said = _marks_itself(item)
        if said:
            self._may_fail.add(item.nodeid)

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        self._look(everything=False)
        for function, code in self._codes.get(item.nodeid, ()):
            if function.__code__ is not code:
                self._complain("replaced: the code of " + item.nodeid)
        if "runtest" in vars(item):
            self._complain("replaced: runtest of " + item.nodeid)
        known = {id(impl) for impl, _ in self._hooks["pytest_pyfunc_call"]}
        for impl, _ in self._impls(item.config, "pytest_pyfunc_call"):
            if id(impl) not in known and not str(getattr(impl.plugin, "__file__", "")).endswith("conftest.py"):
                self._complain("added: a hook of pytest")
        outcome = yield
        self._look(everything=False)
        self._seen[item.nodeid] = outcome.excinfo is None and not getattr(item, "_excinfo", None)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        status = None
        if report.failed:
            status = "FAILED" if report.when == "call" else "ERROR"
        elif report.skipped:
            expected = self._distributed or report.nodeid in self._may_fail
            status = ("XFAIL" if expected else "FAILED") if hasattr(report, "wasxfail") else "SKIPPED"
        elif report.when == "call" and not hasattr(report, "wasxfail"):
            seen = self._distributed or self._seen.get(report.nodeid, False)
            status = "PASSED" if seen else "FAILED"
        held = self._statuses.get(report.nodeid)
        if status is not None and held not in ("FAILED", "ERROR"):
            self._statuses[report.nodeid] = status

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._look(everything=True)
        body = {"tests": self._statuses, "wrong": self._wrong[:20], "exit": int(exitstatus)}
        text = json.dumps(body)
        with open(self._target, "w", encoding="utf-8") as file:
            json.dump({"text": text, "code": self._sign(text.encode()).hexdigest()}, file)


def _code_of(function: Any) -> Any:
    """Yield a function and those that it wraps, each with its code."""
    seen: Any = set()
    while isinstance(function, types.FunctionType) and id(function) not in seen:
        seen.add(id(function))
        yield function, function.__code__
        function = vars(function).get("__wrapped__")


def _marked(item: Any) -> bool:
    """Whether a test is marked as one that fails."""
    if any(True for _ in item.iter_markers("xfail")):
        return True
    owners = getattr(getattr(item, "cls", None), "__mro__", ())
    places = [getattr(item, "function", None), *(each for each in owners if each.__module__ != "unittest.case")]
    return any("__unittest_expecting_failure__" in getattr(place, "__dict__", ()) for place in places)


def _marks_itself(item: Any) -> bool:
    """Whether a test, or a fixture of it, puts marks on it while it runs."""
    named = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    functions = [getattr(item, "function", None), *(each.func for several in named.values() for each in several)]
    names = {name for function in functions for _, code in _code_of(function) for name in code.co_names}
    return bool(names & {"applymarker", "add_marker"})


def _raised_in(trace: Any) -> str:
    """Return the file of the code that called pytest."""
    inside, found = os.path.dirname(sys.modules["_pytest"].__file__ or ""), ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        found, trace = (found if path.startswith(inside) else path), trace.tb_next
    return found


def _is_of_tests(path: str) -> bool:
    """Whether a file is one that no solution brings along: those are put back before the tests run."""
    parts = os.path.relpath(path).lower().split(os.sep)
    name = parts[-1]
    if name.startswith("test_") or name.endswith("_test.py") or name in ("conftest.py", "tests.py"):
        return True
    return any(part in ("test", "tests", "testing") for part in parts)


def _file_of(item: Any) -> str:
    return str(getattr(getattr(item, "module", None), "__file__", None) or "")


@functools.lru_cache(maxsize=256)
def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _begin() -> Any:
    settings = _settings()
    return None if settings is None else _Guard(settings)


# Now: what is imported later does not find the key.
_GUARD = _begin()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Begin to watch, after installed plugins were loaded, some of which change pytest, and before any conftest.py."""
    if _GUARD is not None:
        _GUARD.watch()


def pytest_configure(config: Any) -> None:
    """Begin to report; a process that the judge did not start has nothing to report."""
    if _GUARD is not None:
        config.pluginmanager.register(_GUARD, "turnwise-guard")
