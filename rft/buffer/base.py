"""Records that the parts of the buffer exchange."""

from __future__ import annotations

from msgspec import Struct, field


class LineageStart(Struct, frozen=True, kw_only=True):
    """The state of the buffer at the start of a lineage."""

    lineage: int
    orphaned: int  # rows written by weights that the loaded manifest does not descend from
    available: int  # rows ready to be leased
    cursor: int  # explore batch to continue with


class Audit(Struct, frozen=True, kw_only=True):
    """Counts of acknowledged rows: acked = used + leased + available + waiting + discarded.

    Answers of served sessions count one by one while they wait for a reward (`waiting`), and when
    they never become rows (`discarded`: unrewarded, withdrawn, ...); answers of an accepted session
    count as the rows of its group.

    Example: Audit(acked=10, used=4, leased=2, available=3, discarded={"failed": 1}, ...).balanced
    is True
    """

    acked: int  # from the groups' headers, which count rows at acknowledgement
    used: int  # rows with `max_uses` counted uses
    leased: int
    available: int
    # by reason; called "explained" in JSON and in the ledger
    discarded: dict[str, int] = field(name="explained")
    used_twice: int  # rows with more than `max_uses` counted uses; must be 0
    num_uses: int  # counted uses
    digest: str  # of the counted uses, see `rft.buffer.derived_state.digest`
    version: str = ""  # "lineage:step" of the version that uses are counted for
    # "lineage:step" of the newest checkpoint, from which a restart continues; "" = none
    checkpoint: str = ""
    # number of rows by state: used, available, orphaned
    after_restart: dict[str, int] = field(default_factory=dict)
    manifests: int = 0  # number of compared checkpoint manifests
    problems: tuple[str, ...] = field(default_factory=tuple)
    waiting: int = 0  # answers of sessions that may still be rewarded

    @property
    def balanced(self) -> bool:
        return self.acked == self.used + self.leased + self.available + self.waiting + sum(
            self.discarded.values()
        )

    @property
    def ok(self) -> bool:
        return self.balanced and not self.used_twice and not self.problems
