"""Mistakes that no signature shows: each is refused in one clear line that names it."""

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from tests.support import misuse
from tests.support.misuse import arrays, data, fedavg, fit_task, lg_fedavg, model, sgd, task, train

read = glocal.FederatedData.from_tensors


def fit_on(clients, own_task=None, **settings):
    """A fit on other data."""
    algorithm = glocal.FedAvg(own_task or task(), optimizer=sgd())
    return glocal.fit(algorithm, read(clients), **misuse.FIT | settings)


def changed(change):
    """The clients' arrays after `change(x, y)` of the second client's."""
    clients = {name: (x.clone(), y.clone()) for name, (x, y) in arrays().items()}
    clients["b"] = change(*clients["b"])
    return clients


def with_nan(x, y):
    x[3, 1] = torch.nan
    return x, y


def with_infinity(x, y):
    x[3, 1] = torch.inf
    return x, y


def with_nan_targets(x, y):
    return x, torch.full((20,), torch.nan)


def with_class_7(x, y):
    y[4] = 7
    return x, y


def with_class_minus_1(x, y):
    y[4] = -1
    return x, y


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(4, 2))


def compiled():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(model())


def failing(*_):
    raise RuntimeError("no\nway")


class Unreadable(torch.utils.data.Dataset):
    """A data set whose items cannot be read."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise OSError("no such picture")


class Stream(torch.utils.data.IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        return iter([])


class Loud:
    """A callback that fails."""

    def on_round(self, run, records):
        raise ValueError("too loud")


class Tuple(nn.Module):
    """A model that returns two tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x), x


def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def pairs(x, y):
    return torch.utils.data.TensorDataset(x, y)


def a_file(folder):
    path = folder / "file.txt"
    path.write_text("nothing")
    return path


def empty_table():
    return __import__("pandas").DataFrame({"place": [], "ill": []})


def text_table():
    return __import__("pandas").DataFrame({"place": ["a"] * 4, "x": list("abcd"), "ill": [0] * 4})


OTHER = {"a": (torch.zeros(20, 5), torch.arange(20) % 2)}
META = nn.Linear(4, 2, device="meta")

MODELS = {
    "a module on the device meta": (lambda _: fit_task(glocal.classification(META)), "meta"),
    "a scripted module": (lambda _: glocal.classification(scripted()), "scripted"),
    "a compiled module": (lambda _: glocal.classification(compiled()), "compiled"),
    "the class of a module": (lambda _: glocal.classification(nn.Linear), "class Linear"),
    "a module without parameters": (lambda _: glocal.classification(nn.ReLU()), "nothing to train"),
    "a frozen module": (
        lambda _: glocal.classification(nn.Linear(4, 2).requires_grad_(False)),
        "nothing to train",
    ),
    "a lazy module": (lambda _: fit_task(glocal.classification(nn.LazyLinear(2))), "lazy"),
    "a state dict": (lambda _: glocal.classification(model().state_dict()), "nn.Module"),
    "two outputs": (lambda _: fit_task(glocal.classification(Tuple())), "forward="),
    "too few inputs": (lambda _: fit_task(glocal.classification(nn.Linear(3, 2))), "(4,)"),
    "a model in float64 on the device meta": (
        lambda _: fit_task(glocal.classification(nn.Linear(4, 2, device="meta").double())),
        "meta",
    ),
}

TASKS = {
    "a reduced loss": (
        lambda _: fit_task(glocal.Task(model(), lambda x, y: mean_loss(x, y))),
        "reduction='none'",
    ),
    "a summed loss": (
        lambda _: glocal.Task(model(), nn.CrossEntropyLoss(reduction="sum")),
        "reduction",
    ),
    "the class of a loss": (
        lambda _: fit_task(glocal.Task(model(), nn.CrossEntropyLoss)),
        "CrossEntropyLoss",
    ),
    "a loss that fails": (lambda _: fit_task(glocal.Task(model(), failing)), "no way"),
    "two class weights too many": (
        lambda _: fit_task(glocal.classification(model(), class_weights=torch.ones(4))),
        "weight",
    ),
    "a list of class weights": (
        lambda _: glocal.classification(model(), class_weights=[1.0, 2.0]),
        "a list of length 2",
    ),
    "an unknown metric": (
        lambda _: glocal.classification(model(), metrics=["acuracy"]),
        "did you mean 'accuracy'",
    ),
    "a metric twice": (
        lambda _: glocal.classification(model(), metrics=["f1", "f1"]),
        "each once",
    ),
    "a metric that fails": (
        lambda _: misuse.fit_metric(glocal.Metric("odd", per_example=failing)),
        "odd fails",
    ),
    "a metric of another shape": (
        lambda _: misuse.fit_metric(glocal.Metric("odd", per_example=lambda x, y: x.sum())),
        "one value per example",
    ),
    "a metric that does not finish": (
        lambda _: misuse.fit_metric(
            glocal.Metric("odd", per_example=misuse.correct, finish=failing)
        ),
        "odd fails",
    ),
    "an augmentation that fails": (
        lambda _: fit_task(glocal.classification(model(), augment=failing)),
        "no way",
    ),
    "an unknown head": (
        lambda _: glocal.Task(model(), nn.CrossEntropyLoss(), head="body"),
        "'body'",
    ),
    "a regression of classes' model": (
        lambda _: fit_task(glocal.regression(model())),
        "shape",
    ),
}

DATA = {
    "a generator of clients": (lambda _: read(pair for pair in arrays().values()), "generator"),
    "one tensor": (lambda _: read(torch.zeros(3, 4)), "Tensor"),
    "no clients": (lambda _: read({}), "no clients"),
    "names that are numbers": (lambda _: read({1: arrays()["a"]}), "a client's name"),
    "an empty name": (lambda _: read({"": arrays()["a"]}), "a client's name"),
    "four arrays": (lambda _: read([(1, 2, 3, 4)]), "4 arrays"),
    "texts as inputs": (lambda _: read([(["a", "b"], [0, 1])]), "tensor"),
    "rows of unequal length": (lambda _: read([([[1.0], [1.0, 2.0]], [0, 1])]), "tensor"),
    "complex numbers": (
        lambda _: read([(torch.zeros(3, 4, dtype=torch.complex64), torch.zeros(3))]),
        "complex",
    ),
    "more inputs than targets": (lambda _: read(changed(lambda x, y: (x, y[:-1]))), "lengths"),
    "a client with other inputs": (lambda _: read(arrays() | OTHER), "all clients need the same"),
    "a client without examples": (
        lambda _: fit_on(changed(lambda x, y: (x[:0], y[:0]))),
        "no training examples",
    ),
    "NaN": (lambda _: fit_on(changed(with_nan)), "NaN"),
    "infinity": (lambda _: fit_on(changed(with_infinity)), "infinity"),
    "targets that are NaN": (
        lambda _: fit_on([with_nan_targets(*arrays()["a"])] * 2, glocal.regression(model())),
        "NaN",
    ),
    "a target above the classes": (lambda _: fit_on(changed(with_class_7)), "label 7"),
    "a negative target": (lambda _: fit_on(changed(with_class_minus_1)), "label -1"),
    "floating targets": (
        lambda _: fit_on([(x, y.float()) for x, y in arrays().values()]),
        "y.long()",
    ),
    "one-hot whole numbers": (
        lambda _: fit_on([(x, nn.functional.one_hot(y)) for x, y in arrays().values()]),
        "targets",
    ),
    "inputs on the device meta": (
        lambda _: fit_on([(x.to("meta"), y) for x, y in arrays().values()]),
        "meta",
    ),
    "test sets of other clients": (
        lambda _: read(arrays(), test={"x": arrays()["a"]}),
        "test",
    ),
    "test sets in another order": (
        lambda _: read(arrays(), test=dict(reversed(arrays().items()))),
        "same order",
    ),
    "a data loader": (
        lambda _: glocal.FederatedData.from_datasets(
            [torch.utils.data.DataLoader(pairs(*arrays()["a"]))]
        ),
        "DataLoader",
    ),
    "a stream": (lambda _: glocal.FederatedData.from_datasets([Stream()]), "length"),
    "an unreadable data set": (
        lambda _: glocal.FederatedData.from_datasets([Unreadable()]),
        "no such picture",
    ),
    "client ids of another length": (
        lambda _: glocal.FederatedData.from_datasets(pairs(*arrays()["a"]), clients=[0, 1]),
        "(2,)",
    ),
    "a folder that is a file": (
        lambda folder: glocal.FederatedData.from_folder(a_file(folder)),
        "no folder",
    ),
    "an empty folder": (lambda folder: glocal.FederatedData.from_folder(folder), "no file"),
    "an empty table": (
        lambda _: glocal.FederatedData.from_dataframe(empty_table(), client="place", target="ill"),
        "column",
    ),
    "a column of texts": (
        lambda _: glocal.FederatedData.from_dataframe(text_table(), client="place", target="ill"),
        "'x'",
    ),
    "more clients than examples": (
        lambda _: glocal.FederatedData.partition(misuse.digits(), glocal.iid(5000)),
        "5000",
    ),
    "ids of other rows": (
        lambda _: glocal.FederatedData.partition(misuse.digits(), glocal.natural([1, 2], [1])),
        "ids",
    ),
}

SETTINGS = {
    "a local part where everything is local": (
        lambda _: glocal.LocalOnly(task(), optimizer=glocal.SGD(lr=0.1), local="0"),
        "everything is local",
    ),
    "an optimizer of torch's": (
        lambda _: glocal.FedAvg(task(), optimizer=torch.optim.SGD(model().parameters(), lr=0.1)),
        "functools.partial",
    ),
    "the class of an optimizer": (lambda _: glocal.FedAvg(task(), optimizer=glocal.SGD), "SGD"),
    "an unknown setting of an optimizer": (
        lambda _: glocal.FedAvg(
            task(), optimizer=functools.partial(torch.optim.SGD, lr=0.1, nesterov=True)
        ),
        "nesterov",
    ),
    "another optimizer of torch's": (
        lambda _: glocal.FedAvg(task(), optimizer=functools.partial(torch.optim.LBFGS, lr=0.1)),
        "LBFGS|partial",
    ),
    "a schedule of torch's": (
        lambda _: glocal.SGD(lr=0.1, lr_schedule=torch.optim.lr_scheduler.StepLR),
        "StepLR",
    ),
    "a schedule that is a function": (
        lambda _: glocal.SGD(lr=0.1, lr_schedule=lambda epoch: 0.9),
        "StepLR",
    ),
    "an algorithm's class": (
        lambda _: glocal.fit(glocal.FedAvg, data(), **misuse.FIT),
        "the class FedAvg",
    ),
    "a model for a task": (lambda _: glocal.FedAvg(model(), optimizer=sgd()), "glocal.Task"),
    "arrays for data": (
        lambda _: glocal.fit(fedavg(), arrays(), **misuse.FIT),
        "from_tensors",
    ),
    "an unknown layer": (
        lambda _: glocal.LGFedAvg(task(), local="encoder", optimizer=sgd()),
        "matches no parameter",
    ),
    "a layer on both sides": (
        lambda _: glocal.LGFedAvg(task(), local=["0", "2"], shared="0", optimizer=sgd()),
        "both",
    ),
    "a layer on neither side": (
        lambda _: glocal.LGFedAvg(task(), optimizer=sgd()),
        "neither side",
    ),
    "a module as the local part": (
        lambda _: glocal.LGFedAvg(task(), local=model()[0], optimizer=sgd()),
        "give its name",
    ),
    "no rounds": (lambda _: train(fedavg(), rounds=0), "rounds is 0"),
    "more clients than there are": (lambda _: train(fedavg(), clients_per_round=4), "3 clients"),
    "a flag as the size of a batch": (lambda _: train(fedavg(), batch_size=True), "is True"),
    "no seeds": (lambda _: train(fedavg(), seeds=[]), "seeds"),
    "a seed twice": (lambda _: train(fedavg(), seeds=[1, 1]), "each once"),
    "a negative seed": (lambda _: train(fedavg(), seeds=[-1]), "-1"),
    "a fraction as a seed": (lambda _: train(fedavg(), seeds=[0.5]), "0.5"),
    "a text of seeds": (lambda _: train(fedavg(), seeds="01"), "'01'"),
    "an unknown metric to select by": (lambda _: train(fedavg(), select="max auroc"), "auroc"),
    "the wrong direction": (lambda _: train(fedavg(), select="min accuracy"), "max accuracy"),
    "no direction": (lambda _: train(fedavg(), select="accuracy"), "direction"),
    "validation without data": (
        lambda _: glocal.fit(
            fedavg(), read(arrays(), validation=0), **misuse.FIT, select="max accuracy"
        ),
        "validation",
    ),
    "a folder that is taken": (lambda folder: train(fedavg(), folder=a_file(folder)), "file.txt"),
    "an unknown device": (lambda _: train(fedavg(), device="gpu"), "'gpu'"),
    "the device meta": (lambda _: train(fedavg(), device="meta"), "'meta'"),
    "an unknown engine": (lambda _: train(fedavg(), engine="fast"), "'fast'"),
    "a callback that is a class": (lambda _: train(fedavg(), callbacks=[Loud]), "class Loud"),
    "one callback": (lambda _: train(fedavg(), callbacks=Loud()), "list of callbacks"),
    "a callback that fails": (lambda _: train(fedavg(), callbacks=[Loud()]), "too loud"),
    "the class of a codec": (lambda _: train(fedavg(), uplink=glocal.Int8), "Int8"),
    "a codec's class in a chain": (lambda _: glocal.chain(glocal.Clip(1.0), glocal.Half), "Half"),
    "a warm start from a path": (lambda _: train(fedavg(), start_from="run"), "start_from"),
    "a client at both places": (
        lambda _: glocal.Availability.of([0, 0]),
        "twice",
    ),
    "phases out of order": (
        lambda _: glocal.Experiment(
            (misuse.group(),),
            misuse.plan(),
            phases=(
                glocal.Phase(0, glocal.Availability.of([0])),
                glocal.Phase(0, glocal.Availability.of([1])),
            ),
        ),
        "each later",
    ),
    "a client that is not there": (
        lambda _: misuse.run_available(glocal.Availability.of([0, 7])),
        "7",
    ),
    "two groups of one name": (
        lambda _: glocal.Experiment((misuse.group(), misuse.group()), misuse.plan()),
        "name",
    ),
}

RESULTS = {
    "an unknown client": (lambda _: misuse.result().model("ulm"), "'ulm'"),
    "a client beyond the last": (lambda _: misuse.result().model(3), "0..2"),
    "an unknown seed": (lambda _: misuse.result().model("a", seed=7), "seed 7"),
    "an unknown group": (lambda _: misuse.result().model("a", group="x"), "group 'x'"),
    "an unknown split": (lambda _: misuse.result().metrics.mean(split="train"), "'train'"),
    "an unknown column": (lambda _: misuse.result().metrics.where(clent="a"), "'client'"),
    "other clients' data": (lambda _: misuse.result().evaluate(read([arrays()["a"]])), "3 clients"),
    "a folder without a result": (lambda folder: glocal.load(folder, lg_fedavg()), "fit.json"),
    "another algorithm": (lambda _: glocal.load(misuse.saved_result(), fedavg()), "another"),
    "alphas without APFL": (lambda _: glocal.alphas_of(misuse.result()), "APFL"),
    "a file that is no model": (
        lambda folder: glocal.load_model(a_file(folder), model()),
        "file.txt",
    ),
    "another model": (
        lambda _: glocal.load_model(misuse.saved_model(), nn.Linear(4, 2)),
        "does not fit",
    ),
    "a new client without examples": (
        lambda _: glocal.join(
            misuse.federation(), glocal.Examples(torch.zeros(0, 4), torch.zeros(0).long())
        ),
        "no labelled example",
    ),
    "a new client with other inputs": (
        lambda _: glocal.join(misuse.federation(), glocal.Examples(*OTHER["a"])),
        "(5,)",
    ),
    "a new client with an unknown class": (
        lambda _: glocal.join(
            misuse.federation(), glocal.Examples(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
        ),
        "labels from 0 to 1",
    ),
    "advice about LG-FedAvg": (
        lambda _: glocal.advise(lg_fedavg(), data(), misuse.plan()),
        "begin with FedAvg",
    ),
    "a budget without a unit": (lambda _: glocal.Budget.parse("20"), "'20'"),
}

MISUSES = {**MODELS, **TASKS, **DATA, **SETTINGS, **RESULTS}


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """No step is compiled for one round."""
    monkeypatch.setenv("CXX", "no-such-compiler")


def test_there_are_at_least_sixty_and_no_words_are_used_twice():
    tables = (MODELS, TASKS, DATA, SETTINGS, RESULTS)
    assert len(MISUSES) == sum(map(len, tables)) >= 60


@pytest.mark.parametrize("words", MISUSES)
def test_a_mistake_is_refused_in_one_line_that_names_it(words, tmp_path):
    call, named = MISUSES[words]
    with misuse.time_limit(), pytest.raises(glocal.InputError) as refused:
        call(tmp_path)
    message = str(refused.value)
    assert misuse.fault_of_message(message) == ""
    assert any(part in message for part in named.split("|"))


@pytest.mark.parametrize("number", [np.int64(2), np.int32(2)])
def test_whole_numbers_of_numpy_are_taken_also_where_a_run_is_saved(number, tmp_path):
    result = train(fedavg(), rounds=number, batch_size=number, seeds=[number], folder=tmp_path)
    result.save(tmp_path / "result")
    assert result.seeds == (2,)
