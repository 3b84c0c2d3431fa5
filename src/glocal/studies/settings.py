"""What a run is: a tree of frozen settings, read from TOML, with every mistake named where it stands."""

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
    count_field,
    require_counts,
)
from glocal.core.errors import InputError, suggest_name
from glocal.core.files import Json
from glocal.core.modules import require_dropout_rate, require_noise_std
from glocal.federate.fitting import Options
from glocal.personalize.onboarding import JoinPlan
from glocal.studies.audit import AuditSettings
from glocal.studies.new_client_trial import NewClientSettings
from glocal.studies.ordinal import OrdinalSettings
from glocal.studies.pretext import PretextSettings

SettingsT = TypeVar("SettingsT")
Hyperparameter = int | float | str | bool
_NAMED_TABLES = ("experiments", "groups")  # tables of tables, whose names are the user's own


@dataclass(frozen=True)
class DataSettings:
    """Which data, and who gets what; `source` is a known data set, such as mnist or vqav2, or your own "module:function".

    It may also be a .csv file of texts with the columns person, text and mood (1 to 100). Texts have the partition natural: a
    device for each person, those with most texts first.

    Once dealt out, only the first `keep_clients` take part, if that is given. With `labeled_fraction`, a device knows the labels of that
    share of its training examples only; what pre-trains without labels still learns from all of them. `pictures` are those that
    questions are asked about: their own, or as a control "shuffled" among the questions, or "none".
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
    """Which network: mlp, softmax_mlp or bottleneck_mlp (of these hidden widths), lenet5, bottleneck_cnn, vqa, or your own "module:function".

    The encoders of bottleneck_mlp and bottleneck_cnn put out a code so many numbers wide; bottleneck_mlp's with noise of the deviation `noise_std`
    while training, and a share `dropout` of its hidden units left out. For texts there is mood_lstm; a share `dropout` of its word
    vectors and hidden units is left out while training, and of what vqa's ResNet sees and of its answer's hidden units.

    The hidden widths of vqa are those of a word, of the LSTM, of what both channels are brought to and of the answer's first layer;
    `widths` are those of its ResNet, whose `weights` come from a file or are "official". With `encoder` = "frozen" the ResNet's
    convolutions stay as they are: what they see in each picture is worked out once. So is what a network of your own sees, where
    `encoder` is the "module:function" that makes it: from pictures (rows, 3, height, width) to features (rows, width).
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
    """Which side is named: tensors, modules or globs."""

    local: tuple[str, ...] | None = None
    shared: tuple[str, ...] | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """How a device descends: sgd or adam; the rate in round t is rate / (1 + decay * t), times `lr_gamma` every so often."""

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.5
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    lr_gamma: float | None = None
    lr_step_size: int | None = count_field(None, maximum=MAX_ROUNDS)


@dataclass(frozen=True)
class PlanSettings:
    """How long and with how many devices; `seeds` runs side by side, from `seed` on.

    In an average a device weighs as much as it has examples, or all weigh the same (`weights` = "equal"). Batches of texts hold at
    most `max_tokens` words, padding counted. Each seed has so many `restarts` with other first weights, all on its deal of the data; the
    one that is best on validation data, over all devices' examples together, is its result.
    """

    rounds: int = count_field(50, maximum=MAX_ROUNDS)
    clients_per_round: int = count_field(5, maximum=MAX_CLIENTS)
    local_epochs: int = count_field(1, maximum=MAX_EPOCHS)
    batch_size: int = count_field(10, maximum=MAX_EXAMPLES)
    seed: int = count_field(0, minimum=0, maximum=MAX_SEED)
    seeds: int = count_field(1, maximum=MAX_SEEDS)
    weighting: str = "examples"
    max_tokens: int | None = count_field(None, maximum=1_000 * MAX_EXAMPLES)
    restarts: int = count_field(1, maximum=MAX_SEEDS)


@dataclass(frozen=True)
class ExperimentSettings:
    """One row of the study: an algorithm and its knobs; `start_from` names an earlier case to start from, at its round `start_round`.

    Where rounds are chosen on validation data, it starts from the best model until then, or from that round's own (`start_model`
    = "last"), so that no choice has been made on the data on which the two are compared round by round.
    `rounds`, `clients_per_round`, `lr` and the split (`local` or `shared`) are the study's own unless they are given. `local_lr` is that
    of the local part, if it is another. With a `join_plan` the study's newcomer is taken in when the rounds are over. `pretext` is
    what local models learn from besides labels. `skip_seeds` are seeds of the study that the case does not run with.
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
    """Devices that come, go and change together, the next so many of the data's; groups make a study a scenario.

    They take part from round `join_round` on; in round `leave_round` they are gone before they answer. Their images are turned by `rotate`
    degrees, and by `drift` more after every ten rounds from `drift_start` (else their arrival) to `drift_end` (else the end).
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
    split: SplitSettings = SplitSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    plan: PlanSettings = PlanSettings()
    run: Options = Options()
    new_client: NewClientSettings | None = None
    audit: AuditSettings | None = None
    ordinal: OrdinalSettings | None = None
    experiments: dict[str, ExperimentSettings] = field(default_factory=dict)
    groups: dict[str, GroupSettings] = field(default_factory=dict)

    def as_dict(self) -> Json:
        """As TOML would hold it: no entry for what is not set, knobs beside the algorithm."""
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
    """Read a TOML file; each change is "a.b=value"."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"settings: cannot read {path} ({error.strerror}); give a study's name or a TOML file"
        ) from error
    except ValueError as error:  # no TOML, no text, or a number of thousands of digits
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
    """The tables of one kind, each with a name of the user's own."""
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
            f"settings: {where} does not say how many devices it has; add devices = 5, or another number"
        )
    return read_table(GroupSettings, table, where)


def _read_experiment(table: Any, name: str) -> ExperimentSettings:
    """A case: what is not a setting of every case is a knob of its algorithm, checked when that is built."""
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
                f"settings: {where}.{key} is {value!r}; a number or a word was expected"
            )
    experiment = read_table(
        ExperimentSettings, {key: value for key, value in table.items() if key in known}, where
    )
    return replace(experiment, hyperparameters=hyperparameters)


def read_table(kind: type[SettingsT], table: Mapping[str, Any], where: str) -> SettingsT:
    """A dataclass of settings from plain data; `where` says where in the file it stands."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints or key in ("hyperparameters", *_NAMED_TABLES):
            known = [name for name in hints if name != "hyperparameters"]
            raise InputError(
                f"settings: unknown option '{_dotted(where, key)}'; {suggest_name(key, known)}"
            )
    values = {key: _convert(hints[key], value, _dotted(where, key)) for key, value in table.items()}
    made = kind(**values)
    require_counts(f"settings: {_dotted(where, '')}", made)
    return made


def _convert(kind: Any, value: Any, where: str) -> Any:
    """A value of the type that a setting has, or an error that names it."""
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
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]


def _with_change(table: Json, change: str) -> Json:
    """Plain data with one "a.b=value" put in; the value is TOML, or else a text as it stands."""
    address, equals, text = change.partition("=")
    keys = address.strip().split(".")
    if not equals or not all(keys):
        raise InputError(
            f"settings: '{change}' is no change; write it as section.option=value, such as plan.rounds=20"
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except ValueError:  # no TOML, or a number of thousands of digits
        value = text.strip()
    return _set_nested(table, keys, value, change)


def _set_nested(table: Any, keys: Sequence[str], value: Any, change: str) -> Json:
    if not isinstance(table, dict):
        raise InputError(
            f"settings: '{change}' goes through a value that is no table; write section.option=value"
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
