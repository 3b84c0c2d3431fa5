"""Every exported callable with valid arguments, and values that somebody may give by mistake."""

import inspect
import math
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import glocal
from glocal.algorithms import ALGORITHMS

LIMIT = 20.0  # seconds of one call, after which it counts as hanging
PROTOCOLS_AND_ERRORS = ("Callback", "GlocalWarning", "InputError")  # nobody gives them arguments


class Row(NamedTuple):
    """A callable, valid arguments, and what is done with what it returns.

    What is accepted has to work: an algorithm has to train, a selector has to select. Records that
    the library makes are not used.
    """

    call: Callable[..., Any]
    arguments: dict[str, Any]
    use: Callable[[Any], object] = id


# ---- a small world


@cache
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@cache
def image_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 2))


@cache
def arrays():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(60, 4)
    y = torch.arange(60) % 2
    return {name: (x[i : i + 20], y[i : i + 20]) for name, i in (("a", 0), ("b", 20), ("c", 40))}


@cache
def data():
    return glocal.FederatedData.from_tensors(arrays())


@cache
def task():
    return glocal.classification(model())


@cache
def sgd():
    return glocal.SGD(lr=0.05)


@cache
def fedavg():
    return glocal.FedAvg(task(), optimizer=sgd())


@cache
def lg_fedavg():
    return glocal.LGFedAvg(task(), local="0", optimizer=sgd())


@cache
def plan():
    return glocal.Plan(rounds=1, clients_per_round=2)


FIT = {"rounds": 1, "clients_per_round": 2, "engine": "looped", "progress": False}


def train(algorithm, **settings):
    return glocal.fit(algorithm, data(), **FIT | settings)


@cache
def result():
    return train(lg_fedavg())


@cache
def apfl_result():
    return train(glocal.APFL(task(), optimizer=sgd()))


@cache
def folder():
    return Path(tempfile.mkdtemp(prefix="glocal-misuse-"))


@cache
def saved_result():
    return result().save(folder() / "result")


@cache
def saved_model():
    glocal.Run(experiment(), folder=folder() / "run", options=looped()).to_end()
    return next((folder() / "run/models").rglob("*.safetensors"))


@cache
def client_files():
    home = folder() / "clients"
    home.mkdir()
    for name, (x, y) in arrays().items():
        np.savez(home / f"{name}.npz", x=x.numpy(), y=y.numpy())
    return home


@cache
def frame():
    pandas = __import__("pandas")
    table = {"age": np.arange(20.0), "place": list("ab" * 10), "ill": np.arange(20) % 2}
    return pandas.DataFrame(table)


@cache
def looped():
    return glocal.Options(engine="looped")


@cache
def group():
    return glocal.Group(lg_fedavg(), (data(),))


@cache
def experiment():
    return glocal.Experiment((group(),), plan())


@cache
def federation():
    return glocal.TrainedFederation.from_result(result())


@cache
def examples():
    return glocal.Examples(*arrays()["a"])


@cache
def work():
    order = torch.arange(20).reshape(1, 2, 10)
    return glocal.Work.of(examples(), order, torch.tensor(0), torch.tensor(0))


@cache
def uploads():
    tree = {"w": torch.zeros(2, 3)}
    return glocal.Uploads(tree, tree, {}, torch.ones(2), 3, torch.tensor(0), glocal.Mean())


@cache
def table():
    return result().metrics


@cache
def advice():
    return glocal.advise(**advise_arguments())


@cache
def advise_arguments():
    config = glocal.AdvisorConfig(num_clients=3, stages=(1,), max_candidates=2)
    return {
        "algorithm": fedavg(),
        "data": data(),
        "plan": plan(),
        "config": config,
        "options": looped(),
        "log": str.title,
    }


def run(experiment, **settings):
    return glocal.Run(experiment, **{"options": looped(), **settings}).to_end()


def run_group(made):
    return run(glocal.Experiment((made,), plan()))


def run_phase(made):
    return run(glocal.Experiment((group(),), plan(), phases=(made,)))


def run_available(made):
    return run_phase(glocal.Phase(0, made))


def fit_task(made):
    return train(glocal.FedAvg(made, optimizer=sgd()))


def fit_data(made):
    clients = min(2, made.num_clients)
    width = made.train.examples.x.shape[1:].numel()
    flat = nn.Sequential(nn.Flatten(), nn.Linear(width, 10))
    algorithm = glocal.FedAvg(glocal.classification(flat), optimizer=sgd())
    return glocal.fit(algorithm, made, **FIT | {"clients_per_round": clients})


def fit_part(part):
    """The examples of clients that somebody made by hand."""
    return fit_data(glocal.FederatedData(part, part, part))


def fit_multilabel(made):
    x = torch.randn(20, 4)
    own = glocal.FederatedData.from_tensors([(x, (x[:, :2] > 0).float())] * 2)
    return glocal.fit(glocal.FedAvg(made, optimizer=sgd()), own, **FIT)


def fit_regression(made):
    x = torch.randn(20, 4)
    own = glocal.FederatedData.from_tensors([(x, x[:, :2])] * 2)
    return glocal.fit(glocal.FedAvg(made, optimizer=sgd()), own, **FIT)


def fit_tokens(made):
    own = glocal.FederatedData.from_tensors([torch.arange(40).reshape(10, 4) % 7] * 2)
    return glocal.fit(glocal.FedAvg(made, optimizer=sgd()), own, **FIT)


def fit_augmented(augment):
    x, y = torch.randn(10, 3, 4, 4), torch.arange(10) % 2
    own = glocal.FederatedData.from_tensors([(x, y)] * 2)
    task = glocal.classification(image_model(), augment=augment)
    return glocal.fit(glocal.FedAvg(task, optimizer=sgd()), own, **FIT)


def fit_selected(selector):
    return train(glocal.FedAvg(task(), local=selector, optimizer=sgd()))


def fit_metric(metric):
    return fit_task(glocal.classification(model(), metrics=[metric]))


@cache
def digits():
    return glocal.load_dataset("digits")


def partition(scheme):
    return glocal.FederatedData.partition(digits(), scheme)


def join(made):
    train_examples, plan = examples(), glocal.JoinPlan(epochs=1)
    return glocal.join(made, train_examples, join_plan=plan, engine="looped")


def join_by(made):
    return glocal.join(
        federation(), examples(), existing_data=data().train, join_plan=made, engine="looped"
    )


def advise_with(config):
    return glocal.advise(**advise_arguments() | {"config": config})


def correct(outputs, targets):
    return (outputs.argmax(1) == targets).float()


# ---- the table


def algorithm_row(kind):
    """One pattern for all: a task, an optimizer, and a local part where there is one."""
    arguments = {"task": task(), "optimizer": sgd()}
    if "local" in inspect.signature(kind).parameters and kind is not glocal.LocalOnly:
        arguments["local"] = "0"
    return Row(kind, arguments, train)


def task_rows():
    any_model = {"model": model()}
    tokens_model = {"model": nn.Embedding(7, 7)}
    per_example = nn.CrossEntropyLoss()
    return {
        "Task": Row(glocal.Task, {**any_model, "loss": per_example}, fit_task),
        "Task.find_metric": Row(task().find_metric, {"name": "accuracy"}),
        "classification": Row(glocal.classification, any_model, fit_task),
        "regression": Row(glocal.regression, any_model, fit_regression),
        "multilabel": Row(glocal.multilabel, any_model, fit_multilabel),
        "tokens": Row(glocal.tokens, tokens_model, fit_tokens),
        "Metric": Row(glocal.Metric, {"name": "hits", "per_example": correct}, fit_metric),
        "params_of": Row(glocal.params_of, any_model),
        "first_layers": Row(glocal.first_layers, {**any_model, "count": 1}, fit_selected),
        "last_layers": Row(glocal.last_layers, {**any_model, "count": 1}, fit_selected),
        "Split": Row(glocal.Split, {"local": frozenset("a"), "shared": frozenset("b")}),
        "Split.of": Row(glocal.Split.of, {**any_model, "local": "0"}),
    }


def training_rows():
    def optimizer(made):
        return train(glocal.FedAvg(task(), optimizer=made))

    def scheduled(made):
        return optimizer(glocal.SGD(lr=0.05, lr_schedule=made))

    def aggregated(made):
        return train(glocal.FedAvg(task(), optimizer=sgd(), aggregation=made))

    def encoded(made):
        return train(fedavg(), uplink=made)

    objective = {"loss": task().objective.loss, "trainable": task().trainable}
    params, shared = task().initial_params(), {"shared": {"w": torch.zeros(2)}}
    rates = {"lr": 0.05}
    weighted = {"total": torch.zeros(()), "weight": torch.ones(())}
    return {
        "SGD": Row(glocal.SGD, rates, optimizer),
        "Adam": Row(glocal.Adam, rates, optimizer),
        "AdamW": Row(glocal.AdamW, rates, optimizer),
        "StepLR": Row(glocal.StepLR, {}, scheduled),
        "Algorithm": Row(glocal.Algorithm, {"task": task(), "optimizer": sgd()}),
        "State": Row(glocal.State, shared),
        "Update": Row(glocal.Update, {"upload": {}, "private": {}, "metrics": {}}),
        "Uploads": Row(glocal.Uploads, vars(uploads())),
        "Objective": Row(glocal.Objective, objective),
        "WeightedSum": Row(glocal.WeightedSum, weighted),
        "Work": Row(glocal.Work, work()._asdict()),
        "local_train": Row(
            glocal.local_train,
            {"objective": task().objective, "params": params, "work": work(), "optimizer": sgd()},
        ),
        "Mean": Row(glocal.Mean, {}, aggregated),
        "Median": Row(glocal.Median, {}, aggregated),
        "TrimmedMean": Row(glocal.TrimmedMean, {"trim": 1}, aggregated),
        "Krum": Row(glocal.Krum, {"byzantine": 1}, aggregated),
        "MultiKrum": Row(glocal.MultiKrum, {"byzantine": 1}, aggregated),
        "GeometricMedian": Row(glocal.GeometricMedian, {}, aggregated),
        "CentredClipping": Row(glocal.CentredClipping, {"radius": 1.0}, aggregated),
        "Clip": Row(glocal.Clip, {"norm": 1.0}, encoded),
        "Noise": Row(glocal.Noise, {"std": 0.1}, encoded),
        "Half": Row(glocal.Half, {}, encoded),
        "Int4": Row(glocal.Int4, {}, encoded),
        "Int8": Row(glocal.Int8, {}, encoded),
        "TopK": Row(glocal.TopK, {"share": 0.5}, encoded),
        "chain": Row(glocal.chain, {"codecs": (glocal.Clip(1.0), glocal.Half())}, encoded),
        "Ledger": Row(glocal.Ledger, {}),
        **{kind.__name__: algorithm_row(kind) for kind in ALGORITHMS},
    }


def data_rows():
    read, three = glocal.FederatedData, {"clients": 3}
    subsets = {"train": data().train, "val": data().val, "test": data().test}
    sets = {name: torch.utils.data.TensorDataset(*each) for name, each in arrays().items()}
    ids = {"train_ids": np.arange(1347) % 5, "test_ids": np.arange(450) % 5}
    client_data = {"examples": examples(), "rows": (np.arange(20),), "names": ("ulm",)}
    numbers = {"available": [0, 1], "always": [2], "dropouts": [1]}
    classes = {**three, "classes_per_client": 4}
    by_column = {"frame": frame(), "client": "place", "target": "ill"}
    by_numbers = {"available": np.arange(2), "always": np.arange(0), "dropouts": np.arange(0)}
    return {
        "Examples": Row(glocal.Examples, examples()._asdict()),
        "ClientData": Row(glocal.ClientData, client_data),
        "ClientData.of": Row(data().train.of, {"client": 1}),
        "FederatedData": Row(glocal.FederatedData, subsets, fit_data),
        "FederatedData.from_tensors": Row(read.from_tensors, {"clients": arrays()}, fit_data),
        "FederatedData.from_datasets": Row(read.from_datasets, {"datasets": sets}, fit_data),
        "FederatedData.from_dataframe": Row(read.from_dataframe, by_column, fit_data),
        "FederatedData.from_folder": Row(read.from_folder, {"folder": client_files()}, fit_data),
        "FederatedData.partition": Row(
            read.partition, {"dataset": digits(), "scheme": glocal.iid(3)}, fit_data
        ),
        "FederatedData.subsample_labels": Row(
            data().subsample_labels, {"share": 0.5, "seed": 0}, fit_data
        ),
        "FederatedData.to": Row(data().to, {"device": torch.device("cpu")}),
        "iid": Row(glocal.iid, three, partition),
        "shards": Row(glocal.shards, classes, partition),
        "random_shards": Row(glocal.random_shards, classes, partition),
        "dirichlet": Row(glocal.dirichlet, {**three, "alpha": 0.5}, partition),
        "natural": Row(glocal.natural, ids, partition),
        "crop_and_flip": Row(glocal.crop_and_flip, {}, fit_augmented),
        "load_dataset": Row(glocal.load_dataset, {"name": "digits"}),
        "make_rng": Row(glocal.make_rng, {"seed": 0, "purpose": "order", "address": (1, 2)}),
        "Availability": Row(glocal.Availability, by_numbers),
        "Availability.of": Row(glocal.Availability.of, numbers, run_available),
    }


def run_rows():
    def planned(made):
        return run(glocal.Experiment((group(),), made))

    def evaluated(made):
        return train(lg_fedavg(), evaluation=made)

    def optional(made):
        return run(experiment(), options=made)

    def called_back(made):
        evaluation = glocal.Evaluation(every=1)
        return train(lg_fedavg(), rounds=3, evaluation=evaluation, callbacks=[made])

    def engined(made):
        return train(lg_fedavg(), engine=made)

    def pretrained(made):
        return run(glocal.Experiment((group(),), plan(), pretraining=made))

    def warm(made):
        return run(glocal.Experiment(tuple(made), plan()))

    everyone = glocal.Availability.of([0, 1, 2])
    one = {"groups": (group(),), "plan": plan()}
    of_one = {"algorithm": lg_fedavg(), "data": data(), "plan": plan()}
    warm_start = {"groups": (group(),), "optimizer": sgd(), "plan": plan(), "options": looped()}
    return {
        "fit": Row(glocal.fit, {"algorithm": lg_fedavg(), "data": data(), **FIT}),
        "Plan": Row(glocal.Plan, {"rounds": 1, "clients_per_round": 2}, planned),
        "Evaluation": Row(glocal.Evaluation, {}, evaluated),
        "Options": Row(glocal.Options, {"engine": "looped"}, optional),
        "EngineConfig": Row(glocal.EngineConfig, {"name": "looped"}, engined),
        "EarlyStopping": Row(glocal.EarlyStopping, {"patience": 1}, called_back),
        "Experiment": Row(glocal.Experiment, one, run),
        "Experiment.of": Row(glocal.Experiment.of, of_one, run),
        "Group": Row(glocal.Group, {"algorithm": lg_fedavg(), "data": (data(),)}, run_group),
        "Phase": Row(glocal.Phase, {"first_round": 0, "availability": everyone}, run_phase),
        "Pretraining": Row(glocal.Pretraining, {"epochs": 1}, pretrained),
        "Run": Row(
            glocal.Run, {"experiment": experiment(), "options": looped()}, glocal.Run.to_end
        ),
        "warm_start_groups": Row(glocal.warm_start_groups, warm_start, warm),
    }


def result_rows():
    one = result().group()
    record = {
        "seed": 0,
        "group": "",
        "round_index": 0,
        "done": 1,
        "rounds": 1,
        "loss": 0.5,
        "clients": (0, 1),
        "dropped": (),
        "ledger": glocal.Ledger(),
    }
    row = {"seed": 0, "client": "a", "split": "test", "metric": "accuracy", "value": 0.5}
    folder_and_algorithm = {"folder": saved_result(), "algorithm": lg_fedavg()}
    return {
        "MetricRow": Row(glocal.MetricRow, row),
        "MetricsTable": Row(glocal.MetricsTable, {"rows": table().rows, "metrics": ()}),
        "MetricsTable.mean": Row(table().mean, {"metric": "accuracy", "split": "test"}),
        "MetricsTable.undefined": Row(table().undefined, {"metric": "accuracy", "split": "test"}),
        "RoundRecord": Row(glocal.RoundRecord, record),
        "Result": Row(glocal.Result, {"groups": (one,), "metrics": table()}),
        "Result.evaluate": Row(result().evaluate, {"data": data()}),
        "Result.group": Row(result().group, {"seed": 0, "group": ""}),
        "Result.model": Row(result().model, {"client": "a"}),
        "Result.save": Row(result().save, {"folder": folder() / "saved"}),
        "Result.state_dict": Row(result().state_dict, {"client": 0}),
        "GroupResult": Row(glocal.GroupResult, vars(one)),
        "GroupResult.params": Row(one.params, {"client": 0}),
        "load": Row(glocal.load, folder_and_algorithm, repr),
        "load_model": Row(glocal.load_model, {"path": saved_model(), "model": model()}),
    }


def personal_rows():
    tune = {"result": apfl_result(), "data": data(), "grid": (0.0, 1.0), "options": looped()}
    client = {"trained_federation": federation(), "train": examples(), "engine": "looped"}
    plan = {"epochs": 1, "rounds": 1, "existing_clients": 1}
    return {
        "alphas_of": Row(glocal.alphas_of, {"result": apfl_result()}),
        "tune_alphas": Row(glocal.tune_alphas, tune),
        "TrainedFederation": Row(glocal.TrainedFederation, federation()._asdict(), join),
        "TrainedFederation.from_result": Row(
            glocal.TrainedFederation.from_result, {"result": result()}, join
        ),
        "JoinPlan": Row(glocal.JoinPlan, plan, join_by),
        "join": Row(glocal.join, {**client, "join_plan": glocal.JoinPlan(epochs=1)}),
        "Budget": Row(glocal.Budget, {}),
        "Budget.parse": Row(glocal.Budget.parse, {"text": "20 MB"}),
        "AdvisorConfig": Row(
            glocal.AdvisorConfig,
            {"num_clients": 3, "stages": (1,), "max_candidates": 2},
            advise_with,
        ),
        "Advice": Row(glocal.Advice, vars(advice())),
        "advise": Row(glocal.advise, advise_arguments()),
    }


@cache
def rows() -> dict[str, Row]:
    """The row of every exported callable, and of public methods, by name."""
    return {
        **task_rows(),
        **training_rows(),
        **data_rows(),
        **run_rows(),
        **result_rows(),
        **personal_rows(),
    }


METHODS = (
    "Availability.of",
    "Budget.parse",
    "ClientData.of",
    "Experiment.of",
    "FederatedData.from_dataframe",
    "FederatedData.from_datasets",
    "FederatedData.from_folder",
    "FederatedData.from_tensors",
    "FederatedData.partition",
    "FederatedData.subsample_labels",
    "FederatedData.to",
    "GroupResult.params",
    "MetricsTable.mean",
    "MetricsTable.undefined",
    "Result.evaluate",
    "Result.group",
    "Result.model",
    "Result.save",
    "Result.state_dict",
    "Split.of",
    "Task.find_metric",
    "TrainedFederation.from_result",
)


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every callable that the table has a row of, by its name, without a world."""
    for name in glocal.__all__:
        if name not in PROTOCOLS_AND_ERRORS:
            yield name, getattr(glocal, name)
    for name in METHODS:
        owner, method = name.split(".")
        yield name, getattr(getattr(glocal, owner), method)


def parameters() -> Iterator[tuple[str, str]]:
    """Every parameter of every callable."""
    for name, function in callables():
        for each in inspect.signature(function).parameters.values():
            if each.name != "self" and each.kind is not each.VAR_KEYWORD:
                yield name, each.name


def wrong_values(valid: object) -> dict[str, object]:
    """What may be given by mistake where `valid` is right, in words."""
    return {
        "None": None,
        "NaN": math.nan,
        "infinity": math.inf,
        "another text": "nonsense",
        "an empty text": "",
        "a negative number": -1,
        "zero": 0,
        "a number that is too large": 10**30,
        "a fraction": 1.5,
        "a flag": True,
        "an empty list": [],
        "an empty tuple": (),
        "an empty dict": {},
        "a list of None": [None],
        "a tuple of texts": ("x", "y", "z"),
        "a dict of numbers": {"x": 1},
        "a generator": (number for number in (1, 2)),
        "a tensor": torch.zeros(2, 3),
        "an array": np.zeros((2, 0)),
        "an object": object(),
        "a class": type(valid),
        "a class of another kind": nn.Linear,
        "a function": lambda *_: None,
        "a set": {1, 2},
    }


def called(row: Row, parameter: str, value: object) -> object:
    """The call with one value in place of a valid one, and then its use."""
    kinds = {each.name: each.kind for each in inspect.signature(row.call).parameters.values()}
    arguments = {**row.arguments, parameter: value}
    several = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
    if not several:
        return row.use(row.call(**arguments))
    rest = (value,) if parameter in several else arguments[several[0]]
    first = [given for name, given in arguments.items() if name not in several]
    return row.use(row.call(*first, *rest))


class HangError(BaseException):
    """A call took too long; no `except Exception` hides it."""


@contextmanager
def time_limit(seconds: float = LIMIT) -> Iterator[None]:
    """End what takes longer."""

    def stop(*_: object) -> None:
        raise HangError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fault_of(call: Callable[[], object]) -> str:
    """What is wrong with the answer to a misuse; empty where it works or is refused in one line."""
    try:
        with time_limit():
            call()
    except glocal.InputError as error:
        return fault_of_message(str(error))
    except (Exception, HangError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def fault_of_message(message: str) -> str:
    """Why a message is not one clear line."""
    if "\n" in message:
        return f"more than one line: {message!r}"
    if not 20 <= len(message) <= 400:
        return f"{len(message)} characters: {message[:200]}"
    return f"an address: {message}" if " at 0x" in message else ""
