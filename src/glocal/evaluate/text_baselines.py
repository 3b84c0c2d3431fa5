"""Baselines for texts without a network: the most frequent class, and a bag of words.

The bag of words is logistic regression on tf-idf. Baselines use the same rows and words as the
networks: numbers of words (rows, words), where 0 is no word.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from glocal.core.data import ClientData
from glocal.core.sampling import IntArray
from glocal.datasets.federated import FederatedData

Predictions = list[IntArray]
Classifier = Callable[[Any], IntArray]  # from weighted words (rows, words) to classes (rows,)
ClientClassifier = Callable[[int, IntArray], IntArray]  # from client and rows to classes (rows,)
_INVERSE_REGULARIZATION = 10.0  # of the data against the penalty, C


class BagOfWords(NamedTuple):
    """All texts as weighted words, sparse (rows, words), and their classes (rows,)."""

    words: Any
    y: IntArray


class BaselinePredictions(NamedTuple):
    """A baseline's predictions for validation and test data, client by client."""

    val: Predictions
    test: Predictions


def baselines(federated: FederatedData) -> dict[str, BaselinePredictions]:
    """The predictions of all baselines by name, trained on training rows only."""
    bags = _bag_of_words(federated)
    predictions: dict[str, BaselinePredictions] = {}
    for name, train in _BASELINES.items():
        classifier = train(federated, bags)
        predictions[name] = BaselinePredictions(
            _predict(classifier, federated.val), _predict(classifier, federated.test)
        )
    return predictions


def _predict(classifier: ClientClassifier, data: ClientData) -> Predictions:
    predictions: Predictions = []
    for client, rows in enumerate(data.rows):
        predictions.append(classifier(client, rows) if len(rows) else rows)
    return predictions


def _bag_of_words(federated: FederatedData) -> BagOfWords:
    """Word counts in the form of tf-idf, with frequencies of the training texts."""
    from sklearn.feature_extraction.text import TfidfTransformer

    examples = federated.train.examples
    counts = _count_words(examples.x.cpu().numpy())
    weights = TfidfTransformer(sublinear_tf=True).fit(counts[federated.train.all_rows()])
    return BagOfWords(weights.transform(counts), examples.y.cpu().numpy())


def _count_words(x: IntArray) -> Any:
    """How often each word is in each text, sparse (rows, words)."""
    from scipy.sparse import csr_matrix

    rows, places = np.nonzero(x)
    ones, words = np.ones(len(rows)), x[rows, places]
    return csr_matrix((ones, (rows, words)), shape=(len(x), int(x.max()) + 1))


def _majority(federated: FederatedData, bags: BagOfWords) -> ClientClassifier:
    majority = _majority_class(bags.y[federated.train.all_rows()])
    return lambda client, rows: np.full(len(rows), majority)


def _majority_per_person(federated: FederatedData, bags: BagOfWords) -> ClientClassifier:
    majority = [_majority_class(bags.y[rows]) for rows in federated.train.rows]
    return lambda client, rows: np.full(len(rows), majority[client])


def _per_person(federated: FederatedData, bags: BagOfWords) -> ClientClassifier:
    classifiers = [_fit(bags.words[rows], bags.y[rows]) for rows in federated.train.rows]
    return lambda client, rows: classifiers[client](bags.words[rows])


def _pooled(federated: FederatedData, bags: BagOfWords) -> ClientClassifier:
    train = federated.train.all_rows()
    classifier = _fit(bags.words[train], bags.y[train])
    return lambda client, rows: classifier(bags.words[rows])


def _pooled_with_person(federated: FederatedData, bags: BagOfWords) -> ClientClassifier:
    """As pooled, with one more column per person."""
    people, train = federated.num_clients, federated.train.all_rows()
    owners = np.repeat(np.arange(people), federated.train.sizes)
    classifier = _fit(_with_person(bags.words[train], owners, people), bags.y[train])

    def predict(client: int, rows: IntArray) -> IntArray:
        owners = np.full(len(rows), client)
        return classifier(_with_person(bags.words[rows], owners, people))

    return predict


def _with_person(words: Any, owners: IntArray, people: int) -> Any:
    """Weighted words beside one column per person, 1 for each text's writer."""
    from scipy.sparse import csr_matrix, hstack

    places = (np.arange(len(owners)), owners)
    columns = csr_matrix((np.ones(len(owners)), places), shape=(len(owners), people))
    return hstack([words, columns], format="csr")


def _fit(words: Any, y: IntArray) -> Classifier:
    """Logistic regression; a constant prediction if there is one class only."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    if len({*y.tolist()}) == 1:
        return lambda others: np.full(others.shape[0], y[0])
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # not converged to the last digit is good enough
        model = LogisticRegression(C=_INVERSE_REGULARIZATION, max_iter=1000).fit(words, y)
    return lambda others: np.asarray(model.predict(others))


def _majority_class(y: IntArray) -> int:
    return int(np.bincount(y).argmax())


# by name, which is a key of saved results
_BASELINES: Mapping[str, Callable[[FederatedData, BagOfWords], ClientClassifier]] = {
    "Majority": _majority,
    "Majority per person": _majority_per_person,
    "Bag of words, per person": _per_person,
    "Bag of words, pooled": _pooled,
    "Bag of words, pooled, knows the person": _pooled_with_person,
}
