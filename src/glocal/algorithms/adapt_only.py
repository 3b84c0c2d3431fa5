"""Adaptation as rounds: clients train their private part, and nothing is sent."""

from typing import Any

from glocal.algorithms.contract import Algorithm, Message, State, Update, Uploads
from glocal.core.training import Work
from glocal.core.trees import Params


class AdaptOnly(Algorithm):
    """What a new client does: another algorithm's `adapt`, under a fixed shared part."""

    of: Algorithm

    @classmethod
    def to(cls, algorithm: Algorithm) -> "AdaptOnly":
        """The adaptation of an algorithm."""
        return cls(algorithm.task, optimizer=algorithm.optimizer, of=algorithm)

    def init(self, params: Params) -> State:
        """As the algorithm begins."""
        return self.of.init(params)

    def upload_like(self, shared: Params) -> Message:
        """Nothing is sent."""
        return {}

    def download(self, shared: Params, profile: Params) -> Message:
        """What the algorithm would send."""
        return self.of.download(shared, profile)

    def local_part(self, private: Params) -> Params:
        """That of the algorithm."""
        return self.of.local_part(private)

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The private part trains."""
        update = self.of.adapt(message, private, work)
        return update._replace(upload={})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """Nothing changes."""
        return shared, server

    def personal(self, shared: Params, private: Params) -> Params:
        """As the algorithm predicts."""
        return self.of.personal(shared, private)

    def predict(self, params: Params, x: Any, mask: Any) -> Any:
        """As the algorithm predicts."""
        return self.of.predict(params, x, mask)


class AdaptReceived(AdaptOnly):
    """The same where there is no shared tree: what the client was sent takes its place."""

    def init(self, params: Params) -> State:
        """A download, and the private part."""
        state = self.of.init(params)
        return State(self.of.download(state.shared, state.profile), state.private)

    def download(self, shared: Params, profile: Params) -> Message:
        """It has been sent already."""
        return shared
