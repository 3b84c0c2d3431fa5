"""A new client after the last round of an experiment: images rotated as no client has seen them.

Liang et al. 2020, section 5.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch

from glocal.core.bounds import MAX_EXAMPLES, count_field
from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.sampling import make_rng
from glocal.core.store import GroupState
from glocal.datasets.federated import FederatedData, move_together
from glocal.datasets.rotation import channel_minimum, require_images, rotate_images
from glocal.evaluate import Evaluator, ensemble_figure, local_test, new_test, summarize
from glocal.federate.result import Result
from glocal.federate.run import Run
from glocal.personalize.onboarding import Joining, JoinPlan, JoinResult, join_many
from glocal.wire import split_private


@dataclass(frozen=True)
class NewClientSettings:
    """How many examples a new client draws from the training and test data, and their rotation."""

    rotate: float = 90.0
    train: int = count_field(3000, maximum=MAX_EXAMPLES)
    test: int = count_field(500, maximum=MAX_EXAMPLES)


@dataclass(frozen=True)
class NewClientTrial:
    """A callback that adds a "new_client" to each seed's result: it joins after the tests."""

    new_client: NewClientSettings
    join_plan: JoinPlan

    def on_end(self, run: Run, result: Result) -> None:
        """Let a new client join each seed's federation as it was tested."""
        group, device = run.experiment.groups[0], run.options.torch_device()
        seeds = range(len(result.groups))
        federations = move_together([group.data_of(place) for place in seeds], device)
        trainable, store = _new_client_rows(result, federations, self.new_client, "train")
        tests, test_store = _new_client_rows(result, federations, self.new_client, "test")
        joining: list[Joining] = []
        for own, fed, rows in zip(result.groups, federations, trainable, strict=True):
            data = ClientData(store, (*fed.train.rows, rows))
            joining.append(Joining(own.plan, data, own.state, own.uplink))
        engine = run.options.engine_config()
        algorithm = result.algorithm
        joined = join_many(algorithm, joining, self.join_plan, engine=engine)
        evaluator = Evaluator(algorithm, engine=engine)
        for own, each, fed, rows in zip(result.groups, joined, federations, tests, strict=True):
            new = ClientData(test_store, (rows,))
            before = _figure_before(evaluator, own.state, new)
            measured = _measure(evaluator, each, fed, new)
            own.extras["new_client"] = {**measured, "rotated_before": before}
        evaluator.close()


def require_new_client(
    new_client: NewClientSettings | None, federation: FederatedData, experiment: str
) -> None:
    """Refuse a join_plan without a new client, and a new client with too few data to draw from."""
    if new_client is None:
        raise InputError(
            f"settings: experiments.{experiment} has a join_plan, but there is no [new_client]; "
            "add one, or leave the join_plan out"
        )
    for part in ("train", "test"):
        size = len(_pool_for(federation, part))
        if not 1 <= getattr(new_client, part) <= size:
            raise InputError(
                f"settings: new_client.{part} is {getattr(new_client, part)}; "
                f"it must be from 1 to {size}"
            )
    if not isfinite(new_client.rotate):
        raise InputError(
            f"settings: new_client.rotate is {new_client.rotate}; a number of degrees was expected"
        )
    require_images(federation.train.examples.x)


def _new_client_rows(
    result: Result,
    federations: Sequence[FederatedData],
    new_client: NewClientSettings,
    part: str,
) -> tuple[list[Rows], Examples]:
    """The rows of each seed's new client, and the store that holds them after the old ones."""
    old, count = getattr(federations[0], part).examples, getattr(new_client, part)
    fill, stores, rows = channel_minimum(old.x), [old], []
    for own, federation in zip(result.groups, federations, strict=True):
        pool = _pool_for(federation, part)
        rng = make_rng(own.seed, f"newcomer, {part}")
        drawn = old.take(np.sort(rng.choice(pool, count, replace=False)))
        start = sum(store.num_rows for store in stores)
        rows.append(np.arange(start, start + count, dtype=np.int64))
        stores.append(drawn._replace(x=rotate_images(drawn.x, new_client.rotate, fill)))
    x = torch.cat([store.x for store in stores])
    return rows, Examples(x, torch.cat([store.y for store in stores]))


def _pool_for(federation: FederatedData, part: str) -> Rows:
    """The examples to draw from: all clients' training and validation data, or all test data."""
    if part == "test":
        return np.sort(federation.test.all_rows())
    return np.sort(np.concatenate([federation.train.all_rows(), federation.val.all_rows()]))


def _measure(evaluator: Evaluator, joined: JoinResult, fed: FederatedData, own: ClientData) -> Json:
    """Normal: existing clients, as an ensemble and each alone; rotated: the new client."""
    state = joined.state
    old = state._replace(private=state.private.only({*state.private.stored} - {joined.client}))
    normal = new_test(evaluator, old, fed.test)
    local = summarize(local_test(evaluator, old, fed.test), fed.test.sizes)
    model = (state.shared, state.private.of(joined.client))
    return {
        "normal": normal.figures[evaluator.task.metric.name] if normal else None,
        "normal_local": local.mean,
        "rotated": ensemble_figure(evaluator, [model], own),
        "ledger": joined.ledger.as_dict(),
    }


def _figure_before(evaluator: Evaluator, state: GroupState, own: ClientData) -> float | None:
    """The figure of the existing clients' ensemble on the new client's data, before it trains."""
    private_parts = [state.private.of(client) for client in sorted(state.private.stored)]
    if not private_parts:
        private_parts = [state.private.initial]
    if not split_private(private_parts[0])[0]:  # nothing is private: all models are the same
        private_parts = private_parts[:1]
    models = [(state.shared, private) for private in private_parts]
    return ensemble_figure(evaluator, models, own)
