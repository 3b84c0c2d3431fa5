"""Algorithms equal naive loops with `torch.optim`, written from the papers' equations.

Every loop keeps plain modules and trains one client after the other, as a reader of the paper
would. Both sides get the same batches in the same order; three rounds, in float64.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.core.sampling import Plan, client_batches, sample_clients
from tests.support import world

PLAN = Plan(rounds=3, clients_per_round=4, local_epochs=2, batch_size=5)
LR = 0.1
CLOSE = 1e-9


def network():
    return world.seeded(world.plain).double()


def train_data():
    train = world.federation().train
    return replace(train, examples=train.examples.with_dtype(torch.float64))


def sizes_of(clients):
    sizes = torch.from_numpy(train_data().sizes[clients]).double()
    return sizes / sizes.sum()


def batches(client, round_index, epochs=None):
    """The client's batches (x, y), epoch by epoch."""
    data = train_data()
    plan = replace(PLAN, local_epochs=epochs or PLAN.local_epochs)
    order = client_batches(plan, data.rows[client], round_index, client)
    by_epoch = []
    for epoch in order:
        rows = [torch.from_numpy(batch[batch >= 0]) for batch in epoch]
        by_epoch.append([(data.examples.x[own], data.examples.y[own]) for own in rows])
    return by_epoch


def train(model, epochs, *, names=None, extra=None, optimizer=None):
    """Train a module by `torch.optim`; `extra` is added to the loss."""
    chosen = [p for name, p in model.named_parameters() if names is None or name in names]
    optimizer = optimizer or torch.optim.SGD(chosen, lr=LR)
    for x, y in [batch for epoch in epochs for batch in epoch]:
        loss = nn.functional.cross_entropy(model(x), y)
        if extra is not None:
            loss = loss + extra(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sum(map(len, epochs))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def load(tensors):
    model = network()
    model.load_state_dict(tensors)
    return model


def mean(trees, shares):
    return {
        name: sum(s * tree[name] for s, tree in zip(shares, trees, strict=True))
        for name in trees[0]
    }


def minus(left, right):
    return {name: left[name] - right[name] for name in left}


def zeros():
    return {name: torch.zeros_like(p) for name, p in network().named_parameters()}


def dot(model, direction):
    return sum((p * direction[name]).sum() for name, p in model.named_parameters())


def distance2(model, anchor):
    return sum((p - anchor[name]).square().sum() for name, p in model.named_parameters())


def equal(shared, expected):
    assert shared.keys() == expected.keys()
    assert world.distance(shared, expected) < CLOSE


def ours(algorithm, plan=PLAN):
    """The state after three rounds of ours."""
    return world.last(world.simulate(algorithm, train_data(), plan, engine="looped"))[0]


def every_round():
    for index in range(PLAN.rounds):
        yield index, sample_clients(PLAN, world.NUM_CLIENTS, index).tolist()


def task():
    return glocal.classification(network())


SGD = glocal.SGD(lr=LR)


@pytest.mark.parametrize("rule", ["avgm", "adam", "yogi", "adagrad"])
def test_server_optimizers_are_those_of_reddi_et_al_algorithm_2(rule):
    """FedAvgM is that of Hsu et al. 2019, equation 1."""
    beta1, beta2, tau, server_lr = 0.9, 0.99, 1e-3, 0.05
    x, m = weights(network()), zeros()
    v = {name: torch.full_like(p, tau**2) for name, p in x.items()}
    for index, clients in every_round():
        deltas = []
        for client in clients:
            model = load(x)
            train(model, batches(client, index))
            deltas.append(minus(weights(model), x))
        delta = mean(deltas, sizes_of(clients))
        for name, d in delta.items():
            if rule == "avgm":
                m[name] = beta1 * m[name] + d
                x[name] = x[name] + server_lr * m[name]
                continue
            m[name] = beta1 * m[name] + (1 - beta1) * d
            if rule == "adam":
                v[name] = beta2 * v[name] + (1 - beta2) * d**2
            elif rule == "yogi":
                v[name] = v[name] - (1 - beta2) * d**2 * torch.sign(v[name] - d**2)
            else:
                v[name] = v[name] + d**2
            x[name] = x[name] + server_lr * m[name] / (v[name].sqrt() + tau)
    classes = {"avgm": "FedAvgM", "adam": "FedAdam", "yogi": "FedYogi", "adagrad": "FedAdagrad"}
    settings = {"momentum": beta1} if rule == "avgm" else {"beta1": beta1, "tau": tau}
    if rule in ("adam", "yogi"):
        settings["beta2"] = beta2
    kind = getattr(glocal, classes[rule])
    equal(ours(kind(task(), optimizer=SGD, server_lr=server_lr, **settings)).shared, x)


def test_scaffold_is_karimireddy_et_al_algorithm_1_with_option_2():
    server_lr, number = 0.7, world.NUM_CLIENTS
    x, c = weights(network()), zeros()
    own = [zeros() for _ in range(number)]
    for index, clients in every_round():
        deltas, controls = [], []
        for client in clients:
            model = load(x)
            correction = minus(c, own[client])
            steps = train(
                model, batches(client, index), extra=lambda net, d=correction: dot(net, d)
            )
            y = weights(model)
            plus = {
                name: own[client][name] - c[name] + (x[name] - y[name]) / (steps * LR) for name in x
            }
            deltas.append(minus(y, x))
            controls.append(minus(plus, own[client]))
            own[client] = plus
        shares = [1 / len(clients)] * len(clients)
        x = {name: x[name] + server_lr * d for name, d in mean(deltas, shares).items()}
        moved = mean(controls, shares)
        c = {name: c[name] + len(clients) / number * moved[name] for name in c}
    state = ours(glocal.Scaffold(task(), optimizer=SGD, server_lr=server_lr))
    equal({name: state.shared[name] for name in x}, x)
    equal({name: state.shared[f"control/{name}"] for name in c}, c)
    for client in range(number):
        private = state.private[0].of(client)
        equal({name: private[f"own_control/{name}"] for name in c}, own[client])


def test_feddyn_is_acar_et_al_algorithm_1():
    alpha, number = 0.3, world.NUM_CLIENTS
    x, h = weights(network()), zeros()
    gradients = [zeros() for _ in range(number)]
    for index, clients in every_round():
        results = []
        for client in clients:
            model, g, anchor = load(x), gradients[client], x
            train(
                model,
                batches(client, index),
                extra=lambda net, g=g, a=anchor: -dot(net, g) + alpha / 2 * distance2(net, a),
            )
            theta = weights(model)
            gradients[client] = {n: g[n] - alpha * (theta[n] - x[n]) for n in g}
            results.append(theta)
        summed = mean([minus(theta, x) for theta in results], [1.0] * len(results))
        h = {name: h[name] - alpha / number * summed[name] for name in h}
        average = mean(results, [1 / len(results)] * len(results))
        x = {name: average[name] - h[name] / alpha for name in x}
    state = ours(glocal.FedDyn(task(), optimizer=SGD, alpha=alpha))
    equal(state.shared, x)
    equal(state.server, h)


def test_fedrep_is_collins_et_al_algorithm_1():
    head_epochs, head = 3, {"2.weight", "2.bias"}
    body = {name for name, _ in network().named_parameters()} - head
    x = weights(network())
    heads = [{name: x[name] for name in head} for _ in range(world.NUM_CLIENTS)]
    shared = {name: x[name] for name in body}
    for index, clients in every_round():
        bodies = []
        for client in clients:
            model = load({**shared, **heads[client]})
            epochs = batches(client, index, epochs=head_epochs + PLAN.local_epochs)
            train(model, epochs[:head_epochs], names=head)
            train(model, epochs[head_epochs:], names=body)
            after = weights(model)
            heads[client] = {name: after[name] for name in head}
            bodies.append({name: after[name] for name in body})
        shared = mean(bodies, sizes_of(clients))
    state = ours(glocal.FedRep(task(), optimizer=SGD, head_epochs=head_epochs))
    equal(state.shared, shared)
    for client in range(world.NUM_CLIENTS):
        equal(state.private[0].of(client), heads[client])


def test_ditto_is_li_et_al_algorithm_1():
    lam = 0.4
    x = weights(network())
    personal = [dict(x) for _ in range(world.NUM_CLIENTS)]
    for index, clients in every_round():
        results = []
        for client in clients:
            model, own, anchor = load(x), load(personal[client]), x
            train(model, batches(client, index))
            near = lambda net, a=anchor: lam / 2 * distance2(net, a)  # noqa: E731
            train(own, batches(client, index), extra=near)
            results.append(weights(model))
            personal[client] = weights(own)
        x = mean(results, sizes_of(clients))
    state = ours(glocal.Ditto(task(), optimizer=SGD, lam=lam))
    equal(state.shared, x)
    for client in range(world.NUM_CLIENTS):
        private = state.private[0].of(client)
        equal({name: private[f"personal/{name}"] for name in x}, personal[client])


def features_of(model, x):
    return model[1](model[0](x))


def test_fedproto_is_tan_et_al_algorithm_1():
    """The distance of an example's features to the prototype of its class is the mean square."""
    lam, classes = 0.5, world.CLASSES
    models = [weights(network()) for _ in range(world.NUM_CLIENTS)]
    prototypes, seen = torch.zeros(classes, 8).double(), torch.zeros(classes).bool()
    data = train_data()
    for index, clients in every_round():
        sums, counts = torch.zeros(classes, 8).double(), torch.zeros(classes).double()
        for client in clients:
            model = load(models[client])
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in [batch for epoch in batches(client, index) for batch in epoch]:
                features = features_of(model, x)
                loss = nn.functional.cross_entropy(model(x), y)
                gaps = (features - prototypes[y]).square().mean(1) * seen[y]
                loss = loss + lam * gaps.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            models[client] = weights(model)
            own = data.of(client)
            with torch.no_grad():
                features = features_of(model, own.x)
            for label in range(classes):
                sums[label] += features[own.y == label].sum(0)
                counts[label] += (own.y == label).sum()
        present = counts > 0
        prototypes[present] = sums[present] / counts[present, None]
        seen |= present
    state = ours(glocal.FedProto(task(), optimizer=SGD, lam=lam))
    assert torch.allclose(state.shared["prototypes"], prototypes, atol=CLOSE)
    for client in range(world.NUM_CLIENTS):
        equal(state.private[0].of(client), models[client])


def own_loss(model, client):
    data = train_data().of(client)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data.x), data.y))


def test_ifca_is_ghosh_et_al_algorithm_1():
    algorithm = glocal.IFCA(task(), optimizer=SGD, clusters=3)
    start = algorithm.init(algorithm.task.initial_params()).shared
    models = [{name: t[k].clone() for name, t in start.items()} for k in range(3)]
    for index, clients in every_round():
        chosen, results = [], []
        for client in clients:
            losses = [own_loss(load(each), client) for each in models]
            chosen.append(int(np.argmin(losses)))
            model = load(models[chosen[-1]])
            train(model, batches(client, index))
            results.append(weights(model))
        sizes = train_data().sizes[clients]
        for k in range(3):
            members = [place for place, cluster in enumerate(chosen) if cluster == k]
            if members:
                own = torch.from_numpy(sizes[members]).double()
                models[k] = mean([results[place] for place in members], own / own.sum())
    shared = ours(algorithm).shared
    for k in range(3):
        equal({name: t[k] for name, t in shared.items()}, models[k])


def test_fesem_is_xie_et_al_algorithm_1():
    """A client without a cluster starts from the mean of all centres."""
    algorithm = glocal.FeSEM(task(), optimizer=SGD, clusters=2)
    start = algorithm.init(algorithm.task.initial_params()).shared
    centres = [{name: t[k].clone() for name, t in start.items()} for k in range(2)]
    cluster = {}
    for index, clients in every_round():
        results = []
        for client in clients:
            own = cluster.get(client)
            model = load(mean(centres, [0.5, 0.5]) if own is None else centres[own])
            train(model, batches(client, index))
            results.append(weights(model))
        for client, result in zip(clients, results, strict=True):
            gaps = [sum((result[n] - c[n]).square().sum() for n in c) for c in centres]
            cluster[client] = int(np.argmin([float(gap) for gap in gaps]))
        after = []
        for k, centre in enumerate(centres):
            members = [place for place, client in enumerate(clients) if cluster[client] == k]
            if not members:
                after.append(centre)
                continue
            sizes = torch.from_numpy(train_data().sizes[[clients[m] for m in members]]).double()
            after.append(mean([results[place] for place in members], sizes / sizes.sum()))
        centres = after
    state = ours(algorithm)
    for k in range(2):
        equal({name: t[k] for name, t in state.shared.items()}, centres[k])
    for client, own in cluster.items():
        assert int(state.profiles[0].of(client)["cluster"].argmax()) == own
