"""What users write: an algorithm with its task, its optimizer and its settings, as a value."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from glocal.algorithms.contract import Algorithm, unweighted
from glocal.core.errors import InputError, describe_value, suggest_name
from glocal.core.optimizers import Optimizer
from glocal.core.task import Task
from glocal.core.torch_optimizers import as_optimizer
from glocal.core.training import Objective

_WEIGHTINGS: dict[str, Callable[[Algorithm], Algorithm]] = {
    "examples": lambda algorithm: algorithm,
    "equal": unweighted,
}


@dataclass(frozen=True)
class TaskAlgorithm:
    """An algorithm on a task; a subclass makes its functions.

    `optimizer` is `SGD`, `Adam` or `AdamW`, or one of torch's with its settings, such as
    `functools.partial(torch.optim.SGD, lr=0.1)`. Clients weigh by their "examples", or "equal".
    """

    task: Task
    _: KW_ONLY
    optimizer: Any  # an Optimizer; torch's are translated
    weighting: str = field(default="examples")

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task):
            raise InputError(
                f"{self.name}: its task is {describe_value(self.task)}; "
                "a glocal.Task was expected, such as glocal.classification(model)"
            )
        object.__setattr__(self, "optimizer", as_optimizer(self.optimizer))
        if self.weighting not in _WEIGHTINGS:
            raise InputError(
                f"{self.name}: weighting is {describe_value(self.weighting)}; "
                f"{suggest_name(str(self.weighting), _WEIGHTINGS)}"
            )

    def __repr__(self) -> str:
        values = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)[1:]]
        return f"{self.name}({self.task!r}, {', '.join(values)})"

    @property
    def name(self) -> str:
        """The algorithm's name, for messages and tables."""
        return type(self).__name__

    def functions(self, objective: Objective, num_clients: int) -> Algorithm:
        """Its functions for one client and for the server."""
        return _WEIGHTINGS[self.weighting](self.make(objective, self.optimizer, num_clients))

    def make(self, objective: Objective, optimizer: Optimizer, num_clients: int) -> Algorithm:
        """The functions, without the weighting: what a subclass writes."""
        raise NotImplementedError(f"{self.name} has no make()")


def require_numbers(algorithm: TaskAlgorithm, *names: str) -> None:
    """Refuse settings that are not finite numbers of at least 0."""
    for name in names:
        value = getattr(algorithm, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise InputError(
                f"{algorithm.name}: {name} is {describe_value(value)}; "
                "a number of at least 0 was expected"
            )
