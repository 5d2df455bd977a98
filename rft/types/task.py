"""`Task`, one row to attempt with the settings of its taskset, and `SamplingArgs`."""

from __future__ import annotations

import copy
from typing import Any, get_type_hints

from msgspec import Struct, field
from msgspec.structs import replace

from rft.types.images import Image


class SamplingArgs(Struct, frozen=True, kw_only=True, gc=False):
    """Sampling settings.

    The defaults sample the policy itself, as on-policy losses require.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be in (0, 1]")
        if self.top_k != -1 and not 1 <= self.top_k < 1 << 31:
            raise ValueError(f"top_k {self.top_k}: must be -1 (off) or from 1 to 2**31 - 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p}: must be in [0, 1]")
        if self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens}, max_tokens {self.max_tokens}: need 0 <= min <= max "
                f"and max >= 1"
            )
        if isinstance(self.stop, str):
            raise ValueError(f"stop {self.stop!r}: must be a list of texts, [{self.stop!r}]")
        if self.seed is not None and not -1 << 63 <= self.seed < 1 << 63:
            raise ValueError(
                f"seed {self.seed}: must be from -2**63 to 2**63 - 1, as the ledger keeps it"
            )

    @property
    def reproducible(self) -> bool:
        """Whether a trainer can compute the same log-probs from the temperature alone."""
        return (
            self.temperature > 0
            and self.top_p == 1
            and self.top_k == -1
            and self.min_p == 0
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and self.min_tokens == 0
        )


def plain_text(content: Any) -> str | None:
    """Return the text of a message's content (a text, null or text parts), or None for other parts
    such as images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") == "text" for p in content
    ):
        texts = [p.get("text", "") for p in content]
        if all(isinstance(t, str) for t in texts):
            return "".join(texts)
        return None
    return None


class Task(Struct, frozen=True, kw_only=True):
    """One row of a taskset.

    Example: Task(taskset="sums", index=3, prompt="What is 1+1?", truth="2",
    workflow="math_workflow", reward="exact_answer")
    """

    taskset: str
    index: int  # row of the taskset
    row: dict[str, Any] = field(default_factory=dict)  # the whole row, JSON
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()  # OpenAI form; wins over `prompt`
    images: tuple[Image, ...] = ()  # that the messages show, each once
    tools: tuple[dict[str, Any], ...] = ()
    system_prompt: str | None = None
    chat_template: str | None = None  # Jinja text; None = the engine's
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # over the engine's
    # left | right | middle: where to cut an opening prompt that is too long
    prompt_truncation: str = "error"
    truth: Any = None  # the gold answer, JSON
    workflow: str
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward: str | None = None
    reward_args: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingArgs = SamplingArgs()
    num_runs: int = 1
    is_eval: bool = False

    def __post_init__(self) -> None:
        if self.num_runs < 1:
            raise ValueError(
                f"task {self.taskset}[{self.index}]: num_runs {self.num_runs} must be at least 1"
            )
        if self.prompt is None and not self.messages and not self.row:
            raise ValueError(
                f"task {self.taskset}[{self.index}]: has neither prompt, messages nor row"
            )

    def chat(self) -> list[dict[str, Any]]:
        """Return the opening messages of a conversation about this task."""
        if self.messages:
            return [dict(m) for m in self.messages]
        if self.prompt is None:
            raise ValueError(f"task {self.taskset}[{self.index}] has no prompt and no messages")
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.prompt}]

    def deep_copy(self) -> Task:
        """Copy the task for a workflow or a reward, which may change the copy's containers."""
        copies = {}
        for name in _CONTAINERS:
            value = getattr(self, name)
            if value and isinstance(value, dict | list | tuple):
                copies[name] = copy.deepcopy(value)
        return replace(self, **copies)


# fields that may hold a container
_PLAIN_TYPES = {str, str | None, int, bool, SamplingArgs, tuple[Image, ...]}
_CONTAINERS = tuple(n for n, t in get_type_hints(Task).items() if t not in _PLAIN_TYPES)
