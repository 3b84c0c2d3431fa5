"""What texts give away without a network: the most frequent class, and logistic regression on a bag of words (tf-idf).

On the very rows and words that the networks have: numbers of words (rows, words), 0 is no word.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from glocal.core.data import Holdings
from glocal.core.sampling import Integers
from glocal.datasets.federated import Federation

Guesses = list[Integers]
_WEIGHT = 10.0  # of the data against the penalty, C


class Bags(NamedTuple):
    """Everybody's texts as weighted words, sparse (rows, words), and their classes (rows,)."""

    words: Any
    y: Integers


class Guessers(NamedTuple):
    """For every part of a federation what one of the baselines guesses, device by device."""

    val: Guesses
    test: Guesses


def baselines(federation: Federation) -> dict[str, Guessers]:
    """All baselines by name, trained on training rows only."""
    bags = _bags(federation)
    made: Mapping[str, Callable[[Federation, Bags], Callable[[int, Integers], Integers]]] = {
        "Majority": _majority,
        "Majority per person": _own_majority,
        "Bag of words, per person": _alone,
        "Bag of words, pooled": _pooled,
        "Bag of words, pooled, knows the person": _knowing,
    }
    guesses = {name: make(federation, bags) for name, make in made.items()}
    parts = (federation.val, federation.test)
    return {name: Guessers(*(_guessed(guess, part) for part in parts)) for name, guess in guesses.items()}


def _guessed(guess: Callable[[int, Integers], Integers], holdings: Holdings) -> Guesses:
    return [guess(device, rows) if len(rows) else rows for device, rows in enumerate(holdings.rows)]


def _bags(federation: Federation) -> Bags:
    """Words by how often they are in a text, weighted by how few training texts they are in."""
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import TfidfTransformer

    x, y, _ = (None if part is None else part.cpu().numpy() for part in federation.train.examples)
    assert x is not None
    assert y is not None
    rows, places = np.nonzero(x)
    counts = csr_matrix((np.ones(len(rows)), (rows, x[rows, places])), shape=(len(x), int(x.max()) + 1))
    weighted = TfidfTransformer(sublinear_tf=True).fit(counts[federation.train.pooled()]).transform(counts)
    return Bags(weighted, y)


def _majority(federation: Federation, bags: Bags) -> Callable[[int, Integers], Integers]:
    most = _most(bags.y[federation.train.pooled()])
    return lambda device, rows: np.full(len(rows), most)


def _own_majority(federation: Federation, bags: Bags) -> Callable[[int, Integers], Integers]:
    most = [_most(bags.y[rows]) for rows in federation.train.rows]
    return lambda device, rows: np.full(len(rows), most[device])


def _alone(federation: Federation, bags: Bags) -> Callable[[int, Integers], Integers]:
    fitted = [_fitted(bags.words[rows], bags.y[rows]) for rows in federation.train.rows]
    return lambda device, rows: fitted[device](bags.words[rows])


def _pooled(federation: Federation, bags: Bags) -> Callable[[int, Integers], Integers]:
    everybody = federation.train.pooled()
    fitted = _fitted(bags.words[everybody], bags.y[everybody])
    return lambda device, rows: fitted(bags.words[rows])


def _knowing(federation: Federation, bags: Bags) -> Callable[[int, Integers], Integers]:
    """As pooled, with a column for every person."""
    from scipy.sparse import csr_matrix, hstack

    def beside(words: Any, people: Integers) -> Any:
        who = (np.ones(len(people)), (np.arange(len(people)), people))
        return hstack([words, csr_matrix(who, shape=(len(people), federation.devices))], format="csr")

    everybody, whose = federation.train.pooled(), np.repeat(np.arange(federation.devices), federation.train.sizes)
    fitted = _fitted(beside(bags.words[everybody], whose), bags.y[everybody])
    return lambda device, rows: fitted(beside(bags.words[rows], np.full(len(rows), device)))


def _fitted(words: Any, y: Integers) -> Callable[[Any], Integers]:
    """Logistic regression; the one class where there is no other."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    if len({*y.tolist()}) == 1:
        return lambda asked: np.full(asked.shape[0], y[0])
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # not converged to the last digit is good enough
        model = LogisticRegression(C=_WEIGHT, max_iter=1000).fit(words, y)
    return lambda asked: np.asarray(model.predict(asked))


def _most(y: Integers) -> int:
    return int(np.bincount(y).argmax())
