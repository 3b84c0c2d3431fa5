"""What an answer may cost, and what it has cost so far."""

import re
import time
from dataclasses import dataclass, replace

from glocal.core.errors import InputError
from glocal.wire import Ledger

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_MAX_AMOUNT = 1e24


@dataclass(frozen=True)
class Budget:
    """So many bytes on the wire, so many seconds, or both; None is without a limit."""

    bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("bytes", self.bytes), ("seconds", self.seconds)):
            if limit is not None and not 0 < limit < _MAX_AMOUNT:
                raise InputError(
                    f"advise: a budget of {limit:g} {name} is none; it must be above 0 and below {_MAX_AMOUNT:.0e}"
                )

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """A budget as it is written.

        >>> Budget.parse("20 MB"), Budget.parse("1.5 min")
        (Budget(bytes=20000000, seconds=None), Budget(bytes=None, seconds=90.0))
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
        amount, unit = (min(float(found[1]), _MAX_AMOUNT), found[2]) if found else (0.0, "")
        if unit in _BYTES:
            return cls(bytes=round(amount * _BYTES[unit]))
        if unit in _SECONDS:
            return cls(seconds=amount * _SECONDS[unit])
        raise InputError(
            f"advise: the budget is '{text}'; bytes or seconds were expected, such as '20 MB' or '60 s'"
        )


@dataclass(frozen=True)
class Cost:
    """What crossed the wire, how often a device trained, and since when."""

    started_at: float
    ledger: Ledger = Ledger()
    updates: int = 0
    rounds: int = 0

    @classmethod
    def start(cls) -> "Cost":
        """At the beginning."""
        return cls(time.perf_counter())

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.perf_counter() - self.started_at

    def add(self, ledger: Ledger, *, updates: int = 0, rounds: int = 0) -> "Cost":
        """This and some more."""
        return replace(
            self,
            ledger=self.ledger + ledger,
            updates=self.updates + updates,
            rounds=self.rounds + rounds,
        )

    def within(self, budget: Budget, *, share: float = 1.0, extra_bytes: int = 0) -> bool:
        """Whether a share of a budget is not yet used up, with so many bytes more."""
        in_bytes = (
            budget.bytes is None or self.ledger.total.bytes + extra_bytes <= share * budget.bytes
        )
        return in_bytes and (budget.seconds is None or self.seconds < share * budget.seconds)
