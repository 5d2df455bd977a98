"""Every error a person can meet, on one page.

A message says what was given, what is allowed, and what to do.  `exit_code` is what the program
ends with: 0 done, 2 configuration, 3 environment, 4 run failed, 130 interrupted.
`assert` is for our own invariants; plugin authors raise plain exceptions.
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


class ConfigError(RftError):
    """The configuration is wrong.  `key` is the full path of the offending key, where there is one."""

    exit_code = 2

    def __init__(self, message: str, *, key: str = "", given: object = None) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.given = given
        self.message = message

    @property
    def errors(self) -> list[ConfigError]:
        """Every single error; several of `ConfigErrors`."""
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
    """Raises what was collected, if anything was: the one error, or all together."""
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(list(errors))


def nearest(given: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message: a question with the nearest of the `known` names, or nothing."""
    near = difflib.get_close_matches(str(given), list(known), n=1, cutoff=cutoff)
    return f"  Did you mean {near[0]}?" if near else ""


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
    """Whether a library says that memory is used up; few of them use MemoryError."""
    # torch's, on a GPU
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


class RayFailed(RunFailed):
    """A process of Ray has ended, is stopped or does not answer; the message names it."""


class DeadlineExceeded(RunFailed):
    """A wait passed its deadline.  The message names who waited for whom and how long."""


class BufferFailed(RunFailed):
    """The buffer cannot keep its promise."""


class DiskFull(BufferFailed):
    """No space, quota or file number is left where the run writes: ledger, checkpoint, metrics,
    samples, log or configuration.

    What is committed stays; the same command goes on from it once there is space.
    """


class PayloadDamaged(BufferFailed):
    """Payload that was acknowledged is missing, or not as it was stored; the message names where it
    should be.
    """


class IdConflict(BufferFailed):
    """An experience id was appended twice with different content."""


class FrameRejected(BufferFailed):
    """An appended frame holds what no trainer could use; the message begins with the counted
    reason.
    """


class Fenced(BufferFailed):
    """Another trainer has taken over the buffer; this one must stop."""


class ShortBatch(RunFailed):
    """The buffer cannot fill a train batch any more; the message says who is missing."""


class WeightSyncFailed(RunFailed):
    """Engines could not be brought to a weight version, or could not prove that they serve it."""


class CheckpointInvalid(RunFailed):
    """A checkpoint is damaged or does not fit; the message names the file."""


class EngineFailed(RunFailed):
    """An engine died or answered nonsense."""


class EngineStalled(EngineFailed):
    """An engine lives, has work and does not get on with it."""


class Interrupted(RftError):
    """A person asked the run to stop."""

    exit_code = 130


class PluginStopped(RuntimeError):
    """Code of a plugin raised what would have ended the program."""


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
    """The traceback for the author of a plugin: from the first line on that is not ours, all of it
    where every line is.
    """
    # it says what its cause did
    cause = error.__cause__ if isinstance(error, PluginStopped) else None
    lines = whole = (cause or error).__traceback__
    while lines is not None and is_ours(lines.tb_frame.f_code.co_filename):
        lines = lines.tb_next
    shown = whole if lines is None and not isinstance(error, SyntaxError) else lines
    return "".join(
        traceback.format_exception(type(error), error, shown, chain=cause is None)
    ).rstrip()
