"""List the missing things that a configuration names: workflows, rewards, packages, data, models.
Looks names up; imports no plugin.

Part of `rft check --schema-only`, which checks the file alone.  Invariant: every listed thing would
stop `rft run`, and its message says how to get it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import rft.plugins as plugins
from rft.config.plan import Facts, Plan
from rft.errors import SetupError
from rft.monitor.monitor import check_available
from rft.monitor.settings import TRACKERS, MonitorConfig
from rft.plugins import REGISTRY, refused_names
from rft.preflight import model_folder
from rft.reward.build_reward import alias
from rft.taskset.settings import FILES, TasksetSettings
from rft.workflow.recipes import workflow_class

_HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Need:
    """A missing thing.  `kind`: workflow, reward, operator, package, data or model."""

    kind: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def look(plan: Plan, facts: Facts) -> tuple[Need, ...]:
    plugins.load_shipped()
    needs: dict[str, Need] = {}
    data = [
        d.rows
        for d in (plan.trainer.offline_data, plan.trainer.held_out, plan.expert)
        if d is not None
    ]
    for t in (*plan.explorer.tasksets, *plan.explorer.eval_tasksets, *data):
        for need in _of_taskset(t, plan, facts):
            needs.setdefault(need.message, need)
    shipped = MonitorConfig(
        monitor_type=tuple(t for t in plan.monitor.monitor_type if t in TRACKERS)
    )
    for need in (*operators(plan), *trackers(plan, shipped)):
        needs.setdefault(need.message, need)
    models = {"model.model_path": plan.learner.model_path}
    models |= {
        f"explorer.auxiliary_models[{i}].model_path": m.engines[0].model_path
        for i, m in enumerate(plan.auxiliary)
        if m.engines[0].external is None
    }
    for key, path in models.items():
        if model_folder.sizes(path) is None:
            needs.setdefault(
                path,
                Need(
                    "model", key, f"model {path!r}: no such folder, nor a hub id in the local cache"
                ),
            )
    return tuple(needs.values())


def operators(plan: Plan) -> Iterator[Need]:
    """Yield missing operators of the experience pipeline, and their missing packages."""
    for o in plan.explorer.pipeline.operators:
        if ":" not in o.name and o.name not in REGISTRY.names("operator"):
            if not plugins.may_come(o.name, plan.plugin_dirs):
                yield Need(
                    "operator",
                    o.key,
                    f"operator {o.name!r}: no such name is shipped; give its file with "
                    f"--plugin-dir",
                )
        elif ":" not in o.name:
            yield from _packages(
                "operator", o.name, REGISTRY.get("operator", o.name).obj.needs, o.key
            )


def trackers(plan: Plan, config: MonitorConfig) -> Iterator[Need]:
    """Yield trackers whose library is missing, if the run opens them in this process.

    Raises ConfigError for invalid arguments.
    """
    for tracker in () if plan.joins else config.monitor_type:
        args = {tracker: config.tracker_args(tracker)}
        try:
            check_available([tracker], args, plan.plugin_dirs)
        except SetupError as e:
            yield Need("package", "monitor.monitor_type", str(e))


def _packages(kind: str, name: str, needs: Mapping[str, str], key: str) -> Iterator[Need]:
    for library, extra in needs.items():
        if importlib.util.find_spec(library) is None:
            yield Need(
                "package",
                key,
                f"{kind} {name!r} needs the package {library}: pip install 'rft-platform[{extra}]'",
            )


def _of_taskset(t: TasksetSettings, plan: Plan, facts: Facts) -> Iterator[Need]:
    key = t.key
    for name, kind in ((t.workflow, "workflow"), (t.reward, "reward")):
        if name and (reason := _missing(kind, name, plan, facts)):
            yield Need(
                kind,
                f"{key}.default_{'workflow' if kind == 'workflow' else 'reward_fn'}_type",
                f"{kind} {name!r}: {reason}",
            )
    if t.workflow in REGISTRY.names("workflow"):
        needs = workflow_class(REGISTRY.get("workflow", t.workflow)).needs
        yield from _packages("workflow", t.workflow, needs, f"{key}.default_workflow_type")
    # a database, code, the hub or its cache
    elsewhere = ":" in t.path or (_HUB.fullmatch(t.path) and not t.path.lower().endswith(FILES))
    if t.storage_type == "file" and not elsewhere and not facts.exists(t.path):
        yield Need("data", f"{key}.path", f"data {t.path!r}: no such file or folder")


def _missing(kind: str, name: str, plan: Plan, facts: Facts) -> str:
    """Return why the name is missing; "" if it exists, or if plugins may provide it."""
    where, colon, attribute = name.rpartition(":")
    if colon and where.endswith(".py"):
        return _imports(Path(where).expanduser()) if facts.exists(where) else "no such file"
    if colon:
        here = Path(*where.split(".")).with_suffix(".py")
        if (source := _file(where)) is not None:
            return _imports(source)
        hint = (
            f"; write {here}:{attribute}, or start with PYTHONPATH=."
            if facts.exists(str(here))
            else ""
        )
        return (
            f"there is no module "
            f"{where}{hint or '; add its folder to PYTHONPATH, or name its file as path/file.py:Name'}"
        )
    if name in REGISTRY.names(kind) or (kind == "reward" and alias(name, {}) is not None):
        return ""
    if advice := refused_names(kind).get(name):
        return advice
    return (
        ""
        if plugins.may_come(name, plan.plugin_dirs)
        else "no such name is shipped; give its file with --plugin-dir"
    )


def _file(module: str) -> Path | None:
    """Return the file or folder of a module, found without imports."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not below:
        return Path(spec.origin or ".")
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *below)
        if place.is_dir() or place.with_suffix(".py").is_file():
            return place if place.is_dir() else place.with_suffix(".py")
    return None


def _imports(path: Path) -> str:
    """Describe the missing third-party imports of a plugin file, recursively through its own
    folders; "" if none.
    """
    absent: dict[str, None] = {}
    visited: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in visited or file.suffix != ".py" or not file.is_file():
            continue
        visited.add(file)
        for module in _imported(file):
            source = _file(module)
            if source is None:
                absent[module.partition(".")[0]] = None
            elif source.is_relative_to(path.parent):
                waiting.append(source)
    if "trinity" in absent:
        return (
            f"{path.name} imports trinity; change that to rft.extras.migrate.compat "
            f"(docs/howto/from-trinity.md)"
        )
    return f"{path.name} imports {', '.join(absent)}, not installed" if absent else ""


def _imported(file: Path) -> list[str]:
    """Return the modules that a file imports, also inside functions; empty for invalid Python."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return []
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return named + [
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and not node.level and node.module
    ]
