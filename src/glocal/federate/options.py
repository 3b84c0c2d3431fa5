"""How an experiment is evaluated, and how it is run: only the former may change its numbers."""

from dataclasses import dataclass, replace

import torch

from glocal.core.bounds import MAX_CLIENTS, MAX_ROUNDS, MAX_WORKERS, count_field, require_counts
from glocal.core.checks import require_choice, require_flag, require_instance
from glocal.core.errors import InputError, describe_value
from glocal.core.metric import Metric
from glocal.core.task import Task
from glocal.engines import EngineConfig

SAVES = ("everything", "metrics")


@dataclass(frozen=True)
class Evaluation:
    """When clients are evaluated, which of them, and which round is tested.

    `select` decides which round is tested: the "last", the "best" on validation data by the task's
    first metric, or by another one, such as "max auroc" or "min loss". Validation is after `every`
    rounds, and costs bytes. It asks at most `clients` clients, drawn from the seed; None asks all.
    The final test asks all.

    Without `new_test` there is no New Test, for which all clients would have to send their models.
    Its ensemble has at most `new_test_members` models, drawn from the seed.

    >>> Evaluation(every=5, select="max accuracy").selects
    True
    """

    every: int = count_field(10, maximum=MAX_ROUNDS)
    select: str = "last"
    clients: int | None = count_field(1_000, maximum=MAX_CLIENTS)
    new_test: bool = True
    new_test_members: int = count_field(200, maximum=MAX_CLIENTS)

    def __post_init__(self) -> None:
        words = self.select.split(" ") if isinstance(self.select, str) else []
        has_direction = len(words) == 2 and words[0] in ("max", "min") and words[1]
        if words not in (["last"], ["best"]) and not has_direction:
            raise InputError(
                f"evaluation: select is {describe_value(self.select)}; 'last', 'best' or a metric "
                "with its direction, such as 'max accuracy' or 'min loss', was expected"
            )
        require_flag("evaluation: new_test", self.new_test)
        require_counts("evaluation: ", self)

    @property
    def selects(self) -> bool:
        """Whether an earlier round than the last may be tested."""
        return self.select != "last"

    def criterion(self, task: Task) -> Metric:
        """The metric that rounds are selected by; the task's first one where none is named."""
        direction, _, name = self.select.partition(" ")
        if not name:
            return task.metric
        metric = task.find_metric(name)
        expected = "max" if metric.higher_is_better else "min"
        if direction != expected:
            raise InputError(
                f"evaluation: select is '{self.select}', but {name} is better when "
                f"{'higher' if metric.higher_is_better else 'lower'}; use '{expected} {name}'"
            )
        return metric

    def with_criterion(self, task: Task) -> Task:
        """The task with the metric that rounds are selected by among its own."""
        criterion = self.criterion(task)
        if criterion.name in [metric.name for metric in task.all_metrics]:
            return task
        return replace(task, metrics=[*task.all_metrics, criterion])


@dataclass(frozen=True)
class Options:
    """How to run an experiment; apart from `precision`, nothing changes numbers beyond rounding.

    `engine`, `chunk_size`, `workers`, `fused` and `precision` are those of `EngineConfig`. With a
    folder, a checkpoint is saved every `checkpoint_every` rounds. `save` = "everything" keeps all;
    "metrics" saves no models, and drops the tensors of the checkpoint at the end.

    >>> Options(device="cpu", engine="looped").torch_device()
    device(type='cpu')
    """

    device: str = "auto"
    engine: str = "auto"
    chunk_size: int | None = count_field(None, maximum=MAX_CLIENTS)
    workers: int | None = count_field(None, maximum=MAX_WORKERS)
    fused: bool = True
    precision: str = "fp32"
    checkpoint_every: int = count_field(10, maximum=MAX_ROUNDS)
    save: str = "everything"

    def __post_init__(self) -> None:
        require_choice("options: save", self.save, SAVES)
        require_instance("options: device", self.device, str, "the name of a device of torch's")
        require_counts("options: ", self)
        self.engine_config()

    def engine_config(self) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(self.engine, self.chunk_size, self.workers, self.fused, self.precision)

    def torch_device(self) -> torch.device:
        """torch's device; "auto" takes a GPU if there is one."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            tensor = torch.zeros(1, device=name)
            tensor.item()  # a device such as "meta" has no values
            return tensor.device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise InputError(
                f"options: device {describe_value(self.device)} cannot be used here; "
                "try 'cpu', 'cuda' or 'auto'"
            ) from error
