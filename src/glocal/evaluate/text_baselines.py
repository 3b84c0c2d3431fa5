"""What texts give away without a network: the most frequent class, and logistic regression on a bag of words (tf-idf).

On the very rows and words that the networks have: numbers of words (rows, words), 0 is no word.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from glocal.core.data import ClientData
from glocal.core.sampling import IntArray
from glocal.datasets.federated import FederatedData

Predictions = list[IntArray]
_INVERSE_REGULARIZATION = 10.0  # of the data against the penalty, C


class BagOfWords(NamedTuple):
    """Everybody's texts as weighted words, sparse (rows, words), and their classes (rows,)."""

    words: Any
    y: IntArray


class BaselinePredictions(NamedTuple):
    """For every part of a federation what one of the baselines guesses, device by device."""

    val: Predictions
    test: Predictions


def baselines(federated: FederatedData) -> dict[str, BaselinePredictions]:
    """All baselines by name, trained on training rows only."""
    bags = _bag_of_words(federated)
    made: Mapping[
        str, Callable[[FederatedData, BagOfWords], Callable[[int, IntArray], IntArray]]
    ] = {
        "Majority": _majority,
        "Majority per person": _majority_per_person,
        "Bag of words, per person": _per_person,
        "Bag of words, pooled": _pooled,
        "Bag of words, pooled, knows the person": _pooled_with_person,
    }
    guesses = {name: make(federated, bags) for name, make in made.items()}
    parts = (federated.val, federated.test)
    return {
        name: BaselinePredictions(*(_predict(guess, part) for part in parts))
        for name, guess in guesses.items()
    }


def _predict(guess: Callable[[int, IntArray], IntArray], data: ClientData) -> Predictions:
    return [guess(client, rows) if len(rows) else rows for client, rows in enumerate(data.rows)]


def _bag_of_words(federated: FederatedData) -> BagOfWords:
    """Words by how often they are in a text, weighted by how few training texts they are in."""
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import TfidfTransformer

    x, y, _ = (None if part is None else part.cpu().numpy() for part in federated.train.examples)
    assert x is not None
    assert y is not None
    rows, places = np.nonzero(x)
    counts = csr_matrix(
        (np.ones(len(rows)), (rows, x[rows, places])), shape=(len(x), int(x.max()) + 1)
    )
    weighted = (
        TfidfTransformer(sublinear_tf=True)
        .fit(counts[federated.train.all_rows()])
        .transform(counts)
    )
    return BagOfWords(weighted, y)


def _majority(federated: FederatedData, bags: BagOfWords) -> Callable[[int, IntArray], IntArray]:
    most = _majority_class(bags.y[federated.train.all_rows()])
    return lambda client, rows: np.full(len(rows), most)


def _majority_per_person(
    federated: FederatedData, bags: BagOfWords
) -> Callable[[int, IntArray], IntArray]:
    most = [_majority_class(bags.y[rows]) for rows in federated.train.rows]
    return lambda client, rows: np.full(len(rows), most[client])


def _per_person(federated: FederatedData, bags: BagOfWords) -> Callable[[int, IntArray], IntArray]:
    fitted = [_fit(bags.words[rows], bags.y[rows]) for rows in federated.train.rows]
    return lambda client, rows: fitted[client](bags.words[rows])


def _pooled(federated: FederatedData, bags: BagOfWords) -> Callable[[int, IntArray], IntArray]:
    everybody = federated.train.all_rows()
    fitted = _fit(bags.words[everybody], bags.y[everybody])
    return lambda client, rows: fitted(bags.words[rows])


def _pooled_with_person(
    federated: FederatedData, bags: BagOfWords
) -> Callable[[int, IntArray], IntArray]:
    """As pooled, with a column for every person."""
    from scipy.sparse import csr_matrix, hstack

    def beside(words: Any, people: IntArray) -> Any:
        who = (np.ones(len(people)), (np.arange(len(people)), people))
        return hstack(
            [words, csr_matrix(who, shape=(len(people), federated.num_clients))], format="csr"
        )

    everybody, whose = (
        federated.train.all_rows(),
        np.repeat(np.arange(federated.num_clients), federated.train.sizes),
    )
    fitted = _fit(beside(bags.words[everybody], whose), bags.y[everybody])
    return lambda client, rows: fitted(beside(bags.words[rows], np.full(len(rows), client)))


def _fit(words: Any, y: IntArray) -> Callable[[Any], IntArray]:
    """Logistic regression; the one class where there is no other."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    if len({*y.tolist()}) == 1:
        return lambda asked: np.full(asked.shape[0], y[0])
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # not converged to the last digit is good enough
        model = LogisticRegression(C=_INVERSE_REGULARIZATION, max_iter=1000).fit(words, y)
    return lambda asked: np.asarray(model.predict(asked))


def _majority_class(y: IntArray) -> int:
    return int(np.bincount(y).argmax())
