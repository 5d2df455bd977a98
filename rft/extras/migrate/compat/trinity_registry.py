"""Trinity-RFT's registries, whose `register_module` marks a plugin of ours, and small things of its
utilities.

Invariant: what is registered can be named in a configuration, or is refused at once with what to
write instead.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from rft.errors import PluginError
from rft.plugins import REGISTRY, kind, load_all

T = TypeVar("T")
# the classes of Trinity-RFT's shape behind the plugins of ours that stand for them
_ORIGINALS: dict[type, type] = {}
_PARAMETERS = {  # of a function of ours, and where it is described
    "advantage_fn": (
        ("x", "args"),
        "def my_advantage(x: StepInputs, args), see docs/howto/algorithm.md",
    ),
    "policy_loss_fn": (
        ("x", "args"),
        "def my_loss(x: LossInputs, args), see docs/howto/algorithm.md",
    ),
}
_METHODS = {
    "selector": (
        "rows",
        "a rft.taskset.selectors.TaskSelector with rows(batch, first, count): its order follows "
        "from its arguments",
    ),
    "priority": (
        "__call__",
        "a class with __init__(args, seed) and __call__(candidate), see rft/buffer/priority.py",
    ),
}
# methods of Trinity-RFT's selectors and priority functions
_STATEFUL = frozenset({"get_indices", "default_config"})


class TrinityRegistry:
    """All plugins of one kind."""

    def __init__(self, name: str, kind_of: str) -> None:
        self.name = name
        self.kind = kind_of

    def register_module(
        self,
        module_name: str | None = None,
        module_cls: Any = None,
        force: bool = False,
        lazy: bool = False,
    ) -> Any:
        """A decorator, or with `module_cls` a call.  Raises PluginError for a shape that cannot be
        used, and for a name that is taken.
        """
        if force:
            raise PluginError(
                f"{self.name}.register_module(force=True): names are not replaced; choose another "
                f"one"
            )

        def register(obj: T) -> T:
            self._check(obj)
            mark: Callable[[T], T] = kind(self.kind)(module_name or obj.__name__)  # type: ignore[attr-defined]
            return mark(obj)

        return register if module_cls is None else register(module_cls)

    def get(self, module_key: str) -> Any:
        """What is registered under a name, as it was written.  Raises PluginError that lists what
        there is.
        """
        load_all()
        plugin = REGISTRY.get(self.kind, module_key)
        return original(plugin.obj)

    @property
    def modules(self) -> dict[str, Any]:
        return {p.name: p.obj for p in REGISTRY.all(self.kind)}

    def _check(self, obj: Any) -> None:
        name = getattr(obj, "__name__", repr(obj))
        if self.kind in _PARAMETERS:
            parameters, how = _PARAMETERS[self.kind]
            if (
                inspect.isclass(obj)
                or not callable(obj)
                or tuple(inspect.signature(obj).parameters)[:2] != parameters
            ):
                raise PluginError(
                    f"{self.name}: {name} has Trinity-RFT's shape, which sees one batch on one "
                    f"device; here such a part is a function of "
                    f"the whole step, so that cutting it changes no gradient.  Write {how}"
                )
        if self.kind in _METHODS:
            method, how = _METHODS[self.kind]
            if (
                not inspect.isclass(obj)
                or not hasattr(obj, method)
                or not _STATEFUL.isdisjoint(dir(obj))
            ):
                raise PluginError(
                    f"{self.name}: {name} has Trinity-RFT's shape, whose state a resumed run could "
                    f"not repeat.  Write {how}"
                )


WORKFLOWS = TrinityRegistry("WORKFLOWS", "workflow")
REWARD_FUNCTIONS = TrinityRegistry("REWARD_FUNCTIONS", "reward")
EXPERIENCE_OPERATORS = TrinityRegistry("EXPERIENCE_OPERATORS", "operator")
SELECTORS = TrinityRegistry("SELECTORS", "selector")
ADVANTAGE_FN = TrinityRegistry("ADVANTAGE_FN", "advantage_fn")
POLICY_LOSS_FN = TrinityRegistry("POLICY_LOSS_FN", "policy_loss_fn")
PRIORITY_FUNC = TrinityRegistry("PRIORITY_FUNC", "priority")


def stands_for(made: type, original: type) -> type:
    """Remember that `made`, which is given back, was made from `original`."""
    _ORIGINALS[made] = original
    return made


def original(plugin: Any) -> Any:
    """The class as its author wrote it."""
    return _ORIGINALS.get(plugin, plugin)


def get_logger(
    name: str | None = None, level: int | str | None = None, in_ray_actor: bool = False
) -> logging.Logger:
    """A logger of the standard library; where its lines go is the configuration's business."""
    logger = logging.getLogger(name or "rft.extras.migrate.compat")
    if level is not None:
        logger.setLevel(level)
    return logger


def Deprecated(cls: T) -> T:
    """Marks a class as outdated: making one warns."""
    initializer: Any = cls.__init__  # type: ignore[misc]

    def init(self: object, *args: object, **kwargs: object) -> None:
        warnings.warn(f"{type(self).__name__} is deprecated", DeprecationWarning, stacklevel=2)
        initializer(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    return cls
