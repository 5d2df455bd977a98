"""What a configuration names and is not here: workflows, rewards, packages, data, models.  Looked
up by name; no plugin is imported.

Part of `rft check --schema-only`, whose file alone is right.  Invariant: what is listed here stops
`rft run`, and says how to get it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import rft.plugins as plugins
from rft.config import model_folder
from rft.config.plan import Facts, Plan
from rft.config.schema.root import TRACKERS
from rft.errors import SetupError
from rft.monitor.monitor import check_available
from rft.monitor.settings import MonitorSettings
from rft.plugins import REGISTRY
from rft.reward.build_reward import INSTEAD as REWARDS_INSTEAD
from rft.reward.data_sources import reward_of
from rft.taskset.settings import FILES, TasksetSettings
from rft.workflow.recipes import INSTEAD as WORKFLOWS_INSTEAD
from rft.workflow.recipes import workflow_class

_HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Need:
    """`kind`: workflow, reward, operator, package, data or model."""

    kind: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def look(plan: Plan, facts: Facts) -> tuple[Need, ...]:
    plugins.load_shipped()
    found: dict[str, Need] = {}
    data = [
        d.rows
        for d in (plan.trainer.offline_data, plan.trainer.held_out, plan.expert)
        if d is not None
    ]
    for t in (*plan.explorer.tasksets, *plan.explorer.eval_tasksets, *data):
        for need in _of_taskset(t, plan, facts):
            found.setdefault(need.message, need)
    shipped = replace(
        plan.monitor, kinds=tuple(k for k in plan.monitor.kinds if k in TRACKERS), args={}
    )
    for need in (*operators(plan), *trackers(plan, shipped)):
        found.setdefault(need.message, need)
    models = {"model.model_path": plan.learner.model_path}
    models |= {
        f"explorer.auxiliary_models[{i}].model_path": m.engines[0].model_path
        for i, m in enumerate(plan.auxiliary)
        if m.engines[0].external is None
    }
    for key, path in models.items():
        if model_folder.sizes(path) is None:
            found.setdefault(
                path,
                Need(
                    "model", key, f"model {path!r}: no such folder, nor a hub id in the local cache"
                ),
            )
    return tuple(found.values())


def operators(plan: Plan) -> Iterator[Need]:
    """What operators of the experience pipeline lack."""
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


def trackers(plan: Plan, given: MonitorSettings) -> Iterator[Need]:
    """Those whose library is not here, where the run opens them here.  Raises ConfigError for
    arguments that do not fit.
    """
    for kind in () if plan.joins else given.kinds:
        try:
            check_available([kind], given.args, given.plugin_dirs)
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
    for name, kind, instead in (
        (t.workflow, "workflow", WORKFLOWS_INSTEAD),
        (t.reward, "reward", REWARDS_INSTEAD),
    ):
        if name and (why := _missing(kind, name, instead, plan, facts)):
            yield Need(
                kind,
                f"{key}.default_{'workflow' if kind == 'workflow' else 'reward_fn'}_type",
                f"{kind} {name!r}: {why}",
            )
    if t.workflow in REGISTRY.names("workflow"):
        needs = workflow_class(REGISTRY.get("workflow", t.workflow)).needs
        yield from _packages("workflow", t.workflow, needs, f"{key}.default_workflow_type")
    # a database, code, the hub or its cache
    elsewhere = ":" in t.path or (_HUB.fullmatch(t.path) and not t.path.lower().endswith(FILES))
    if t.storage_type == "file" and not elsewhere and not facts.exists(t.path):
        yield Need("data", f"{key}.path", f"data {t.path!r}: no such file or folder")


def _missing(kind: str, name: str, instead: dict[str, str], plan: Plan, facts: Facts) -> str:
    """Why nothing of that name is here; "" where it is, or where plugins may bring it."""
    where, colon, attribute = name.rpartition(":")
    if colon and where.endswith(".py"):
        return _imports(Path(where).expanduser()) if facts.exists(where) else "no such file"
    if colon:
        here = Path(*where.split(".")).with_suffix(".py")
        if (found := _file(where)) is not None:
            return _imports(found)
        hint = (
            f"; write {here}:{attribute}, or start with PYTHONPATH=."
            if facts.exists(str(here))
            else ""
        )
        return (
            f"there is no module "
            f"{where}{hint or '; add its folder to PYTHONPATH, or name its file as path/file.py:Name'}"
        )
    if name in REGISTRY.names(kind) or (kind == "reward" and reward_of(name) is not None):
        return ""
    if why := instead.get(name):
        return why
    return (
        ""
        if plugins.may_come(name, plan.plugin_dirs)
        else "no such name is shipped; give its file with --plugin-dir"
    )


def _file(module: str) -> Path | None:
    """The file or folder of a module, found without importing anything."""
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
    """What a file, and what it imports of its own folders, imports and is not here; "" if nothing."""
    absent: dict[str, None] = {}
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in seen or file.suffix != ".py" or not file.is_file():
            continue
        seen.add(file)
        for module in _imported(file):
            found = _file(module)
            if found is None:
                absent[module.partition(".")[0]] = None
            elif found.is_relative_to(path.parent):
                waiting.append(found)
    if "trinity" in absent:
        return (
            f"{path.name} imports trinity; change that to rft.extras.migrate.compat "
            f"(docs/howto/from-trinity.md)"
        )
    return f"{path.name} imports {', '.join(absent)}, not installed" if absent else ""


def _imported(file: Path) -> list[str]:
    """Modules that a file imports, also inside of functions; none of one that is no Python."""
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
