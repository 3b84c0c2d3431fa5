"""The budget of the advisor, and what it has spent."""

import re
import time
from dataclasses import dataclass, replace

from glocal.core.checks import require_instance, require_number
from glocal.core.errors import InputError
from glocal.wire import Ledger

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_MAX_AMOUNT = 1e24


@dataclass(frozen=True)
class Budget:
    """A limit on bytes sent, on seconds, or on both; None means no limit.

    >>> Budget(bytes=10**6).seconds is None
    True
    """

    bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("bytes", self.bytes), ("seconds", self.seconds)):
            if limit is not None:
                require_number(
                    f"advise: the budget in {name}",
                    limit,
                    lambda amount: 0 < amount < _MAX_AMOUNT,
                    f"above 0 and below {_MAX_AMOUNT:.0e}",
                )

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """A budget from text: a number and a unit of bytes or seconds.

        >>> Budget.parse("20 MB"), Budget.parse("1.5 min")
        (Budget(bytes=20000000, seconds=None), Budget(bytes=None, seconds=90.0))
        """
        require_instance("advise: the budget", text, str, "a text such as '20 MB' or '60 s'")
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
        if match:
            amount, unit = min(float(match[1]), _MAX_AMOUNT), match[2]
            if unit in _BYTES:
                return cls(bytes=round(amount * _BYTES[unit]))
            if unit in _SECONDS:
                return cls(seconds=amount * _SECONDS[unit])
        raise InputError(
            f"advise: the budget is '{text}'; "
            "bytes or seconds were expected, such as '20 MB' or '60 s'"
        )


@dataclass(frozen=True)
class Cost:
    """Traffic, client updates and rounds so far, and the time of the start."""

    started_at: float
    ledger: Ledger = Ledger()
    updates: int = 0
    rounds: int = 0

    @classmethod
    def start(cls) -> "Cost":
        """No cost yet; the clock starts now."""
        return cls(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started_at

    def add(self, ledger: Ledger, *, updates: int = 0, rounds: int = 0) -> "Cost":
        """This cost and more traffic, updates and rounds."""
        return replace(
            self,
            ledger=self.ledger + ledger,
            updates=self.updates + updates,
            rounds=self.rounds + rounds,
        )

    def within(self, budget: Budget, *, share: float = 1.0, extra_bytes: int = 0) -> bool:
        """Whether this cost plus `extra_bytes` is within a share of the budget."""
        sent = self.ledger.total.bytes + extra_bytes
        if budget.bytes is not None and sent > share * budget.bytes:
            return False
        return budget.seconds is None or self.seconds < share * budget.seconds
