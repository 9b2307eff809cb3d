"""Prints, as JSON, what must not change by accident, or compares two such dumps.

Usage:
    public_surface.py [--runs DIR] > dump.json
    public_surface.py --diff OLD.json NEW.json

A dump holds public and documented names with their signatures, keys of configurations, commands, names of metrics,
names in registries, routes, environment variables, and names of files. With ``--runs`` it trains and evaluates a small
model in DIR (a minute) and adds the files of these runs with the keys of what they hold. Modules are no part of a name:
where names stand is written beside them, under ``places``, and not compared.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "turnwise"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# Registries, each by names that it must hold: a registry is found whatever it is called and wherever it stands.
REGISTRIES = {
    "advantages": ("grpo", "rloo"),
    "critic advantages": ("gae",),
    "agents": ("react", "single_turn"),
    "agent programs": ("codex", "opencode"),
    "placeholders of agent programs": ("base_url", "prompt_file"),
    "chat formats": ("hermes", "glm"),
    "engines": ("torch",),
    "environments": ("lookup", "calculator"),
    "hooks": ("on_train_begin", "on_step_end"),
    "kl estimators": ("k1", "k3"),
    "loggers": ("tensorboard", "wandb"),
    "losses": ("cispo", "gspo"),
    "loops": ("sync", "separate_async"),
    "replay strategies": ("fifo", "bounded"),
    "sandbox backends": ("local", "docker"),
    "sandbox checks": ("exec: streams", "cancellation"),
    "tools": ("shell", "python"),
    "warnings": ("entropy", "dead_groups"),
    "wrappers": ("time_limit", "turn_limit"),
    "formats of test logs": ("pytest", "cargo"),
    "errors that runners report": ("TurnwiseError", "ToolError"),
}
ROOTS = (
    "TrainConfig", "EvalConfig", "SFTConfig", "DPOConfig", "RewardModelConfig", "GatewayConfig", "InferenceConfig",
    "RewardServerConfig",
)  # fmt: skip
TASKS = "turnwise.envs.basic.lookup:tasks?n=3&split=test"
METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"}
FILE_NAME = re.compile(r"[\w.{}*-]*\.(jsonl|json|safetensors|ya?ml|pt|html|jinja|lock|toml|log|txt|sock)")
ROUTE = re.compile(r"/?(v1|s|inference|sessions|runners|chat|responses|messages|models|classify|health)(/[\w{}]+)*")
NOT_IMPORTED = re.compile(r"\.(inside|boot|programs|guard|vllm_side|shipped|__main__)(\.|$)")

Places = dict[str, list[str]]


# The tree, read and imported.


def sources() -> dict[str, ast.Module]:
    """Return the syntax trees of the package's files by their modules."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if "shipped" not in file.parts]
    dotted = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    return {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in dotted.items()}


def imported(trees: Mapping[str, ast.Module], places: Places) -> dict[str, Any]:
    """Import modules; what cannot be imported here (an optional dependency is missing) is noted."""
    found = {}
    for name, tree in trees.items():
        # A program that is sent to a sandbox as text begins without being asked.
        program = any(isinstance(node, ast.Expr) and ast.unparse(node) == "main()" for node in tree.body)
        if NOT_IMPORTED.search(name) or program:
            continue
        try:
            found[name] = importlib.import_module(name)
        except (ImportError, SystemExit) as error:
            places.setdefault("not imported", []).append(f"{name}: {error}")
    return found


def plain(text: str) -> str:
    """Return a text without modules and addresses in memory."""
    text = re.sub(r"\b(?:turnwise|typing|collections\.abc|pathlib|builtins|types|enum)(?:\.\w+)*[.:](?=\w)", "", text)
    text = re.sub(r"func=<function \S+>", "func", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


# Names.


def signature(function: Any) -> str:
    """Return the signature of a function."""
    try:
        return plain(str(inspect.signature(function)))
    except (TypeError, ValueError):
        return "(?)"


def members(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the public members of a class, inherited ones included, with what they are."""
    own = {name for each in cls.__mro__ if each.__module__.startswith("turnwise") for name in vars(each)}
    for name in sorted(own):
        if name.startswith("_") and name != "__init__":
            continue
        found = inspect.getattr_static(cls, name)
        if isinstance(found, (staticmethod, classmethod)):
            yield name, f"{type(found).__name__}{signature(found.__func__)}"
        elif isinstance(found, property):
            yield name, f"property -> {plain(str(((found.fget and found.fget.__annotations__) or {}).get('return')))}"
        elif inspect.isfunction(found):
            yield name, f"{'async ' if inspect.iscoroutinefunction(found) else ''}{signature(found)}"
    for name, kind in sorted(annotations(cls).items()):
        if not name.startswith("_") and name not in own:
            yield name, plain(str(kind))


def annotations(cls: type) -> dict[str, Any]:
    """Return what a class and those above it annotate."""
    inherited = [each for each in reversed(cls.__mro__) if each.__module__.startswith("turnwise")]
    return {name: kind for each in inherited for name, kind in vars(each).get("__annotations__", {}).items()}


def fields(cls: type) -> dict[str, str]:
    """Return the fields of a dataclass with types and defaults."""
    found = {}
    for each in dataclasses.fields(cls):
        default = "" if each.default is dataclasses.MISSING else f" = {plain(repr(each.default))}"
        made = "" if each.default_factory is dataclasses.MISSING else " = made"
        found[each.name] = f"{plain(str(each.type))}{default or made}"
    return found


def described(value: Any) -> Any:
    """Return what a public name is, without where it stands."""
    from pydantic import BaseModel

    if isinstance(value, type) and issubclass(value, enum.Enum):
        return {"enum": {name: each.value for name, each in value.__members__.items()}}
    if isinstance(value, type) and issubclass(value, BaseModel):
        return {"section": sorted(value.model_fields), "members": dict(section_members(value))}
    if isinstance(value, type):
        bases = [each.__name__ for each in value.__bases__ if each is not object]
        about: dict[str, Any] = {"class": bases, "members": dict(members(value))}
        if dataclasses.is_dataclass(value):
            about["fields"] = fields(value)
        return about
    if inspect.isroutine(value):
        return f"{'async ' if inspect.iscoroutinefunction(value) else ''}def {signature(value)}"
    if isinstance(value, (str, int, float)):
        return plain(repr(value))
    return type(value).__name__


def section_members(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the methods of a configuration's section that are its own."""
    from pydantic import BaseModel

    return ((name, text) for name, text in members(cls) if name not in vars(BaseModel) and "(" in text)


def public_names(modules: Mapping[str, Any], places: Places) -> Iterator[tuple[str, Any]]:
    """Yield the names in the ``__all__`` of the package and its sub-packages."""
    for name, module in modules.items():
        for each in vars(module).get("__all__", ()) if hasattr(module, "__path__") else ():
            places.setdefault(f"public {each}", []).append(name)
            yield each, getattr(module, each)


def by_name(values: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return what names stand for; things of one name stand beside each other."""
    found: dict[str, list[Any]] = {}
    for name, value in values:
        about, known = described(value), found.setdefault(name, [])
        if about not in known:
            known.append(about)
    return {
        name: known[0] if len(known) == 1 else dict(enumerate(sorted(known, key=json.dumps), 1))
        for name, known in sorted(found.items())
    }


def documented_names(places: Places) -> Iterator[tuple[str, Any]]:
    """Yield the names that documents and examples import or refer to."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files += [file for suffix in ("py", "yaml", "md") for file in (ROOT / "examples").rglob(f"*.{suffix}")]
    for file in sorted(files):
        text = file.read_text(encoding="utf-8")
        pairs = set(re.findall(r"\b(turnwise(?:\.[a-z_0-9]+)+)[.:]([A-Za-z]\w*)", text))
        for module, names in re.findall(r"from (turnwise[\w.]*) import (\([^)]*\)|[^\n;`]*)", text):
            pairs |= {(module, each) for each in re.findall(r"(?<!as )\b[A-Za-z]\w*", names) if each != "as"}
        for module, name in sorted(pairs):
            try:
                value = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                places.setdefault("documents name what is not there", []).append(f"{file.name}: {module} {name}")
                continue
            if not inspect.ismodule(value):
                places.setdefault(f"documented {name}", []).append(f"{file.name}: {module}")
                yield name, value


def error_names(modules: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the package's errors with what they derive from."""
    from turnwise.errors import TurnwiseError

    every = {each for module in modules.values() for each in vars(module).values() if isinstance(each, type)}
    named = sorted((each for each in every if issubclass(each, TurnwiseError)), key=lambda each: each.__name__)
    return {each.__name__: [base.__name__ for base in each.__bases__] for each in named}


# Configurations.


def models_in(annotation: Any) -> list[type]:
    """Return the sections that an annotation names."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for inner in typing.get_args(annotation) for each in models_in(inner)]


def config_keys(section: type, prefix: str, above: tuple[type, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key of a section and of those inside of it, with its type, bounds and default."""
    from pydantic import BaseModel

    for name, each in section.model_fields.items():  # type: ignore[attr-defined]
        key = f"{prefix}{each.alias or name}"
        inner = models_in(each.annotation)
        about: dict[str, Any] = {"type": type_name(each.annotation, inner)}
        about |= {f"bound {index}": plain(repr(bound)) for index, bound in enumerate(each.metadata)}
        if each.is_required():
            about["required"] = True
        else:
            default = each.get_default(call_default_factory=True)
            about["default"] = "a section" if isinstance(default, BaseModel) else plain(repr(default))
        yield key, about
        text = str(each.annotation)
        nested = "[]." if re.match(r"(typing\.)?(list|tuple|Sequence)\b|list\[", text) else "."
        nested = ".*." if "dict[" in text or "Mapping[" in text else nested
        for one in inner:
            if one not in above:
                label = f"<{one.__name__}>" if len(inner) > 1 else ""
                yield from config_keys(one, f"{key}{label}{nested}", (*above, section))


def type_name(annotation: Any, inner: list[type]) -> str:
    """Return a type's text; sections inside of it are called so, whatever their classes are called."""
    text = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    text = plain(text)
    for each in inner:
        text = re.sub(rf"\b{each.__name__}\b", "section", text)
    return text


def configurations(modules: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """Return the keys of the configurations that files hold, and of every section by its class's own keys."""
    from pydantic import BaseModel

    every = {
        each.__name__: each
        for module in modules.values()
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, BaseModel) and each.__module__.startswith("turnwise")
    }
    found: dict[str, Any] = {root: dict(config_keys(every[root], "")) for root in ROOTS if root in every}
    reached = {each for root in ROOTS if root in every for each in below(every[root])}
    for name, each in sorted(every.items()):
        places[f"section {name}"] = [each.__module__]
        if each not in reached and not name.startswith("_") and each is not BaseModel:
            found[name] = dict(config_keys(each, ""))
    return found


def below(section: type) -> Iterator[type]:
    """Yield a section and those inside of it."""
    yield section
    for each in section.model_fields.values():  # type: ignore[attr-defined]
        for one in models_in(each.annotation):
            if one is not section:
                yield from below(one)


# The command line.


def commands() -> dict[str, Any]:
    """Return the commands with their options."""
    import typer

    import turnwise.cli  # noqa: F401 - so that the application is there, wherever it stands

    app = next(
        value
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("turnwise.cli")
        for value in vars(module).values()
        if isinstance(value, typer.Typer)
    )
    group = typer.main.get_command(app)
    return {"": command(group)} | {name: command(each) for name, each in group.commands.items()}  # type: ignore[attr-defined]


def command(found: Any) -> dict[str, Any]:
    """Return the help of a command, and its options and arguments."""
    about = {"help": found.help}
    for each in found.params:
        kept = ("default", "help", "required", "multiple", "nargs", "min", "max", "metavar", "envvar", "hidden")
        said = {key: value for key in kept if (value := vars(each).get(key)) not in (None, False)}
        kind = vars(each).get("type_descriptor", vars(each).get("type"))
        annotation = re.sub(r"\w+\(annotation=(.*), parameter_info=.*", r"\1", str(kind))
        about[" ".join([*each.opts, *each.secondary_opts])] = said | {"type": plain(annotation)}
    return about


# Names that stand in the code as texts.


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the constants of a file that are texts, docstrings left out."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def matching(trees: Mapping[str, ast.Module], pattern: re.Pattern[str], kind: str, places: Places) -> list[str]:
    """Return the texts in the code that match a pattern as a whole."""
    found = set()
    for module, tree in trees.items():
        for text in texts(tree):
            if pattern.fullmatch(text):
                found.add(text)
                places.setdefault(f"{kind} {text}", []).append(module)
    return sorted(found)


def environment_variables(trees: Mapping[str, ast.Module], places: Places) -> list[str]:
    """Return the environment variables that the code names."""
    found = set(matching(trees, re.compile(r"TURNWISE_[A-Z_]+"), "variable", places))
    for tree in trees.values():
        for node in ast.walk(tree):
            said: ast.expr | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                said = node.slice
            elif isinstance(node, ast.Call) and re.match(r"os\.(environ\.\w+|getenv)$", ast.unparse(node.func)):
                said = node.args[0] if node.args else None
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                found.add(said.value)
    return sorted(found)


def routes(trees: Mapping[str, ast.Module], places: Places) -> list[str]:
    """Return the routes of servers and the paths that clients ask, as they stand in the code."""
    found = set(matching(trees, ROUTE, "route", places))
    for module, tree in trees.items():
        for node in ast.walk(tree):
            parts = list(node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else ())
            said = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            paths = [each for each in said if each.startswith("/")]
            if paths and METHODS & set(said):
                found.add(f"{next(each for each in said if each in METHODS)} {paths[0]}")
            if isinstance(node, ast.match_case) and isinstance(node.pattern, ast.MatchSequence):
                pattern = re.sub(r"(?<![\w'])\*?[a-z_]+(?![\w'])", "*", ast.unparse(node.pattern))
                if METHODS & set(re.findall(r"[A-Z]+", pattern)) or "runners" in " ".join(texts(tree)):
                    found.add(pattern)
                    places.setdefault(f"route {pattern}", []).append(module)
    return sorted(found)


def constants(trees: Mapping[str, ast.Module], places: Places, wanted: str) -> dict[str, int]:
    """Return constants by the ending of their names, and how often each is written."""
    found: dict[str, int] = {}
    for module, tree in trees.items():
        for node in tree.body:
            target = (
                node.target
                if isinstance(node, ast.AnnAssign)
                else node.targets[0]
                if isinstance(node, ast.Assign)
                else None
            )
            if (
                isinstance(target, ast.Name)
                and re.fullmatch(rf"_?(\w+_)?{wanted}", target.id)
                and node.value is not None
            ):
                text = f"{target.id} = {ast.unparse(node.value)}"
                found[text] = found.get(text, 0) + 1
                places.setdefault(f"constant {text}", []).append(module)
    return found


def registries(modules: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """Return the names that each registry holds."""
    mappings: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for module, loaded in modules.items():
        for name, value in vars(loaded).items():
            # A registry is written in capitals; it is imported elsewhere under the same name.
            if isinstance(value, Mapping) and value and name.lstrip("_").isupper() and module != PACKAGE.name:
                mappings.setdefault(id(value), (f"{module}.{name}", value))
    found: dict[str, Any] = {}
    for kind, probe in REGISTRIES.items():
        same = [(place, each) for place, each in mappings.values() if probe and set(probe) <= set(map(str, each))]
        places[f"registry {kind}"] = [place for place, _ in same]
        keys = sorted({str(name) for _, each in same for name in each})
        found[kind] = {key: " | ".join(sorted({entry(each[key]) for _, each in same if key in each})) for key in keys}
    return found


def entry(value: Any) -> str:
    """Return what a registry says under a name."""
    if isinstance(value, str):
        return plain(value)
    return value.__name__ if isinstance(value, type) or inspect.isroutine(value) else type(value).__name__


def metric_names(modules: Mapping[str, Any], trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the documented names of metrics, and every text in the code that begins as one."""
    known = next(vars(each)["METRICS"] for each in modules.values() if "METRICS" in vars(each))
    begins = sorted({name.partition("/")[0] for name in known})
    pattern = re.compile(rf"({'|'.join(begins)})/[\w*./{{}}]*")
    return {"documented": sorted(known), "in the code": matching(trees, pattern, "metric", {})}


# Runs.


def make_runs(folder: Path) -> None:
    """Train, evaluate and fine-tune a small model in a folder."""
    from support.trainer.lookup_run import MODEL, build_model, train_config
    from turnwise.config import dump_config

    if not (folder / MODEL).exists():
        build_model(folder)
    short = ["rollout.max_turns=3", "rollout.max_tokens_per_turn=24"]
    config = train_config(folder / MODEL, folder, name="train", eval={"every": 1, "tasks": TASKS})
    (folder / "train.yaml").write_text(dump_config(config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1"}
    for made, arguments in {
        "train": ["train", str(folder / "train.yaml")],
        "eval": ["eval", "lookup", *short, "-m", str(folder / MODEL), "-t", TASKS, "-o", str(folder / "eval")],
    }.items():
        if not (folder / made / "summary.json").exists():
            command_line = [sys.executable, "-m", "turnwise", *arguments]
            subprocess.run(command_line, check=True, env=environment, stdout=sys.stderr)


def normal(name: str) -> str:
    """Return a name or key without what differs from run to run."""
    name = re.sub(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*", "ID", name)
    return re.sub(r"\d+", "N", name)


def shape(value: Any, key: str, found: dict[str, set[str]]) -> None:
    """Note the keys of a JSON value with the types of what they hold."""
    if isinstance(value, dict):
        found.setdefault(key or ".", set()).add("object")
        for name, each in value.items():
            shape(each, f"{key}.{normal(str(name))}", found)
    elif isinstance(value, list):
        found.setdefault(key or ".", set()).add("list")
        for each in value:
            shape(each, f"{key}[]", found)
    else:
        found.setdefault(key or ".", set()).add("number" if type(value) in (int, float) else type(value).__name__)


def run_files(folder: Path) -> dict[str, Any]:
    """Return the files of runs, each with the keys of what it holds."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_dir():
            continue
        name = normal(file.relative_to(folder).as_posix())
        keys: dict[str, set[str]] = {}
        for kind, value in read_values(file):
            shape(value, kind, keys)
        kept = found.setdefault(name, {})
        for key, kinds in keys.items():
            kept[key] = sorted({*kept.get(key, ()), *kinds})
    return found


def read_values(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield what a file holds, each with what kind of line it is."""
    if file.name.startswith("tokenizer") or file.name in ("demonstrations.jsonl", "vocab.json"):
        return
    if file.suffix == ".jsonl":
        for line in file.read_text(encoding="utf-8").splitlines():
            value = json.loads(line)
            told = value if isinstance(value, dict) else {}
            kinds = [f"{key}={told[key]}" for key in ("event", "kind", "type") if isinstance(told.get(key), str)]
            yield "".join(kinds[:1]), value
    elif file.suffix == ".json":
        yield "", json.loads(file.read_text(encoding="utf-8"))
    elif file.suffix == ".yaml":
        import yaml

        yield "", yaml.safe_load(file.read_text(encoding="utf-8"))
    elif file.suffix == ".safetensors":
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            yield "", dict.fromkeys(json.loads(opened.read(size)), "tensor")


# All of it.


def dump(runs: Path | None) -> dict[str, Any]:
    """Return all of it."""
    places: Places = {}
    trees = sources()
    modules = imported(trees, places)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {
        "public names": by_name(public_names(modules, places)),
        "documented names": by_name(documented_names(places)),
        "errors": error_names(modules),
        "configurations": configurations(modules, places),
        "commands": commands(),
        "metrics": metric_names(modules, trees),
        "registries": registries(modules, places),
        "routes": [each for each in routes(trees, places) if "/" in each or "[" in each],
        "environment variables": environment_variables(trees, places),
        "entry points": {
            "groups": matching(trees, re.compile(r"turnwise\.(extensions|plugins)"), "group", places),
            "scripts": sorted(project["scripts"]),
        },
        "extras": sorted(project["optional-dependencies"]),
        "file names": matching(trees, FILE_NAME, "file", places),
        "format versions": constants(trees, places, "VERSIONS?"),
    }
    if runs is not None:
        make_runs(runs)
        found["runs"] = run_files(runs)
    return {**found, "places": {name: sorted(set(each)) for name, each in sorted(places.items())}}


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value with the way to each."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from flat(each, f"{key} / {name}" if key else name)
    elif isinstance(value, list) and value and key:
        for each in value:
            yield f"{key} / {json.dumps(each)}", True
    else:
        yield key, value


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what differs, a line each: renamed (the same under another name), gone, new and changed."""
    lines: list[str] = []
    for section in [*old, *(each for each in new if each not in old)]:
        before, after = old.get(section, {}), new.get(section, {})
        if section == "places" or before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            gone, come = [each for each in before if each not in after], [each for each in after if each not in before]
            for name in list(gone):
                same = [each for each in come if after[each] == before[name] and isinstance(before[name], dict)]
                if len(same) == 1:
                    lines.append(f"{section}: {name} -> {same[0]}")
                    come.remove(same[0])
                    before = {key: each for key, each in before.items() if key != name}
                    after = {key: each for key, each in after.items() if key != same[0]}
        one, other = dict(flat(before, section)), dict(flat(after, section))
        lines += [f"- {key}" for key in one if key not in other]
        lines += [f"+ {key}" for key in other if key not in one]
        lines += [f"! {key}: {one[key]!r} -> {other[key]!r}" for key in one if key in other and one[key] != other[key]]
    return lines


def main() -> int:
    """Print a dump, or what differs between two; return 1 where anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="add the files of small runs, made in DIR")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two dumps")
    given = parser.parse_args()
    if given.diff:
        old, new = (json.loads(each.read_text(encoding="utf-8")) for each in given.diff)
        lines = differences(old, new)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return int(bool(lines))
    json.dump(dump(given.runs), sys.stdout, indent=1, ensure_ascii=False, default=str)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
