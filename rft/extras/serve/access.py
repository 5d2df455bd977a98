"""Who may ask, and how much: keys of clients, known by their hashes alone, and limits for each key.

Depends on no HTTP.  Invariant: what was refused has taken nothing; a key is compared by its hash
and never shown.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rft.errors import SetupError
from rft.explorer.service_settings import ServeConfig, ServeRuntime
from rft.files.disk import read_regular
from rft.secrets import learn_secrets
from rft.workflow.endpoint_sessions import hashed

ENVIRONMENT = "RFT_SERVE_KEY"
LEAST_KEY = 16  # characters of a key in the environment
_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,80})\s+(?P<hash>[0-9a-f]{64})")
_MOST = 1 << 20


def clients(settings: ServeRuntime) -> dict[str, str]:
    """{hash of the key: client}.  Raises SetupError where there is no key, or one that cannot be
    read or is too short.
    """
    keys: dict[str, str] = {}
    if (file := settings.config.clients_file) is not None:
        try:
            lines = read_regular(Path(file), _MOST).decode().splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise SetupError(f"explorer.serve.clients_file {file} cannot be read: {e}") from e
        for number, line in enumerate(lines, 1):
            if not (text := line.partition("#")[0].strip()):
                continue
            if (match := _LINE.fullmatch(text)) is None:
                raise SetupError(
                    f"{file}, line {number}: write NAME and the SHA-256 of its "
                    f"key as 64 hex digits; `rft serve --new-key "
                    "NAME` makes both"
                )
            keys[match["hash"]] = match["name"]
    if key := os.environ.get(ENVIRONMENT):
        if len(key) < LEAST_KEY:
            raise SetupError(
                f"the key in {ENVIRONMENT} has {len(key)} characters; use a random one of at least "
                f"{LEAST_KEY}"
            )
        learn_secrets([key])
        keys[hashed(key)] = "environment"
    if not keys:
        raise SetupError(
            f"no client key: set {ENVIRONMENT} to a random key, or name "
            f"explorer.serve.clients_file (`rft serve --new-key NAME` makes a "
            "line for it)"
        )
    return keys


def line_of(name: str, key: str) -> str:
    """What `clients_file` says of a client."""
    return f"{name} {hashed(key)}"


@dataclass
class TokenBucket:
    """`per_minute` units come back each minute, and no more than that are there at a time."""

    per_minute: float
    units: float
    filled_at: float

    def fill(self, now: float) -> None:
        self.units = min(
            self.per_minute, self.units + (now - self.filled_at) * self.per_minute / 60
        )
        self.filled_at = now

    def wait_s(self, units: float) -> float:
        """How long until so many are there; 0: they are."""
        return max(0.0, (units - self.units) * 60 / self.per_minute)


class TooMuch(Exception):
    """A limit is reached; `retry_s` until it is not any more."""

    def __init__(self, what: str, retry_s: float) -> None:
        super().__init__(what)
        self.retry_s = retry_s


class Quota:
    """The limits of one key."""

    def __init__(self, limits: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self.clock = clock
        now = clock()
        self._requests = TokenBucket(limits.requests_per_minute, limits.requests_per_minute, now)
        self._tokens = TokenBucket(limits.tokens_per_minute, limits.tokens_per_minute, now)
        self._under_way = 0

    def check(self) -> None:
        """Raises TooMuch where one more request is too many."""
        if self._under_way >= self._limits.max_concurrent:
            reason = f"{self._limits.max_concurrent} requests of this key are under way"
            raise TooMuch(reason, 1.0)
        now = self.clock()
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            bucket.fill(now)
            if wait := bucket.wait_s(1):
                reason = f"{bucket.per_minute} {what} a minute are the limit of this key"
                raise TooMuch(reason, wait)

    @contextmanager
    def request(self) -> Iterator[None]:
        """While one request is under way, which was checked."""
        self._requests.units -= 1
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def spend(self, tokens: int) -> None:
        """What an answer has cost; more than there was is paid back by waiting."""
        self._tokens.fill(self.clock())
        self._tokens.units -= tokens
