"""Set up logging: one line per event, secrets redacted at the sink; and escape texts of models and
data for a terminal (`safe`).

Invariant: every line passes `redact` before it reaches a log file or the console.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

_SECRET_NAME = re.compile(
    r"secret|credential|creds?$|passw(?:or)?d|passphrase|passcode|(?-i:[a-z](?:Pass|Pwd|Auth|Dsn))$|(?:^|[_-])(?:pass|pwd|auth|jwt|dsn|sas)$|authorization|cookie|bearer|webhook"
    r"|connection_?string|(?:api|access|private|account|signing|encryption|license|master|auth|service|ssh)[_-]?keys?$|tokens?$",
    re.IGNORECASE,
)
# environment variables; a lower-case key names a column
_KEY_VARIABLE = re.compile(r"[A-Z0-9_]*_KEYS?")
_NOT_SECRET = re.compile(
    r"(max|min|num|total|pad|eos|bos|response|prompt|new|per|of|mean|ids?)_?tokens?$|tokenizer|_envs?$",
    re.IGNORECASE,
)
_FREE = re.compile(r"(?:\w+_)?(?:env|environ|environment|env_vars|headers?|cookies)", re.IGNORECASE)
_HARMLESS = re.compile(
    r"(?:OMP|MKL|OPENBLAS|NUMEXPR|VECLIB)_NUM_THREADS|CUDA_\w+|NCCL_\w+|GLOO_\w+|VLLM_\w+|TORCH\w*|PYTORCH_\w+|RAY_\w+|HF_\w+|TRANSFORMERS_\w+"
    r"|TOKENIZERS_PARALLELISM|PYTHON\w*|PATH|LD_LIBRARY_PATH|HOME|USER|LANG|LC_\w+|TZ|TERM|TMPDIR|NO_PROXY|content-type|accept|user-agent",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"[-+]?[\d.]{1,15}|true|false|yes|no|on|off|none|null|", re.IGNORECASE)
_URL_PASSWORD = re.compile(
    r"(?P<head>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://[^/\s:@]*:)(?P<secret>[^\s/\"']+)(?=@)",
    re.IGNORECASE,
)
_URL_TOKEN = re.compile(
    r"(?P<head>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://)(?P<secret>[^\s/:@\"']{12,}+)(?=@)",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"(?P<head>\b(?:bearer|basic)[ "
    r"]+(?=\S*(?-i:[A-Z\d]))|[?&;](?:sig|token|access_token|api[-_]?key|key|secret|password|pwd|auth)="
    r"|\b(?:AccountKey|SharedAccessKey|Password|Pwd)=)(?P<secret>[^\s&;\"']{6,})",
    re.IGNORECASE,
)
_KNOWN_FORM = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk[-_][A-Za-z0-9_-]{16,}|[rp]k_(?:live|test)_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|xox[a-z]-[\w-]{8,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}|nvapi-[\w-]{16,}|r8_[A-Za-z0-9]{20,}|dop_v1_[a-f0-9]{32,}|SG\.[\w-]{16,}\.[\w-]{16,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s\\-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_NAMES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
REDACTED = "***"
_values: set[str] = set()


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a config key, header or environment variable of this name is secret."""
    named = _SECRET_NAME.search(name) is not None or _KEY_VARIABLE.fullmatch(name) is not None
    return named and not _NOT_SECRET.search(name)


@lru_cache(maxsize=4096)
def is_free_map(name: str) -> bool:
    """Return whether a config key contains environment variables or headers, of arbitrary names."""
    return _FREE.fullmatch(name) is not None


def is_harmless(name: str, value: object) -> bool:
    """Return whether an environment variable or header may be stored: a number, a switch, or a name
    listed as harmless.
    """
    if is_secret_name(name):
        return False
    return (
        not isinstance(value, str)
        or _PLAIN.fullmatch(value) is not None
        or _HARMLESS.fullmatch(name) is not None
    )


def looks_random(value: str) -> bool:
    """Return whether a text is more likely a secret than a word, so that it must be redacted."""
    return (
        len(value) >= 8
        and not value.startswith(("/", "."))
        and any(c.isdigit() for c in value)
        and any(c.isalpha() for c in value)
    )


def learn_secrets(values: Iterable[str]) -> None:
    """Remember secret values, which `redact` then removes everywhere."""
    _values.update(v for v in values if len(v) >= 6)


def url_passwords(text: str) -> list[str]:
    """Return the passwords and tokens of the URLs in `text`."""
    return [m["secret"] for form in (_URL_PASSWORD, _URL_TOKEN) for m in form.finditer(text)]


def learnt_secrets() -> tuple[str, ...]:
    """Return the values given to `learn_secrets` in this process, for its child processes."""
    return tuple(_values)


def learn_environment() -> None:
    """Remember the values of secret environment variables, except existing paths (PWD)."""
    learn_secrets(v for k, v in os.environ.items() if is_secret_name(k) and not _is_path(v))


def _is_path(value: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # too long for a path
        return Path(value).exists()
    return False


def redact(text: str) -> str:
    """Replace learnt secrets, secrets of URLs and headers, and tokens of a known form by ***."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    for form in (_URL_PASSWORD, _URL_TOKEN, _NAMED):
        text = form.sub(lambda m: m["head"] + REDACTED, text)
    return _KNOWN_FORM.sub(REDACTED, text)


def safe(text: str, *, lines: bool = False) -> str:
    """Escape characters that could drive or deceive a terminal; `lines` keeps line breaks and tabs."""

    def escaped(m: re.Match[str]) -> str:
        char = m[0]
        if lines and char in "\n\t":
            return char
        return _NAMES.get(char) or (
            f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
        )

    return _CONTROL.sub(escaped, text)


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def node_folder(logs: Path, by_node: bool) -> Path:
    """Return the folder for the files of this machine's processes: `logs`, or a subfolder named
    like the machine.
    """
    return logs / os.uname().nodename if by_node else logs


class _LogFile(logging.FileHandler):
    """A log file whose write errors are reported once and do not end the run."""

    lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._lose(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as e:
            self._lose(e)

    def _lose(self, error: OSError) -> None:
        if not self.lost:
            self.lost = True
            with contextlib.suppress(OSError):  # the terminal may be a file on the same disk
                print(
                    f"{self.baseFilename} cannot be written: {error.strerror}.  What follows is "
                    f"not logged there.",
                    file=sys.stderr,
                )


class ErrorTeller(logging.Handler):
    """Passes errors to the terminal as single lines, without their tracebacks."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        lines = redact(record.getMessage()).strip().splitlines()
        self._tell(safe(lines[0]) if lines else "")


class OncePerMinute(logging.Filter):
    """Reduces errors of `kinds`, which any client of a port can cause, to one line a minute,
    without traceback and not as an error.
    """

    def __init__(
        self, kinds: tuple[type[BaseException], ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._kinds = kinds
        self._clock = clock
        self._next = -math.inf
        self._more = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, self._kinds):
            return True
        if self._clock() < self._next:
            self._more += 1
            return False
        more = f"; {self._more} more since the line before" if self._more else ""
        record.msg = f"{record.getMessage()}: {safe(str(error))[:200]}{more}"
        record.args = record.exc_info = None
        record.levelno = logging.INFO
        record.levelname = "INFO"
        self._next, self._more = self._clock() + 60.0, 0
        return True


def http_log(name: str) -> logging.Logger:
    """Return the log of an aiohttp server; invalid HTTP takes at most a line a minute."""
    from aiohttp.http_exceptions import HttpProcessingError

    logger = logging.getLogger(name)
    if not logger.filters:
        logger.addFilter(OncePerMinute((HttpProcessingError,)))
    return logger


def to_file(path: Path, level: str = "INFO") -> logging.Handler:
    """Log this process to `path`; return the handler (close it with `logging.shutdown`)."""
    learn_environment()
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_Redacting("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request of a judge
    return handler
