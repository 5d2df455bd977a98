"""Trinity-RFT's registries: `register_module` marks a plugin of ours.

Invariant: what is registered can be named in a configuration, or is refused at once with what to write instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rft.errors import PluginError
from rft.plugins import REGISTRY, kind, load_all

T = TypeVar("T")
_PARAMETERS = {  # of a function of ours, and where it is described
    "advantage_fn": (("x", "args"), "def my_advantage(x: StepInputs, args), see docs/howto/algorithm.md"),
    "policy_loss_fn": (("x", "args"), "def my_loss(x: LossInputs, args), see docs/howto/algorithm.md"),
}
_METHODS = {
    "selector": ("rows", "a rft.taskset.selectors.Selector with rows(batch, first, count): its order follows from its arguments"),
    "priority": ("__call__", "a class with __init__(args, seed) and __call__(candidate), see rft/buffer/priority.py"),
}


class Registry:
    """All plugins of one kind."""

    def __init__(self, name: str, kind_of: str) -> None:
        self.name, self.kind = name, kind_of

    def register_module(
        self, module_name: str | None = None, module_cls: Any = None, force: bool = False, lazy: bool = False
    ) -> Any:
        """A decorator, or with `module_cls` a call.  Raises PluginError for a shape that cannot be used, and for a name that is taken."""
        if force:
            raise PluginError(f"{self.name}.register_module(force=True): names are not replaced; choose another one")

        def register(obj: T) -> T:
            self._check(obj)
            mark: Callable[[T], T] = kind(self.kind)(module_name or obj.__name__)  # type: ignore[attr-defined]
            return mark(obj)

        return register if module_cls is None else register(module_cls)

    def get(self, module_key: str) -> Any:
        """What is registered under a name, as it was written.  Raises PluginError that lists what there is."""
        load_all()
        plugin = REGISTRY.get(self.kind, module_key)
        return getattr(plugin.obj, "theirs", plugin.obj)

    @property
    def modules(self) -> dict[str, Any]:
        return {p.name: p.obj for p in REGISTRY.all(self.kind)}

    def _check(self, obj: Any) -> None:
        name = getattr(obj, "__name__", repr(obj))
        if self.kind in _PARAMETERS:
            wanted, how = _PARAMETERS[self.kind]
            if inspect.isclass(obj) or not callable(obj) or tuple(inspect.signature(obj).parameters)[:2] != wanted:
                raise PluginError(
                    f"{self.name}: {name} has Trinity-RFT's shape, which sees one batch on one device; here such a part is a function of "
                    f"the whole step, so that cutting it changes no gradient.  Write {how}"
                )
        if self.kind in _METHODS:
            method, how = _METHODS[self.kind]
            if (
                not inspect.isclass(obj)
                or not hasattr(obj, method)
                or hasattr(obj, "get_indices")
                or hasattr(obj, "default_config")
            ):
                raise PluginError(
                    f"{self.name}: {name} has Trinity-RFT's shape, whose state a resumed run could not repeat.  Write {how}"
                )


WORKFLOWS = Registry("WORKFLOWS", "workflow")
REWARD_FUNCTIONS = Registry("REWARD_FUNCTIONS", "reward")
EXPERIENCE_OPERATORS = Registry("EXPERIENCE_OPERATORS", "operator")
SELECTORS = Registry("SELECTORS", "selector")
ADVANTAGE_FN = Registry("ADVANTAGE_FN", "advantage_fn")
POLICY_LOSS_FN = Registry("POLICY_LOSS_FN", "policy_loss_fn")
PRIORITY_FUNC = Registry("PRIORITY_FUNC", "priority")
