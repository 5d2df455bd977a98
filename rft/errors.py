"""All errors that `rft` raises on purpose.

A message says what was given, what is allowed, and what to do.  Exit codes of the program: 0 done,
2 configuration, 3 environment, 4 run failed, 130 interrupted.  `assert` is for internal invariants;
plugin authors raise ordinary exceptions.
"""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar


class RftError(Exception):
    """Base of all errors that `rft` raises on purpose."""

    exit_code: ClassVar[int] = 4

    def _render_traceback_(self) -> list[str]:
        """IPython prints these lines in place of a traceback: the message says what to do."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(RftError):
    """The configuration is wrong.

    `key`: full path of the wrong key, if any.
    """

    exit_code = 2

    def __init__(self, message: str, *, key: str = "", given: object = None) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.given = given
        self.message = message

    @property
    def errors(self) -> list[ConfigError]:
        """Single errors; several of `ConfigErrors`."""
        return [self]

    def __reduce__(self) -> tuple[object, ...]:
        return (_config_error, (self.message, self.key, self.given))


def _config_error(message: str, key: str, given: object) -> ConfigError:
    return ConfigError(message, key=key, given=given)


class ConfigErrors(ConfigError):
    """Several configuration errors, reported together."""

    def __init__(self, errors: list[ConfigError]) -> None:
        super().__init__("\n".join(str(e) for e in errors))
        self._errors = errors

    @property
    def errors(self) -> list[ConfigError]:
        return self._errors

    def __reduce__(self) -> tuple[object, ...]:
        return (ConfigErrors, (self.errors,))


def raise_all(errors: Sequence[ConfigError]) -> None:
    """Raise one error, or several as ConfigErrors; nothing without errors."""
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(list(errors))


def nearest(name: object, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the question whether a similar name was meant, or ""."""
    near = most_similar(str(name), names, cutoff)
    return f"  Did you mean {' or '.join(near)}?" if near else ""


def most_similar(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the names of the same letters in another order, else all that are equally similar."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=cutoff)
    if swapped := [n for n in near if sorted(n) == sorted(name)]:
        return swapped[:1]
    ratio = {n: difflib.SequenceMatcher(None, n, name).ratio() for n in near}
    return [n for n in near if ratio[n] == ratio[near[0]]]


class PluginError(ConfigError):
    """A plugin cannot be found or imported; the message carries its traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (PluginError, (self.message,))


class SetupError(RftError):
    """The machine lacks something the configuration needs (a GPU, a library, a free port, memory)."""

    exit_code = 3


class RunFailed(RftError):
    """A part of the run failed; the run can be resumed from its last checkpoint."""


class OutOfMemory(RunFailed):
    """A process ran out of memory; the message names the process and the remedy."""


_NO_MEMORY = (
    "can't allocate memory",  # torch's allocator on CPU
    "could not create a primitive",  # oneDNN: its scratch memory
    "std::bad_alloc",
    "can't start new thread",  # no room for its stack
    "out of memory",  # CUDA and NCCL, beside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of a library means that memory is used up."""
    # torch's on a GPU is called OutOfMemoryError
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


class RayFailed(RunFailed):
    """A process of Ray has ended, is stopped or does not answer; the message names it."""


class DeadlineExceeded(RunFailed):
    """A wait passed its deadline; the message names the wait and its length."""


class BufferFailed(RunFailed):
    """The buffer cannot keep its guarantees."""


class DiskFull(BufferFailed):
    """A disk of the run is full, by space, quota or inodes.

    Committed data is kept; the same command resumes once there is space.
    """


class PayloadDamaged(BufferFailed):
    """Acknowledged payload is missing or changed; the message names its place."""


class IdConflict(BufferFailed):
    """An experience id was appended twice with different content."""


class FrameRejected(BufferFailed):
    """An appended frame holds rows that cannot be trained; the message begins with the reason."""


class Fenced(BufferFailed):
    """Another trainer has taken over the buffer; this one must stop."""


class ShortBatch(RunFailed):
    """The buffer cannot fill a train batch; the message names what is missing."""


class WeightSyncFailed(RunFailed):
    """Engines could not load a weight version, or failed its verification."""


class CheckpointInvalid(RunFailed):
    """A checkpoint is damaged or does not fit; the message names the file."""


class EngineFailed(RunFailed):
    """An engine died or answered nonsense."""


class EngineStalled(EngineFailed):
    """An engine is alive and has work, but makes no progress."""


class Interrupted(RftError):
    """A person asked the run to stop."""

    exit_code = 130


class PluginStopped(RuntimeError):
    """Code of a plugin tried to end the program."""


PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple(
    p
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (p := sysconfig.get_paths().get(name))
)


def is_ours(file: str) -> bool:
    """Whether a file is part of rft, of Python or of an installed library."""
    return file.startswith((PACKAGE, "<frozen", *_LIBRARIES))


def own_lines(error: BaseException) -> str:
    """Format a traceback for the author of a plugin, from the first foreign line on, if any."""
    # PluginStopped reports the exit of its cause
    cause = error.__cause__ if isinstance(error, PluginStopped) else None
    lines = complete = (cause or error).__traceback__
    while lines is not None and is_ours(lines.tb_frame.f_code.co_filename):
        lines = lines.tb_next
    shown = complete if lines is None and not isinstance(error, SyntaxError) else lines
    return "".join(
        traceback.format_exception(type(error), error, shown, chain=cause is None)
    ).rstrip()
