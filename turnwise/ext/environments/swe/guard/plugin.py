"""A plugin of pytest that reports the status of each test through a channel that tests cannot forge."""

import builtins
import contextlib
import functools
import hashlib
import hmac
import importlib
import json
import operator
import os
import socket
import sys
import threading
import time
import types
from typing import Any

import pytest

_WATCHED = ("_pytest", "pytest", "pluggy", "unittest", "ast")
_ALWAYS = (
    *("pytest", "pluggy", "unittest.case", "_pytest.runner", "_pytest.python", "_pytest.outcomes", "_pytest.raises"),
    *(
        "_pytest.python_api",
        "_pytest.unittest",
        "_pytest.assertion",
        "_pytest.reports",
        "_pytest.nodes",
        "_pytest.mark",
    ),
)
"""Modules inspected before and after each test; the others with every eighth inspection, to save time."""
_PERIOD = 8
_HOOKS = (
    "pytest_pyfunc_call",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "pytest_runtest_logreport",
)
_SUSPECT = {
    "sys.settrace": "settrace",
    "sys.setprofile": "setprofile",
    "gc.get_objects": "get_objects",
    "gc.get_referrers": "get_referrers",
    "gc.get_referents": "get_referents",
    "sys._getframe": "_getframe",
}
_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
"""Attributes of suspicious access to frames; ``_SUSPECT`` maps audit events to the words that code writes for them."""
_INTERMEDIARIES = ("ctypes", "threading", "bdb", "pdb", "inspect")
"""Modules that do such things on behalf of others."""


def _functions() -> Any:
    """Return the namespaces whose functions (and their code) and classes may not change."""
    modules = {name: module for name, module in list(sys.modules.items()) if name.split(".")[0] in _WATCHED}
    classes: Any = {}
    namespaces: Any = [
        _Namespace("", sys.modules.get, {name: module for name, module in modules.items() if module is not None})
    ]
    for name, module in modules.items():
        members: Any = {}
        for key, value in list(vars(module).items()) if module is not None else ():
            if isinstance(value, types.FunctionType):
                members[key] = value
            elif isinstance(value, type) and str(value.__module__).split(".")[0] in _WATCHED:
                members[key] = value
                classes[id(value)] = value
        if members:
            namespaces.append(_Namespace(name, vars(module).get, members))
    for value in classes.values():
        parts = {part: inner for part, inner in list(vars(value).items()) if _function_of(inner) is not None}
        if parts:
            namespaces.append(_Namespace(value.__module__ + "." + value.__qualname__, vars(value).get, parts))
    return namespaces


def _function_of(value: Any) -> Any:
    """Return the function in a method of a class, or None."""
    inner = getattr(value, "__func__", value)
    return inner if isinstance(inner, types.FunctionType) else None


_is = operator.is_
_code = operator.attrgetter("__code__")


class _Namespace:
    """The functions and classes of one module or class. Inspecting all of them takes well below a millisecond."""

    def __init__(self, name: str, get: Any, values: Any) -> None:
        self.name, self._get, self._values = name, get, values
        self._snapshot()

    def _snapshot(self) -> None:
        functions = [function for function in map(_function_of, self._values.values()) if function is not None]
        self._known = (tuple(self._values), tuple(self._values.values()), functions, list(map(_code, functions)))

    def values(self) -> Any:
        return self._values.values()

    def changed(self, replaceable: Any) -> Any:
        """Return the names of replaced functions; those that pytest itself replaces are recorded as expected."""
        keys, values, functions, codes = self._known
        if all(map(_is, map(self._get, keys), values)) and all(map(_is, map(_code, functions), codes)):
            return []
        code = {id(function): code for function, code in zip(functions, codes)}  # noqa: B905 - older Pythons
        names = []
        for key, value in list(self._values.items()):
            current, plain = self._get(key), _function_of(value)
            if id(current) in replaceable:
                self._values[key] = current
            elif current is not value or (plain is not None and plain.__code__ is not code[id(plain)]):
                names.append(".".join(part for part in (self.name, key) if part))
        if not names:
            self._snapshot()
        return names


def _keeper(path: str) -> Any:
    """Start the process that holds the report and, alone, the key; return the connection to it."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child:
        theirs.close()
        os.waitpid(child, 0)
        return ours
    try:
        # Detached: without a parent, and in no process group that tests may end.
        os.setsid()
        if not os.fork():
            ours.close()
            _run_keeper(path, theirs)
    finally:
        os._exit(0)


def _run_keeper(path: str, connection: Any) -> None:
    """Read and remove the judge's settings of this run, record messages, and write the report at the end."""
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
    os.unlink(path)
    with contextlib.suppress(ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: other processes cannot read its memory
    key, word = bytes.fromhex(settings.pop("key")), os.urandom(16).hex()
    connection.sendall(json.dumps(dict(settings, word=word)).encode() + b"\n")
    statuses: Any = {}
    facts: Any = {"line": {}, "seconds": {}}
    wrong: Any = []
    with connection.makefile("rb") as lines:
        for line in lines:
            sender, _, message = line.decode("utf-8", "replace").partition(" ")
            kind, name, value = json.loads(message) if sender == word else ("wrong", "a message of another", None)
            if kind == "wrong" and name not in wrong:
                wrong.append(name)
            elif kind == "status" and statuses.get(name) not in ("FAILED", "ERROR"):
                statuses[name] = value
            elif kind in facts:
                facts[kind].setdefault(name, value)
            elif kind == "end":
                text = json.dumps(dict(facts, tests=statuses, wrong=wrong[:20], exit=value))
                code = hmac.new(key, text.encode(), digestmod=hashlib.sha256).hexdigest()
                with open(settings["report"], "w", encoding="utf-8") as file:
                    json.dump({"text": text, "code": code}, file)
                connection.sendall(b"kept")
                return


class _Guard:
    """Reports the outcome of each test; created once, before the repository is imported."""

    def __init__(self, keeper: Any) -> None:
        with keeper.makefile("rb") as file:
            settings = json.loads(file.readline().decode())
        self._keeper = keeper
        self._word = settings["word"].encode()
        self._files = settings["files"]
        self._changed = {os.path.realpath(path): words for path, words in settings["changed"].items()}
        self._functions: Any = []
        self._always: Any = []
        self._inspections = 0
        self._builtins: Any = {}
        self._legacy: Any = set()
        self._hooks: Any = {}
        self._passed: Any = {}
        self._pid = os.getpid()
        self._inspecting: Any = set()
        self._distributed = False
        self._codes: Any = {}
        self._may_fail: Any = set()

    def _tell(self, kind: str, name: str, value: Any = None) -> None:
        if os.getpid() == self._pid:
            self._keeper.sendall(self._word + b" " + json.dumps([kind, name, value]).encode() + b"\n")

    def _complain(self, what: str) -> None:
        self._tell("wrong", what)

    def audit(self, event: str, arguments: Any) -> None:
        """Handle an audit event: complain if the solution traces, or searches objects or memory."""
        word = _SUSPECT.get(event)
        if word is None and event.startswith("ctypes."):
            word = "ctypes"
        elif event == "open" and isinstance(arguments[0], str) and arguments[0].startswith("/proc/"):
            word = "/mem" if arguments[0].endswith("/mem") else None
        elif event == "object.__getattr__" and arguments[1] in _FRAMES:
            word = arguments[1]
        thread = threading.get_ident()
        if word is None or thread in self._inspecting:
            return
        self._inspecting.add(thread)
        try:
            path = _requesting_file(sys._getframe(1))
            if path in self._changed and word not in self._changed[path]:
                self._complain("used by the solution: " + word)
        finally:
            self._inspecting.discard(thread)

    def _inspect(self, everything: bool) -> None:
        self._inspections += 1
        for namespace in self._functions if everything or self._inspections % _PERIOD == 0 else self._always:
            for name in namespace.changed(self._legacy):
                self._complain("replaced: " + name)
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
        """Record the functions, classes and builtins that may not change."""
        comparisons = importlib.import_module(__name__.replace("guard_", "comparisons_"))
        self._functions = _functions()
        self._always = [
            namespace for namespace in self._functions if namespace.name.startswith(_ALWAYS) or not namespace.name
        ]
        self._builtins = dict(vars(builtins))
        for path, words in self._changed.items():
            if "__eq__" not in words and comparisons.equal_to_all(_text(path)):
                self._complain("equal to everything: a class of " + os.path.basename(path))
        # One part of pytest replaces methods of others while it starts.
        self._legacy = {
            id(member) for namespace in self._functions for member in namespace.values() if _from_legacy(member)
        }

    def _impls(self, config: Any, name: str) -> Any:
        caller = getattr(config.hook, name)
        return [(impl, impl.function) for impl in caller.get_hookimpls()] if hasattr(caller, "get_hookimpls") else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: Any) -> None:
        self._distributed = session.config.pluginmanager.hasplugin("dsession")
        self._hooks = {name: self._impls(session.config, name) for name in _HOOKS}

    def pytest_collectreport(self, report: Any) -> None:
        self._inspect(everything=True)
        if report.failed:
            self._tell("status", report.nodeid, "ERROR")

    @pytest.hookimpl(tryfirst=True)
    def pytest_itemcollected(self, item: Any) -> None:
        self._codes[item.nodeid] = list(_code_of(getattr(item, "function", None)))
        # Any module that a test file imports can write to its names.
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
        if call.excinfo is not None and call.when == "call":
            self._tell("line", item.nodeid, _line_of(item, call.excinfo.tb))
        if call.excinfo is None or item.nodeid in self._may_fail:
            return
        if isinstance(call.excinfo.value, pytest.xfail.Exception):
            allowed = _is_of_tests(_raised_in(call.excinfo.tb))
        else:
            allowed = _marks_itself(item)
        if allowed:
            self._may_fail.add(item.nodeid)

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        self._inspect(everything=False)
        for function, code in self._codes.get(item.nodeid, ()):
            if function.__code__ is not code:
                self._complain("replaced: the code of " + item.nodeid)
        if "runtest" in vars(item):
            self._complain("replaced: runtest of " + item.nodeid)
        hooks = {id(impl) for impl, _ in self._hooks["pytest_pyfunc_call"]}
        for impl, _ in self._impls(item.config, "pytest_pyfunc_call"):
            if id(impl) not in hooks and not str(getattr(impl.plugin, "__file__", "")).endswith("conftest.py"):
                self._complain("added: a hook of pytest")
        began, worked = time.monotonic(), time.process_time()
        outcome = yield
        took, worked = time.monotonic() - began, time.process_time() - worked
        self._inspect(everything=False)
        self._passed[item.nodeid] = outcome.excinfo is None and not getattr(item, "_excinfo", None)
        # Processor time of a quick test, so that a busy machine does not count.
        self._tell("seconds", item.nodeid, took if took > 1.0 else worked)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        status = None
        if report.failed:
            status = "FAILED" if report.when == "call" else "ERROR"
        elif report.skipped:
            expected = self._distributed or report.nodeid in self._may_fail
            status = ("XFAIL" if expected else "FAILED") if hasattr(report, "wasxfail") else "SKIPPED"
        elif report.when == "call" and not hasattr(report, "wasxfail"):
            seen = self._distributed or self._passed.get(report.nodeid, False)
            status = "PASSED" if seen else "FAILED"
        if status is not None:
            self._tell("status", report.nodeid, status)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: Any) -> None:
        if os.getpid() != self._pid:
            return
        self._inspect(everything=True)
        self._tell("end", "", int(exitstatus))
        with contextlib.suppress(OSError):
            self._keeper.shutdown(socket.SHUT_WR)
            self._keeper.recv(4)


@functools.lru_cache(maxsize=4096)
def _real(path: str) -> str:
    return str(os.path.realpath(path))


def _requesting_file(frame: Any) -> str:
    """Return the file of the code behind a request, past intermediaries and generated code."""
    while frame is not None:
        path = frame.f_code.co_filename
        name = str(frame.f_globals.get("__name__")).split(".")[0]
        if not path.startswith("<") and name not in _INTERMEDIARIES:
            return _real(path)
        frame = frame.f_back
    return ""


def _from_legacy(value: Any) -> bool:
    return getattr(value, "__module__", "") == "_pytest.legacypath" or (
        isinstance(value, types.ModuleType) and value.__name__ == "_pytest.legacypath"
    )


def _code_of(function: Any) -> Any:
    """Yield a function and those that it wraps, each with its code."""
    seen: Any = set()
    while isinstance(function, types.FunctionType) and id(function) not in seen:
        seen.add(id(function))
        yield function, function.__code__
        function = vars(function).get("__wrapped__")


def _marked(item: Any) -> bool:
    """Return whether a test is marked as an expected failure."""
    if any(True for _ in item.iter_markers("xfail")):
        return True
    owners = getattr(getattr(item, "cls", None), "__mro__", ())
    owners_of_marks = [
        getattr(item, "function", None),
        *(owner for owner in owners if owner.__module__ != "unittest.case"),
    ]
    return any("__unittest_expecting_failure__" in getattr(owner, "__dict__", ()) for owner in owners_of_marks)


def _marks_itself(item: Any) -> bool:
    """Return whether a test, or a fixture of it, adds marks to it while it runs."""
    named = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    functions = [getattr(item, "function", None), *(fixture.func for several in named.values() for fixture in several)]
    names = {name for function in functions for _, code in _code_of(function) for name in code.co_names}
    return bool(names & {"applymarker", "add_marker"})


def _raised_in(trace: Any) -> str:
    """Return the file of the code that called pytest."""
    internals, caller = os.path.dirname(sys.modules["_pytest"].__file__ or ""), ""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        caller, trace = (caller if path.startswith(internals) else path), trace.tb_next
    return caller


def _line_of(item: Any, trace: Any) -> int:
    """Return the line of a test's own body that failed, or 0."""
    codes = [code for _, code in _code_of(getattr(item, "function", None))]
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return int(trace.tb_lineno)
        trace = trace.tb_next
    return 0


def _is_of_tests(path: str) -> bool:
    """Return whether a file belongs to the tests, which are restored before they run."""
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


def _start() -> Any:
    path = os.environ.pop("TURNWISE_REPORT", "")
    return _Guard(_keeper(path)) if os.path.exists(path) else None


# At import: later modules must not find the key.
_GUARD = _start()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Start watching after installed plugins, some of which change pytest, and before any conftest.py."""
    if _GUARD is not None:
        _GUARD.watch()
        if "addaudithook" in vars(sys):  # new in Python 3.8
            sys.addaudithook(_GUARD.audit)


def pytest_configure(config: Any) -> None:
    """Register the guard; a process that the judge did not start has none."""
    if _GUARD is not None:
        config.pluginmanager.register(_GUARD, "turnwise-guard")
        # Code of the repository must not find it by its name.
        sys.modules.pop(__name__, None)
