"""A new client after the last round of an experiment: images rotated as no client has seen them.

Liang et al. 2020, section 5.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import torch

from glocal.core.bounds import MAX_EXAMPLES, count_field
from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.sampling import make_rng
from glocal.core.store import State
from glocal.datasets.federated import FederatedData
from glocal.datasets.rotation import channel_minimum, require_images, rotate_images
from glocal.evaluate import Evaluator, ensemble_figure, local_test, new_test, summarize
from glocal.federate.fitting import Case, Options, build_evaluation
from glocal.federate.result import SeedResult
from glocal.federate.rounds import Seat
from glocal.personalize.onboarding import JoinPlan, JoinResult, join_many


@dataclass(frozen=True)
class NewClientSettings:
    """How many examples a new client draws from the training and test data, and their rotation."""

    rotate: float = 90.0
    train: int = count_field(3000, maximum=MAX_EXAMPLES)
    test: int = count_field(500, maximum=MAX_EXAMPLES)


def join_new_clients(
    experiment: Case,
    results: Sequence[SeedResult],
    options: Options,
    *,
    new_client: NewClientSettings,
    join_plan: JoinPlan,
) -> list[Json]:
    """Let a new client join each seed's federation as it was tested; the accuracies after that."""
    trainable, store = _new_client_rows(experiment, new_client, "train")
    tests, test_store = _new_client_rows(experiment, new_client, "test")
    seats = [
        Seat(result.plan, ClientData(store, (*fed.train.rows, rows)), result.state)
        for result, fed, rows in zip(results, experiment.federations, trainable, strict=True)
    ]
    joined = join_many(experiment.algorithm, seats, join_plan, engine=options.engine_config())
    evaluation = build_evaluation(experiment, options)
    new = [ClientData(test_store, (rows,)) for rows in tests]
    rows = [
        _measure(evaluation, each, fed, own)
        | {"rotated_before": _accuracy_before(evaluation, result, own)}
        for each, fed, own, result in zip(joined, experiment.federations, new, results, strict=True)
    ]
    evaluation.close()
    return rows


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
    experiment: Case, new_client: NewClientSettings, part: str
) -> tuple[list[Rows], Examples]:
    """The rows of each seed's new client, and the store that holds them after the old ones."""
    old, count = getattr(experiment.federations[0], part).examples, getattr(new_client, part)
    fill, stores, rows = channel_minimum(old.x), [old], []
    for seed, federation in zip(experiment.seeds, experiment.federations, strict=True):
        pool = _pool_for(federation, part)
        drawn = old.take(
            np.sort(make_rng(seed, f"newcomer, {part}").choice(pool, count, replace=False))
        )
        start = sum(store.num_rows for store in stores)
        rows.append(np.arange(start, start + count, dtype=np.int64))
        stores.append(drawn._replace(x=rotate_images(drawn.x, new_client.rotate, fill)))
    return rows, Examples(
        torch.cat([store.x for store in stores]), torch.cat([store.y for store in stores])
    )


def _pool_for(federation: FederatedData, part: str) -> Rows:
    """The examples to draw from: all clients' training and validation data, or all test data."""
    if part == "test":
        return np.sort(federation.test.all_rows())
    return np.sort(np.concatenate([federation.train.all_rows(), federation.val.all_rows()]))


def _measure(
    evaluation: Evaluator, joined: JoinResult, fed: FederatedData, own: ClientData
) -> Json:
    """Normal: existing clients, as an ensemble and each alone; rotated: the new client."""
    old = _without_client(joined.state, joined.client)
    normal = new_test(evaluation, old, fed.test)
    local = summarize(local_test(evaluation, old, fed.test), fed.test.sizes)
    new = ensemble_figure(
        evaluation, [(joined.state.shared, joined.state.private.of(joined.client))], own
    )
    return {
        "normal": normal.logits if normal else None,
        "normal_local": local.mean,
        "rotated": new,
        "ledger": joined.ledger.as_dict(),
    }


def _accuracy_before(evaluation: Evaluator, result: SeedResult, own: ClientData) -> float:
    """The accuracy of the existing clients' ensemble on the new client's data, before it trains."""
    state = result.state
    private_parts = [state.private.of(client) for client in sorted(state.private.trained)]
    if not private_parts:
        private_parts = [state.private.initial]
    if not private_parts[0]:  # nothing is private: all models are the same
        private_parts = private_parts[:1]
    models = [(state.shared, private) for private in private_parts]
    return ensemble_figure(evaluation, models, own)


def _without_client(state: State, client: int) -> State:
    """The federation without one client."""
    others = {number: row for number, row in state.private.trained.items() if number != client}
    return State(state.shared, replace(state.private, trained=others))
