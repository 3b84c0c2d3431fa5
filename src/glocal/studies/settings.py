"""The settings of a study: frozen dataclasses, read from TOML; every error names its setting."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from glocal.core.bounds import (
    MAX_CLIENTS,
    MAX_EPOCHS,
    MAX_EXAMPLES,
    MAX_ROUNDS,
    MAX_SEED,
    MAX_SEEDS,
    MAX_WIDTH,
    MAX_WORKERS,
    count_field,
    require_counts,
)
from glocal.core.errors import InputError, suggest_name
from glocal.core.files import Json
from glocal.core.modules import require_dropout_rate, require_noise_std
from glocal.federate.options import Evaluation, Options
from glocal.personalize.onboarding import JoinPlan
from glocal.studies.audit import AuditSettings
from glocal.studies.new_client_trial import NewClientSettings
from glocal.studies.ordinal import OrdinalSettings
from glocal.studies.pretext import PretextSettings

SettingsT = TypeVar("SettingsT")
Hyperparameter = int | float | str | bool
_NAMED_TABLES = ("experiments", "groups")  # tables of tables, with names of the user's choice


@dataclass(frozen=True)
class DataSettings:
    """Which data, and which client holds what.

    `source` is a known data set, such as mnist or vqav2, a function of your own
    ("module:function"), or a .csv file of texts with the columns person, text and mood (1 to 100).
    Texts need the partition "natural": one client per person, people with most texts first.

    Only the first `keep_clients` of the partition take part, if it is given. With
    `labeled_fraction`, a client has labels for that fraction of its training examples only;
    pre-training without labels still uses all of them. `pictures` are the images of a VQA data set:
    their own (None), "shuffled" among the questions as a control, or "none".
    """

    source: str = "digits"
    partition: str = "shards"
    clients: int = count_field(20, maximum=MAX_CLIENTS)
    classes_per_client: int = count_field(2, maximum=MAX_EXAMPLES)
    alpha: float = 0.5
    validation: float = 0.1
    augment: str = "none"
    keep_clients: int | None = count_field(None, maximum=MAX_CLIENTS)
    labeled_fraction: float | None = None
    pictures: str | None = None


@dataclass(frozen=True)
class ModelSettings:
    """Which network: a known one by name, or your own "module:function".

    mlp, softmax_mlp and bottleneck_mlp have these `hidden` widths; the others are lenet5 and
    bottleneck_cnn. The encoders of bottleneck_mlp and bottleneck_cnn end in a representation
    `bottleneck` wide. bottleneck_mlp adds Gaussian noise of standard deviation `noise_std` to it in
    training. `dropout` is the dropout rate of bottleneck_mlp's hidden units.

    A function of your own that has a parameter `request` gets a `ModelRequest`, with these settings
    in it; the others get nothing. With questions about images, `encoder` may be the
    "module:function" of a frozen encoder, from images (rows, 3, height, width) to features
    (rows, width), which are computed once per image. `widths` and `weights` are for functions that
    build a ResNet: its widths, and a file of pretrained weights or "official".
    """

    name: str = "mlp"
    hidden: tuple[int, ...] = count_field((64, 32, 32, 32), maximum=MAX_WIDTH)
    bottleneck: int | None = count_field(None, maximum=MAX_WIDTH)
    noise_std: float | None = None
    dropout: float | None = None
    widths: tuple[int, ...] | None = count_field(None, maximum=MAX_WIDTH)
    weights: str | None = None
    encoder: str | None = None

    def __post_init__(self) -> None:
        require_dropout_rate("settings: model.dropout", self.dropout)
        require_noise_std("settings: model.noise_std", self.noise_std)


@dataclass(frozen=True)
class SplitSettings:
    """The local or the shared side of the model, by names of tensors or modules, or by globs."""

    local: tuple[str, ...] | None = None
    shared: tuple[str, ...] | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """The clients' optimiser: sgd or adam.

    The learning rate of round t is lr / (1 + lr_decay * t), times `lr_gamma` after every
    `lr_step_size` rounds.
    """

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.5
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    lr_gamma: float | None = None
    lr_step_size: int | None = count_field(None, maximum=MAX_ROUNDS)


@dataclass(frozen=True)
class TaskSettings:
    """What clients learn: the `kind` of task, its metrics, and how models become an ensemble.

    A kind is classification, regression, multilabel or tokens; a function of your own
    ("module:function") gets the model and gives a `Task`. The first metric is the one that figures
    are about; without `metrics` they are those of the kind. `frozen` names parts of the model that
    nobody trains or sends.
    """

    kind: str = "classification"
    metrics: tuple[str, ...] | None = None
    ensemble: str | None = None
    head: str | None = None
    frozen: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RunSettings:
    """How experiments are run and evaluated: the fields of `Options` and of `Evaluation`.

    `tests` = "local" leaves New Test out.
    """

    device: str = "auto"
    engine: str = "auto"
    chunk_size: int | None = count_field(None, maximum=MAX_CLIENTS)
    workers: int | None = count_field(None, maximum=MAX_WORKERS)
    fused: bool = True
    precision: str = "fp32"
    validate_every: int = count_field(10, maximum=MAX_ROUNDS)
    validate_clients: int | None = count_field(1_000, maximum=MAX_CLIENTS)
    checkpoint_every: int = count_field(10, maximum=MAX_ROUNDS)
    save: str = "everything"
    select: str = "last"
    tests: str = "both"
    new_test_members: int = count_field(200, maximum=MAX_CLIENTS)

    def __post_init__(self) -> None:
        require_counts("settings: run.", self)
        if self.tests not in ("both", "local"):
            raise InputError(
                f"settings: run.tests is '{self.tests}'; it must be 'both' or 'local' (no New Test)"
            )
        self.options()
        self.evaluation()

    def options(self) -> Options:
        """How to run."""
        return Options(
            self.device,
            self.engine,
            self.chunk_size,
            self.workers,
            self.fused,
            self.precision,
            self.checkpoint_every,
            self.save,
        )

    def evaluation(self) -> Evaluation:
        """What to evaluate."""
        return Evaluation(
            self.validate_every,
            self.select,
            self.validate_clients,
            self.tests == "both",
            self.new_test_members,
        )


@dataclass(frozen=True)
class PlanSettings:
    """How long training takes, and with how many clients; `seeds` seeds are run, from `seed` on.

    `aggregation` makes one upload of many: "mean" (weighted by examples), "mean(clients)" or
    "median"; None is the algorithm's own. `uplink` are codecs of uploads, such as "top_k(0.01)" and
    "int8". Batches of texts hold at most `max_tokens` words, padding included. Each seed is run
    `restarts` times with other initial weights on the same partition; its result is that of the
    restart that is best on validation data, over all clients' examples together.
    """

    rounds: int = count_field(50, maximum=MAX_ROUNDS)
    clients_per_round: int = count_field(5, maximum=MAX_CLIENTS)
    local_epochs: int = count_field(1, maximum=MAX_EPOCHS)
    batch_size: int = count_field(10, maximum=MAX_EXAMPLES)
    seed: int = count_field(0, minimum=0, maximum=MAX_SEED)
    seeds: int = count_field(1, maximum=MAX_SEEDS)
    aggregation: str | None = None
    uplink: tuple[str, ...] | None = None
    max_tokens: int | None = count_field(None, maximum=1_000 * MAX_EXAMPLES)
    restarts: int = count_field(1, maximum=MAX_SEEDS)


@dataclass(frozen=True)
class ExperimentSettings:
    """One row of the study: an algorithm and its hyper-parameters.

    `start_from` names an earlier experiment to start from, after its round `start_round`. Where
    rounds are selected on validation data, it starts from the best model until then, or with
    `start_model` = "last" from that round's own. The latter compares the two round by round without
    a selection on the validation data.

    `rounds`, `clients_per_round`, `lr` and the split (`local` or `shared`) are the study's unless
    they are given. `local_lr` is the learning rate of the local part, if it differs. With a
    `join_plan` the study's new client joins after the last round. `pretext` is what local models
    learn from besides labels. The experiment is not run for the seeds in `skip_seeds`.
    """

    algorithm: str
    rounds: int | None = count_field(None, maximum=MAX_ROUNDS)
    clients_per_round: int | None = count_field(None, maximum=MAX_CLIENTS)
    local: tuple[str, ...] | None = None
    shared: tuple[str, ...] | None = None
    start_from: str | None = None
    start_round: int | None = count_field(None, maximum=1_000 * MAX_ROUNDS)
    start_model: str | None = None
    lr: float | None = None
    local_lr: float | None = None
    join_plan: JoinPlan | None = None
    pretext: PretextSettings | None = None
    skip_seeds: tuple[int, ...] | None = count_field(None, minimum=0, maximum=MAX_SEED)
    hyperparameters: dict[str, Hyperparameter] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupSettings:
    """Clients that join, leave and drift together; with groups a study is a scenario.

    Groups take the data's clients in order. A group takes part from round `join_round` on; in round
    `leave_round` it drops out before it answers. Its images are rotated by `rotate` degrees, and by
    `drift` more after every ten rounds, from `drift_start` (default: when it joins) to `drift_end`
    (default: the end).
    """

    clients: int = count_field(maximum=MAX_CLIENTS)
    join_round: int = count_field(0, minimum=0, maximum=MAX_ROUNDS)
    leave_round: int | None = count_field(None, minimum=0, maximum=MAX_ROUNDS)
    rotate: float = 0.0
    drift: float = 0.0
    drift_start: int | None = count_field(None, minimum=0, maximum=MAX_ROUNDS)
    drift_end: int | None = count_field(None, minimum=0, maximum=MAX_ROUNDS)


@dataclass(frozen=True)
class Settings:
    """A whole study."""

    name: str = "study"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    split: SplitSettings = SplitSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    plan: PlanSettings = PlanSettings()
    run: RunSettings = RunSettings()
    new_client: NewClientSettings | None = None
    audit: AuditSettings | None = None
    ordinal: OrdinalSettings | None = None
    experiments: dict[str, ExperimentSettings] = field(default_factory=dict)
    groups: dict[str, GroupSettings] = field(default_factory=dict)

    def as_dict(self) -> Json:
        """As in TOML: no entry for what is None, hyper-parameters beside the algorithm."""
        plain: Json = _without_none(asdict(self))
        plain["experiments"] = {
            name: experiment.pop("hyperparameters") | experiment
            for name, experiment in plain["experiments"].items()
        }
        return (
            plain
            if self.groups
            else {name: part for name, part in plain.items() if name != "groups"}
        )


def from_toml(path: Path, changes: Sequence[str] = ()) -> Settings:
    """Settings from a TOML file; each change is "a.b=value"."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"settings: cannot read {path} ({error.strerror}); give a study's name or a TOML file"
        ) from error
    except ValueError as error:  # not TOML, not text, or a number of thousands of digits
        raise InputError(f"settings: {path} is not TOML ({error})") from error
    return from_dict({"name": path.stem, **table}, changes)


def with_overrides(settings: Settings, changes: Sequence[str]) -> Settings:
    """The same study with some settings changed."""
    return from_dict(settings.as_dict(), changes)


def from_dict(table: Json, changes: Sequence[str] = ()) -> Settings:
    """Settings from plain data, checked name by name and type by type."""
    if not isinstance(table, dict):
        raise InputError(f"settings: a table of settings was expected, not {table!r}")
    for change in changes:
        table = _with_change(table, change)
    plain = {key: value for key, value in table.items() if key not in _NAMED_TABLES}
    experiments = {
        name: _read_experiment(experiment, name)
        for name, experiment in _tables(table, "experiments").items()
    }
    groups = {name: _read_group(group, name) for name, group in _tables(table, "groups").items()}
    return replace(read_table(Settings, plain, ""), experiments=experiments, groups=groups)


def _tables(table: Json, kind: str) -> Json:
    """The tables of one kind, by the user's names for them."""
    named = table.get(kind, {})
    if not isinstance(named, dict):
        raise InputError(f"settings: {kind} is {named!r}; tables [{kind}.NAME] were expected")
    return named


def _read_group(table: Any, name: str) -> GroupSettings:
    where = f"groups.{name}"
    if not isinstance(table, dict):
        raise InputError(f"settings: {where} is {table!r}; a table was expected")
    if "clients" not in table:
        raise InputError(
            f"settings: {where} has no number of clients; add clients = 5, or another number"
        )
    return read_table(GroupSettings, table, where)


def _read_experiment(table: Any, name: str) -> ExperimentSettings:
    """An experiment; keys that are no settings of every experiment are hyper-parameters.

    These are checked when the algorithm is built.
    """
    where = f"experiments.{name}"
    if not isinstance(table, dict):
        raise InputError(f"settings: {where} is {table!r}; a table was expected")
    known = {part.name for part in fields(ExperimentSettings)} - {"hyperparameters"}
    hyperparameters = {key: value for key, value in table.items() if key not in known}
    if "algorithm" not in table:
        raise InputError(
            f"settings: {where} has no algorithm; add one, such as algorithm = 'lg_fedavg'"
        )
    for key, value in hyperparameters.items():
        if not isinstance(value, Hyperparameter):
            raise InputError(
                f"settings: {where}.{key} is {value!r}; a number or a string was expected"
            )
    experiment = read_table(
        ExperimentSettings, {key: value for key, value in table.items() if key in known}, where
    )
    return replace(experiment, hyperparameters=hyperparameters)


def read_table(kind: type[SettingsT], table: Mapping[str, Any], where: str) -> SettingsT:
    """A dataclass of settings from plain data; `where` is its address in the file."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints or key in ("hyperparameters", *_NAMED_TABLES):
            known = [name for name in hints if name != "hyperparameters"]
            raise InputError(
                f"settings: unknown option '{_dotted(where, key)}'; {suggest_name(key, known)}"
            )
    values = {key: _convert(hints[key], value, _dotted(where, key)) for key, value in table.items()}
    settings = kind(**values)
    require_counts(f"settings: {_dotted(where, '')}", settings)
    return settings


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A value converted to the type of its setting, or an error that names the setting."""
    for option in get_args(kind) if get_origin(kind) is UnionType else (kind,):
        if is_dataclass(option) and isinstance(value, Mapping):
            return read_table(option, value, where)  # type: ignore[arg-type]
        if get_origin(option) is tuple and isinstance(value, list | tuple | str):
            items = [value] if isinstance(value, str) else value
            return tuple(_convert(get_args(option)[0], item, where) for item in items)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if (
            isinstance(option, type)
            and isinstance(value, option)
            and isinstance(value, bool) == (option is bool)
        ):
            return value
    raise InputError(f"settings: {where} is {value!r}; {_type_name(kind)} was expected")


def _type_name(kind: Any) -> str:
    if is_dataclass(kind):
        return "a table"
    if get_origin(kind) is UnionType:
        return " or ".join(
            _type_name(option) for option in get_args(kind) if option is not type(None)
        )
    if get_origin(kind) is tuple:
        return f"a list, each item {_type_name(get_args(kind)[0])},"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]


def _with_change(table: Json, change: str) -> Json:
    """Plain data with one "a.b=value" applied; the value is TOML, or else a plain string."""
    address, equals, text = change.partition("=")
    keys = address.strip().split(".")
    if not equals or not all(keys):
        raise InputError(
            f"settings: '{change}' is not a change; "
            "write it as section.option=value, such as plan.rounds=20"
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except ValueError:  # not TOML, or a number of thousands of digits
        value = text.strip()
    return _set_nested(table, keys, value, change)


def _set_nested(table: Any, keys: Sequence[str], value: Any, change: str) -> Json:
    if not isinstance(table, dict):
        raise InputError(
            f"settings: '{change}' goes through a value that is not a table; "
            "write section.option=value"
        )
    if len(keys) == 1:
        return {**table, keys[0]: value}
    return {**table, keys[0]: _set_nested(table.get(keys[0], {}), keys[1:], value, change)}


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    return list(data) if isinstance(data, tuple) else data
