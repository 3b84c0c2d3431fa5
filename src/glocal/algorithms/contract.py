"""The contract: what a federated algorithm is made of, written for ONE client.

An algorithm is a frozen dataclass. Its settings are fields, so that its spec cannot miss one. Its
methods are pure functions of one client or of the server: what they get is all that they see.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, dataclass_transform

import torch
from torch import Tensor

from glocal.core.checks import require_instance, require_number
from glocal.core.errors import InputError, describe_value
from glocal.core.one_line import one_line
from glocal.core.spec import Spec, spec_of
from glocal.core.task import Task
from glocal.core.torch_optimizers import as_optimizer
from glocal.core.training import Objective, WeightedSum, Work
from glocal.core.trees import Params
from glocal.core.values import Values
from glocal.wire.aggregation import Aggregation, Mean

Message = Params
PerUpload = Callable[[Message, Message, Params], Message]


class State(NamedTuple):
    """What an algorithm starts with.

    - `shared`: what downloads are made of.
    - `private`: what one client remembers; it is never sent.
    - `server`: what the server remembers; it is never sent, and `download` cannot see it.
    - `profile`: what the server remembers about one client.

    >>> State(shared={"weight": torch.zeros(2, 3)}).private
    {}
    """

    shared: Params
    private: Params = {}  # noqa: RUF012  (never changed)
    server: Params = {}  # noqa: RUF012
    profile: Params = {}  # noqa: RUF012

    def __repr__(self) -> str:
        return one_line(self)


class Update(NamedTuple):
    """The result of a client's round; `upload` and `metrics` leave the client, `private` stays.

    An upload is a change, not new weights. One of the metrics is the "loss".

    >>> loss = WeightedSum(torch.tensor(3.0), torch.tensor(2.0))
    >>> Update({"weight": torch.zeros(2)}, {}, {"loss": loss}).metrics["loss"].mean
    tensor(1.5000)
    """

    upload: Message
    private: Params
    metrics: dict[str, WeightedSum]

    def __repr__(self) -> str:
        return one_line(self)


@dataclass(frozen=True)
class Uploads:
    """The uploads of a round, as the server sees them.

    `messages`, `sent` (what these clients had been sent) and `profiles` are (clients, ...),
    `num_examples` is (clients,). Under secure aggregation there are no single messages: `mean` is
    all that the server knows.

    >>> sent = {"w": torch.zeros(2, 1)}
    >>> sizes, now = torch.tensor([3, 1]), torch.tensor(0)
    >>> uploads = Uploads({"w": torch.tensor([[2.0], [6.0]])}, sent, {}, sizes, 10, now, Mean())
    >>> uploads.aggregate(), uploads.participation
    ({'w': tensor([3.])}, 0.2)
    """

    messages: Message
    sent: Message
    profiles: Params
    num_examples: Tensor
    num_clients: int
    round_index: Tensor
    aggregation: Aggregation
    mean: Message | None = None
    counted: Tensor | None = None

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def num_sampled(self) -> int | Tensor:
        """The number of clients whose uploads count."""
        return len(self.num_examples) if self.counted is None else self.counted.sum()

    @property
    def participation(self) -> float | Tensor:
        """The fraction of all clients whose uploads count, in float64."""
        sampled = self.num_sampled
        return (sampled.double() if isinstance(sampled, Tensor) else sampled) / self.num_clients

    @property
    def weights(self) -> Tensor:
        """The weight of every client in the aggregate (clients,)."""
        weights = self.aggregation.weights(self.num_examples)
        return weights if self.counted is None else weights * self.counted

    def only(self, counted: Tensor) -> "Uploads":
        """The uploads of some clients (clients,)."""

        def pick(tree: Params) -> Params:
            return {name: tensor[counted] for name, tensor in tree.items()}

        return replace(
            self,
            messages=pick(self.messages),
            sent=pick(self.sent),
            profiles=pick(self.profiles),
            num_examples=self.num_examples[counted],
        )

    def masked(self, counted: Tensor) -> "Uploads":
        """The same with the weight 0 for all others: shapes do not depend on who counts."""
        messages = {}
        for name, tensor in self.messages.items():
            mask = counted.reshape(-1, *(1,) * (tensor.dim() - 1))
            messages[name] = torch.where(mask, tensor, torch.zeros_like(tensor))
        return replace(self, messages=messages, counted=counted)

    def aggregate(self, of: PerUpload | None = None) -> Message:
        """One message of all uploads, or of what `of` makes of each (upload, sent, profile)."""
        if of is not None:
            _require_single_messages(self)
            messages = torch.vmap(of)(self.messages, self.sent, self.profiles)
        elif self.mean is not None:
            return self.mean
        else:
            messages = self.messages
        return self.aggregation.reduce(messages, self.weights)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _FrozenDataclass:
    """Every subclass becomes a frozen dataclass when it is defined: nobody can forget to."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)


class Algorithm(_FrozenDataclass):
    """A federated algorithm on a task.

    `optimizer` is `SGD`, `Adam` or `AdamW`, or one of torch's with its settings, such as
    `functools.partial(torch.optim.SGD, lr=0.1)`. Where `adapt_before_evaluation` is set, a client
    is tested with its model after `adapt`.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> class Frozen(Algorithm):
    ...     def client_update(self, message, private, work):
    ...         return Update(change(message, message), private, {})
    ...
    >>> Frozen(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).word
    'frozen'
    """

    task: Task
    _: KW_ONLY
    optimizer: Any  # an Optimizer; torch's are translated
    aggregation: Aggregation = Mean()

    word: ClassVar[str] = (
        ""  # in TOML and on the command line; by default the name in small letters
    )
    adapt_before_evaluation: ClassVar[bool] = False
    takes_new_clients: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "word" not in vars(cls):
            cls.word = cls.__name__.lower()

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task):
            raise InputError(
                f"{self.name}: its task is {describe_value(self.task)}; "
                "a glocal.Task was expected, such as glocal.classification(model)"
            )
        object.__setattr__(self, "optimizer", as_optimizer(self.optimizer))
        is_class = isinstance(self.aggregation, type)  # which has the same attributes
        if is_class or not isinstance(self.aggregation, Aggregation):
            raise InputError(
                f"{self.name}: aggregation is {describe_value(self.aggregation)}; "
                "one of glocal's was expected, such as glocal.Mean()"
            )

    def __repr__(self) -> str:
        settings = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self)[1:]]
        return f"{self.name}({self.task!r}, {', '.join(settings)})"

    @property
    def name(self) -> str:
        """The algorithm's name, for messages and tables."""
        return type(self).__name__

    @cached_property
    def spec(self) -> Spec:
        """Everything that it is made of, as plain data."""
        return spec_of(self)

    @property
    def objective(self) -> Objective:
        """The task's loss over all tensors that may train."""
        return self.task.objective

    def init(self, params: Params) -> State:
        """Everything is shared."""
        return State(shared=params)

    def num_epochs(self, local_epochs: int) -> int:
        """How often a client goes through its data where the schedule says `local_epochs`."""
        return local_epochs

    def upload_like(self, shared: Params) -> Message:
        """A message with the names, shapes and types of an upload: what may leave a client."""
        return shared

    def download(self, shared: Params, profile: Params) -> Message:
        """What one client is sent."""
        return shared

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """One client's round."""
        raise NotImplementedError(f"{self.name} has no client_update")

    def remember(self, shared: Params, profile: Params, sent: Message, upload: Message) -> Params:
        """What the server remembers of a client after its upload."""
        return profile

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """The server's step: the shared and the server's own state after it."""
        return add_change(shared, uploads.aggregate()), server

    def personal(self, shared: Params, private: Params) -> Params:
        """The params that a client predicts with."""
        return shared

    def predict(self, params: Params, x: Values, mask: Tensor) -> Tensor:
        """Outputs for inputs (rows, ...) by what `personal` gives, as in evaluation mode."""
        return self.task.predict(params, x, mask)

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """What a new client learns while the shared part stays fixed; the upload is not sent."""
        return self.client_update(message, private, work)


def change(after: Params, message: Message) -> Message:
    """How the tensors of a message have moved."""
    moved = {}
    for name, tensor in message.items():
        is_switch = tensor.dtype == torch.bool  # what has no difference: whether it was flipped
        moved[name] = after[name] ^ tensor if is_switch else after[name] - tensor
    return moved


def add_change(shared: Params, moved: Message) -> Params:
    """The shared tree plus a change; counters are rounded, and what did not move stays as it is."""
    after = {}
    for name, tensor in shared.items():
        after[name] = _added(tensor, moved[name]) if name in moved else tensor
    return after


def require_algorithm(name: str, algorithm: object) -> None:
    """Refuse what is no algorithm, such as the class of one."""
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        kind = algorithm.__name__
        raise InputError(f"{name} is the class {kind}; give {kind}(task, optimizer=...)")
    expected = "one of glocal's, such as glocal.FedAvg(task, optimizer=...),"
    require_instance(name, algorithm, Algorithm, expected)


def require_numbers(algorithm: Algorithm, *names: str, maximum: float = float("inf")) -> None:
    """Refuse settings that are not finite numbers from 0 to a maximum."""
    for name in names:
        upper = "" if maximum == float("inf") else f" and at most {maximum:g}"
        require_number(
            f"{algorithm.name}: {name}",
            getattr(algorithm, name),
            lambda value: 0 <= value <= maximum,
            f"of at least 0{upper}",
        )


def _added(tensor: Tensor, moved: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor + moved.to(tensor.dtype)
    if tensor.dtype == torch.bool:
        return tensor ^ (moved > 0.5)
    return (tensor + moved).round().to(tensor.dtype)


def _require_single_messages(uploads: Uploads) -> None:
    if uploads.mean is not None or not uploads.aggregation.is_mean:
        known = "their mean" if uploads.mean is not None else f"{uploads.aggregation}"
        raise InputError(
            f"aggregation: this algorithm looks at single uploads before they are averaged, and "
            f"the server has {known}; use a mean without secure aggregation"
        )
