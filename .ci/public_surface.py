"""Prints, as JSON, what must not change by accident, or compares two such dumps.

Usage:
    public_surface.py [--runs DIR] > dump.json
    public_surface.py --diff OLD.json NEW.json

A dump holds public and documented names with their signatures, keys of configurations, commands, names of metrics,
names in registries, routes, environment variables, and names of files. With ``--runs`` it trains and evaluates a small
model in DIR (a minute) and adds the files of these runs with the keys of what they hold. Modules are no part of a name.
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
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "turnwise"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from turnwise.errors import TurnwiseError  # noqa: E402

# Registries, each by names that it must hold: a registry is found whatever it is called and wherever it stands, and one
# that is not found is an error.
REGISTRIES = {
    "advantages": ("grpo", "rloo"),
    "critic advantages": ("gae",),
    "agents": ("react", "single_turn"),
    "agent programs": ("codex", "opencode"),
    "chat formats": ("hermes", "glm"),
    "engines": ("torch",),
    "environments": ("lookup", "calculator"),
    "kl estimators": ("k1", "k3"),
    "loggers": ("tensorboard", "wandb"),
    "losses": ("cispo", "gspo"),
    "loops": ("sync", "separate_async"),
    "replay strategies": ("fifo", "bounded"),
    "sandbox backends": ("local", "docker"),
    "sandbox checks": ("exec: streams", "cancellation"),
    "tools": ("shell", "python"),
    "wrappers": ("shape_reward", "turn_limit"),
    "formats of test logs": ("pytest", "cargo"),
    "errors that runners report": ("TurnwiseError", "ToolError"),
}
ROOTS = (
    "TrainConfig", "EvalConfig", "SFTConfig", "GatewayConfig", "InferenceConfig", "RewardServerConfig",
)  # fmt: skip
TASKS = "turnwise.envs.basic.lookup:tasks?n=3&split=test"
WARNINGS = "turnwise.trainer.observe.warnings"
METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"}
FILE_NAME = re.compile(r"[\w.{}*-]*\.(jsonl|json|safetensors|ya?ml|pt|html|jinja|lock|toml|log|txt|sock)")
ROUTE = re.compile(r"/?(v1|s|inference|sessions|runners|chat|responses|messages|models|classify|health)(/[\w{}]+)*")
NOT_IMPORTED = re.compile(r"\.(inside|boot|guard|vllm_side|shipped|__main__)(\.|$)")

# The tree, read and imported.


def sources() -> dict[str, ast.Module]:
    """Return the syntax trees of the package's files by their modules."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if "shipped" not in file.parts]
    dotted = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    return {module: ast.parse(file.read_text(encoding="utf-8")) for module, file in dotted.items()}


def imported(trees: Mapping[str, ast.Module]) -> dict[str, Any]:
    """Import modules; what cannot be imported here (an optional dependency is missing) is reported."""
    modules_by_name = {}
    for name, tree in trees.items():
        # A program that is sent to a sandbox as text begins without being asked.
        program = any(isinstance(node, ast.Expr) and ast.unparse(node) == "main()" for node in tree.body)
        if NOT_IMPORTED.search(name) or program:
            continue
        try:
            modules_by_name[name] = importlib.import_module(name)
        except (ImportError, SystemExit, TurnwiseError) as error:
            sys.stderr.write(f"not imported: {name}: {error}\n")
    return modules_by_name


def plain(text: str) -> str:
    """Return a text without modules and addresses in memory."""
    text = re.sub(r"\b(?:turnwise|typing|collections\.abc|pathlib|builtins|types|enum)(?:\.\w+)*[.:](?=\w)", "", text)
    text = re.sub(r"func=<function (?:[^<>]|<\w+>)*>", "func", text)
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
    names = {name for base in cls.__mro__ if base.__module__.startswith("turnwise") for name in vars(base)}
    for name in sorted(names):
        if name.startswith("_") and name != "__init__":
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, (staticmethod, classmethod)):
            yield name, f"{type(member).__name__}{signature(member.__func__)}"
        elif isinstance(member, property):
            yield name, f"property -> {plain(str(((member.fget and member.fget.__annotations__) or {}).get('return')))}"
        elif inspect.isfunction(member):
            yield name, f"{'async ' if inspect.iscoroutinefunction(member) else ''}{signature(member)}"
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("turnwise")]
    annotations = {name: kind for base in bases for name, kind in vars(base).get("__annotations__", {}).items()}
    for name, kind in sorted(annotations.items()):
        if not name.startswith("_") and name not in names:
            yield name, plain(str(kind))


def fields(cls: type) -> dict[str, str]:
    """Return the fields of a dataclass with types and defaults."""
    by_field = {}
    for data_field in dataclasses.fields(cls):
        default = "" if data_field.default is dataclasses.MISSING else f" = {plain(repr(data_field.default))}"
        default_factory = "" if data_field.default_factory is dataclasses.MISSING else " = made"
        by_field[data_field.name] = f"{plain(str(data_field.type))}{default or default_factory}"
    return by_field


def described(value: Any) -> Any:
    """Return what a public name is, without where it stands."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return {"enum": {name: member.value for name, member in value.__members__.items()}}
    if isinstance(value, type) and issubclass(value, BaseModel):
        names = {*vars(BaseModel), *value.model_fields}
        return {
            "section": sorted(value.model_fields),
            "members": {name: text for name, text in members(value) if name not in names},
        }
    if isinstance(value, type):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        description: dict[str, Any] = {"class": bases, "members": dict(members(value))}
        if dataclasses.is_dataclass(value):
            description["fields"] = fields(value)
        return description
    if inspect.isroutine(value):
        return f"{'async ' if inspect.iscoroutinefunction(value) else ''}def {signature(value)}"
    if isinstance(value, (str, int, float)):
        return plain(repr(value))
    return type(value).__name__


def public_names(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names in the ``__all__`` of the package and its sub-packages."""
    for module in modules.values():
        for name in vars(module).get("__all__", ()) if hasattr(module, "__path__") else ():
            yield name, getattr(module, name)


def by_name(values: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return what names stand for; things of one name stand beside each other."""
    variants: dict[str, list[Any]] = {}
    for name, value in values:
        description, same_name = described(value), variants.setdefault(name, [])
        if description not in same_name:
            same_name.append(description)
    return {
        name: same_name[0] if len(same_name) == 1 else dict(enumerate(sorted(same_name, key=json.dumps), 1))
        for name, same_name in sorted(variants.items())
    }


def documented_names() -> Iterator[tuple[str, Any]]:
    """Yield the names that documents and examples import or refer to."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files += [file for suffix in ("py", "yaml", "md") for file in (ROOT / "examples").rglob(f"*.{suffix}")]
    for file in sorted(files):
        text = file.read_text(encoding="utf-8")
        pairs = set(re.findall(r"\b(turnwise(?:\.[a-z_0-9]+)+)[.:]([A-Za-z]\w*)", text))
        for module, names in re.findall(r"from (turnwise[\w.]*) import (\([^)]*\)|[^\n;`]*)", text):
            pairs |= {(module, name) for name in re.findall(r"(?<!as )\b[A-Za-z]\w*", names) if name != "as"}
        for module, name in sorted(pairs):
            try:
                value = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue
            if not inspect.ismodule(value):
                yield name, value


def error_names(modules: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the package's errors with what they derive from."""
    classes = {
        candidate for module in modules.values() for candidate in vars(module).values() if isinstance(candidate, type)
    }
    errors = sorted((cls for cls in classes if issubclass(cls, TurnwiseError)), key=lambda cls: cls.__name__)
    return {error.__name__: [base.__name__ for base in error.__bases__] for error in errors}


# Configurations.


def models_in(annotation: Any) -> list[type]:
    """Return the sections that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in models_in(inner)]


def config_keys(section: type, prefix: str, above: tuple[type, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key of a section and of those inside of it, with its type, bounds and default."""
    for name, info in section.model_fields.items():  # type: ignore[attr-defined]
        key = f"{prefix}{info.alias or name}"
        inner = models_in(info.annotation)
        facts: dict[str, Any] = {"type": type_name(info.annotation, inner)}
        facts |= {f"bound {index}": plain(repr(bound)) for index, bound in enumerate(info.metadata)}
        if info.is_required():
            facts["required"] = True
        else:
            default = info.get_default(call_default_factory=True)
            facts["default"] = "a section" if isinstance(default, BaseModel) else plain(repr(default))
        yield key, facts
        text = str(info.annotation)
        nested = "[]." if re.match(r"(typing\.)?(list|tuple|Sequence)\b|list\[", text) else "."
        nested = ".*." if "dict[" in text or "Mapping[" in text else nested
        for subsection in inner:
            if subsection not in above:
                label = f"<{subsection.__name__}>" if len(inner) > 1 else ""
                yield from config_keys(subsection, f"{key}{label}{nested}", (*above, section))


def type_name(annotation: Any, inner: list[type]) -> str:
    """Return a type's text; sections inside of it are called so, whatever their classes are called."""
    text = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    text = plain(text)
    for model in inner:
        text = re.sub(rf"\b{model.__name__}\b", "section", text)
    return text


def configurations(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the configurations that files hold, and of every section by its class's own keys."""
    sections = {
        candidate.__name__: candidate
        for module in modules.values()
        for candidate in vars(module).values()
        if isinstance(candidate, type) and issubclass(candidate, BaseModel)
        if candidate.__module__.startswith("turnwise")
    }
    keys: dict[str, Any] = {root: dict(config_keys(sections[root], "")) for root in ROOTS if root in sections}
    reached = {section for root in ROOTS if root in sections for section in with_subsections(sections[root])}
    for name, section in sorted(sections.items()):
        if section not in reached and not name.startswith("_") and section is not BaseModel:
            keys[name] = dict(config_keys(section, ""))
    return keys


def with_subsections(section: type) -> Iterator[type]:
    """Yield a section and those inside of it."""
    yield section
    for info in section.model_fields.values():  # type: ignore[attr-defined]
        for subsection in models_in(info.annotation):
            if subsection is not section:
                yield from with_subsections(subsection)


# The command line.


def commands() -> dict[str, Any]:
    """Return the commands with their options."""
    import typer

    import turnwise.cli  # noqa: F401 - so that the application is there, wherever it stands

    applications = [
        value
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("turnwise.cli")
        for value in vars(module).values()
        if isinstance(value, typer.Typer)
    ]
    # The others are groups of commands inside of it.
    app = max(applications, key=lambda application: len(application.registered_commands))
    return dict(with_subcommands(typer.main.get_command(app), ""))


def with_subcommands(click_command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a command and those inside of it by their names."""
    yield name, command(click_command)
    for key, subcommand in vars(click_command).get("commands", {}).items():
        yield from with_subcommands(subcommand, f"{name} {key}".strip())


def command(click_command: Any) -> dict[str, Any]:
    """Return the help of a command, and its options and arguments."""
    facts = {"help": click_command.help}
    for parameter in click_command.params:
        facets = ("default", "help", "required", "multiple", "nargs", "min", "max", "metavar", "envvar", "hidden")
        options = {key: value for key in facets if (value := vars(parameter).get(key)) not in (None, False)}
        kind = vars(parameter).get("type_descriptor", vars(parameter).get("type"))
        annotation = re.sub(r"\w+\(annotation=(.*), parameter_info=.*", r"\1", str(kind))
        facts[" ".join([*parameter.opts, *parameter.secondary_opts])] = options | {"type": plain(annotation)}
    return facts


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


def matching(trees: Mapping[str, ast.Module], pattern: re.Pattern[str]) -> list[str]:
    """Return the texts in the code that match a pattern as a whole."""
    return sorted({text for tree in trees.values() for text in texts(tree) if pattern.fullmatch(text)})


def environment_variables(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the environment variables that the code names."""
    variables = set(matching(trees, re.compile(r"TURNWISE_[A-Z_]+")))
    for tree in trees.values():
        for node in ast.walk(tree):
            argument: ast.expr | None = None
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                argument = node.slice
            elif isinstance(node, ast.Call) and re.match(r"os\.(environ\.\w+|getenv)$", ast.unparse(node.func)):
                argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                variables.add(argument.value)
    return sorted(variables)


def routes(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the routes of servers and the paths that clients ask, as they stand in the code."""
    declared = set(matching(trees, ROUTE))
    for tree in trees.values():
        for node in ast.walk(tree):
            parts = list(node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else ())
            strings = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            paths = [text for text in strings if text.startswith("/")]
            if paths and METHODS & set(strings):
                declared.add(f"{next(text for text in strings if text in METHODS)} {paths[0]}")
            if isinstance(node, ast.match_case) and isinstance(node.pattern, ast.MatchSequence):
                pattern = re.sub(r"(?<![\w'])\*?[a-z_]+(?![\w'])", "*", ast.unparse(node.pattern))
                if METHODS & set(re.findall(r"[A-Z]+", pattern)) or "runners" in " ".join(texts(tree)):
                    declared.add(pattern)
    return sorted(route for route in declared if "/" in route or "[" in route)


def format_versions(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """Return the constants whose name ends in VERSION or VERSIONS, and how often each is written."""
    values: Counter[str] = Counter()
    for node in (node for tree in trees.values() for node in tree.body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and re.fullmatch(r"_?(\w+_)?VERSIONS?", target.id):
                values[f"{target.id} = {ast.unparse(node.value)}"] += 1
    return values


def registries(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that each registry holds. Raises LookupError if one of :data:`REGISTRIES` is not found."""
    mappings: dict[int, Mapping[str, Any]] = {}
    for module, loaded in modules.items():
        for name, value in vars(loaded).items():
            # A registry is written in capitals; it is imported elsewhere under the same name.
            if name.lstrip("_").isupper() and module != PACKAGE.name:
                entries = getattr(value, "classes", value)
                if isinstance(entries, Mapping) and entries:
                    mappings.setdefault(id(entries), entries)
    registered: dict[str, Any] = {}
    for kind, probe in REGISTRIES.items():
        matches = [mapping for mapping in mappings.values() if set(probe) <= set(map(str, mapping))]
        if not matches:
            raise LookupError(f"no registry of {kind} holds {', '.join(probe)}: mend REGISTRIES in {__file__}")
        keys = sorted({str(name) for mapping in matches for name in mapping})
        registered[kind] = {
            key: " | ".join(sorted({entry(mapping[key]) for mapping in matches if key in mapping})) for key in keys
        }
    return registered


def warning_names(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the names of a run's warnings: the first of each pair that the rules yield."""
    pairs = (node.value for node in ast.walk(trees[WARNINGS]) if isinstance(node, ast.Yield))
    return sorted({ast.literal_eval(pair.elts[0]) for pair in pairs if isinstance(pair, ast.Tuple)})


def entry(value: Any) -> str:
    """Return what a registry says under a name."""
    if isinstance(value, str):
        return plain(value)
    return value.__name__ if isinstance(value, type) or inspect.isroutine(value) else type(value).__name__


def metric_names(modules: Mapping[str, Any], trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the documented names of metrics, and every text in the code that begins as one."""
    metrics = next(vars(module)["METRICS"] for module in modules.values() if "METRICS" in vars(module))
    begins = sorted({name.partition("/")[0] for name in metrics})
    pattern = re.compile(rf"({'|'.join(begins)})/[\w*./{{}}]*")
    return {"documented": sorted(metrics), "in the code": matching(trees, pattern)}


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
    for name, arguments in {
        "train": ["train", str(folder / "train.yaml")],
        "eval": ["eval", "lookup", *short, "-m", str(folder / MODEL), "-t", TASKS, "-o", str(folder / "eval")],
    }.items():
        if not (folder / name / "summary.json").exists():
            command_line = [sys.executable, "-m", "turnwise", *arguments]
            subprocess.run(command_line, check=True, env=environment, stdout=sys.stderr)


def normal(name: str) -> str:
    """Return a name or key without what differs from run to run."""
    name = re.sub(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*", "ID", name)
    return re.sub(r"\d+", "N", name)


def shape(value: Any, key: str, keys: dict[str, set[str]]) -> None:
    """Note the keys of a JSON value with the types of what they hold."""
    if isinstance(value, dict):
        keys.setdefault(key or ".", set()).add("object")
        for name, element in value.items():
            shape(element, f"{key}.{normal(str(name))}", keys)
    elif isinstance(value, list):
        keys.setdefault(key or ".", set()).add("list")
        for element in value:
            shape(element, f"{key}[]", keys)
    else:
        keys.setdefault(key or ".", set()).add("number" if type(value) in (int, float) else type(value).__name__)


def run_files(folder: Path) -> dict[str, Any]:
    """Return the files of runs, each with the keys of what it holds."""
    shapes: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_dir():
            continue
        name = normal(file.relative_to(folder).as_posix())
        keys: dict[str, set[str]] = {}
        for kind, value in read_values(file):
            shape(value, kind, keys)
        shapes_of_file = shapes.setdefault(name, {})
        for key, kinds in keys.items():
            shapes_of_file[key] = sorted({*shapes_of_file.get(key, ()), *kinds})
    return shapes


def read_values(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield what a file holds, each with what kind of line it is."""
    if file.name.startswith("tokenizer") or file.name in ("demonstrations.jsonl", "vocab.json"):
        return
    if file.suffix == ".jsonl":
        for line in file.read_text(encoding="utf-8").splitlines():
            value = json.loads(line)
            fields_by_name = value if isinstance(value, dict) else {}
            kind = next((key for key in ("event", "kind", "type") if isinstance(fields_by_name.get(key), str)), None)
            yield "" if kind is None else f"{kind}={fields_by_name[kind]}", value
    elif file.suffix == ".json":
        yield "", json.loads(file.read_text(encoding="utf-8"))
    elif file.suffix == ".yaml":
        import yaml

        yield "", yaml.safe_load(file.read_text(encoding="utf-8"))
    elif file.suffix == ".safetensors":
        data = file.read_bytes()
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        yield "", dict.fromkeys(json.loads(header), "tensor")


# All of it.


def dump(runs: Path | None) -> dict[str, Any]:
    """Return all of it."""
    trees = sources()
    modules = imported(trees)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    surface = {
        "public names": by_name(public_names(modules)),
        "documented names": by_name(documented_names()),
        "errors": error_names(modules),
        "configurations": configurations(modules),
        "commands": commands(),
        "metrics": metric_names(modules, trees),
        "registries": registries(modules),
        "warnings": warning_names(trees),
        "routes": routes(trees),
        "environment variables": environment_variables(trees),
        "entry points": {
            "groups": matching(trees, re.compile(r"turnwise\.(extensions|plugins)")),
            "scripts": sorted(project["scripts"]),
        },
        "extras": sorted(project["optional-dependencies"]),
        "file names": matching(trees, FILE_NAME),
        "format versions": format_versions(trees),
    }
    if runs is not None:
        make_runs(runs)
        surface["runs"] = run_files(runs)
    return surface


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value with the way to each."""
    if isinstance(value, dict) and value:
        for name, element in value.items():
            yield from flat(element, f"{key} / {name}" if key else name)
    elif isinstance(value, list) and value and key:
        for element in value:
            yield f"{key} / {json.dumps(element)}", True
    else:
        yield key, value


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what differs, a line each: renamed (the same under another name), removed, added and changed."""
    lines: list[str] = []
    for section in [*old, *(key for key in new if key not in old)]:
        old_section, new_section = old.get(section, {}), new.get(section, {})
        if isinstance(old_section, dict) and isinstance(new_section, dict):
            added = [name for name in new_section if name not in old_section]
            for name in [name for name in old_section if name not in new_section]:
                element = old_section[name]
                equal = [key for key in added if new_section[key] == element and isinstance(element, dict)]
                if len(equal) == 1:
                    lines.append(f"{section}: {name} -> {equal[0]}")
                    added.remove(equal[0])
                    old_section = {key: value for key, value in old_section.items() if key != name}
                    new_section = {key: value for key, value in new_section.items() if key != equal[0]}
        before, after = dict(flat(old_section, section)), dict(flat(new_section, section))
        lines += [f"- {key}" for key in before if key not in after]
        lines += [f"+ {key}" for key in after if key not in before]
        changed = [key for key in before if key in after and before[key] != after[key]]
        lines += [f"! {key}: {before[key]!r} -> {after[key]!r}" for key in changed]
    return lines


def main() -> int:
    """Print a dump, or what differs between two; return 1 where anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="add the files of small runs, made in DIR")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two dumps")
    arguments = parser.parse_args()
    if arguments.diff:
        old, new = (json.loads(path.read_text(encoding="utf-8")) for path in arguments.diff)
        lines = differences(old, new)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return int(bool(lines))
    json.dump(dump(arguments.runs), sys.stdout, indent=1, ensure_ascii=False, default=str)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
