"""What a server and its clients have in common: algorithm, initial params, and what may cross."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch

from glocal.algorithms.contract import Algorithm
from glocal.core.bounds import MAX_EXAMPLES
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.model_tensors import base_fingerprint
from glocal.core.spec import fingerprint, spec_of
from glocal.core.store import TrainingState
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.deploy.settings import PrivacySettings
from glocal.federate.rounds import GroupSetup, needs_single_uploads, start_state, start_wires
from glocal.wire import Aggregation, Chain, Clip, Codec, Identity, Noise, Schema, Wire, chain, pack

_MOST = 2 * MAX_EXAMPLES  # more than any max_weight
_EXAMPLES = torch.tensor([1, 2, _MOST])


@dataclass(frozen=True)
class TrainingSetup:
    """What the server and all clients must have in common.

    `training` has the settings that are neither the algorithm's nor the codec's.
    """

    experiment: str
    algorithm: Algorithm
    codec: Codec
    params: Params
    training: Json

    @property
    def task(self) -> Task:
        """What clients learn."""
        return self.algorithm.task

    @cached_property
    def wire(self) -> Wire:
        """All that may cross, and what a client keeps."""
        return start_wires([self._group], self.codec)[0]

    @cached_property
    def start(self) -> TrainingState:
        """The state before the first round."""
        return start_state([self._group], [self.wire])

    @property
    def private(self) -> Params:
        """What a client starts with, the memory of its codec included."""
        return self.start.private[0].initial

    @property
    def has_private_part(self) -> bool:
        """Whether the algorithm keeps a part of the model on its clients."""
        return bool(self.algorithm.local_part(self.algorithm.init(self.params).private))

    @cached_property
    def equal_weights(self) -> bool:
        """Whether all clients weigh the same, so that none reports its number of examples."""
        return weighs_equally(self.algorithm.aggregation)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of algorithm, codec, initial values and training settings.

        Bytecode is left out: a server and its clients may have different versions of Python.
        """
        spec = {
            "algorithm": self.algorithm_spec,
            "uplink": spec_of(self.codec, with_code=False),
            "params": hashlib.sha256(pack(self.params)).hexdigest(),
            "training": self.training,
        }
        return fingerprint(spec)

    @cached_property
    def algorithm_spec(self) -> Json:
        """The algorithm as plain data."""
        spec: Json = spec_of(self.algorithm, with_code=False)
        return spec

    @cached_property
    def about(self) -> Json:
        """Shapes and algorithm as plain data, for a file's header.

        Of frozen tensors only the fingerprint: they are in no message and no file.
        """
        model = {"shared": _shapes(self.wire.download), "private": _shapes(self.wire.private)}
        about: Json = {"model": model}
        if base := base_fingerprint(self.task.model):
            about["base of frozen tensors"] = base
        return {**about, "algorithm": self.algorithm_spec}

    @property
    def _group(self) -> GroupSetup:
        return GroupSetup(self.algorithm, self.params)


def _shapes(schema: Schema) -> dict[str, list[int | str]]:
    return {name: [*form.shape, str(form.dtype)] for name, form in schema.items()}


def weighs_equally(aggregation: Aggregation) -> bool:
    """Whether a client with more examples weighs as much as another one: by trial."""
    one, two, most = aggregation.weights(_EXAMPLES).tolist()
    return bool(one == two == most)


def weighs_by_examples(aggregation: Aggregation) -> bool:
    """Whether weights are in proportion to examples, with no largest one: by trial."""
    one, two, most = aggregation.weights(_EXAMPLES).tolist()
    return bool(two == 2 * one and most == _MOST * one)


def uplink_codec(uplink: Codec, privacy: PrivacySettings | None) -> Codec:
    """What encodes uploads: clipping and noise come before all else.

    What the simulator draws by address, a server could draw too: such noise hides nothing.
    """
    if any(isinstance(part, Noise) and not part.entropy for part in _parts(uplink)):
        raise InputError(
            "deploy: plan.uplink has noise, which the server could draw too; "
            "leave it out, and set [privacy] in deploy.toml"
        )
    if privacy is None:
        return uplink
    codecs: list[Codec] = [Clip(privacy.clip_norm)]
    if privacy.noise_multiplier:
        codecs.append(Noise(privacy.noise_multiplier * privacy.clip_norm, entropy=True))
    return chain(*codecs, *_parts(uplink))


def _parts(codec: Codec) -> tuple[Codec, ...]:
    """The codecs of a chain; none where messages are sent as they are."""
    if isinstance(codec, Chain):
        return codec.codecs
    return () if codec == Identity() else (codec,)


def require_private(setup: TrainingSetup) -> None:
    """Refuse clipping and noise whose epsilon would not hold."""
    if not setup.algorithm.aggregation.is_mean:
        raise InputError(
            f"deploy: privacy needs a mean of uploads, and {setup.algorithm.name} takes "
            f"{setup.algorithm.aggregation}; set plan.aggregation = 'mean(clients)' in study.toml"
        )
    if not setup.equal_weights:
        raise InputError(
            "deploy: privacy needs the same weight for every client; "
            "set plan.aggregation = 'mean(clients)' in study.toml"
        )
    _require_uploads(setup, "privacy")


def require_maskable(setup: TrainingSetup) -> None:
    """Refuse uploads of which the mean alone is of no use, or which cannot be masked."""
    algorithm, where = setup.algorithm, "deploy: secure_aggregation"
    _require_uploads(setup, "secure_aggregation")
    if not setup.codec.keeps_form:
        raise InputError(
            f"{where} averages uploads as they are sent, and plan.uplink has {setup.codec}; "
            "leave it out"
        )
    if needs_single_uploads(algorithm, setup.params):
        raise InputError(
            f"{where} shows the server the mean of all uploads alone, and {algorithm.name} with "
            f"{algorithm.aggregation} needs each of them; choose another one, or leave it out"
        )
    if not setup.equal_weights and not weighs_by_examples(algorithm.aggregation):
        raise InputError(
            f"{where} weighs clients equally or by their examples, "
            f"and {algorithm.aggregation} does neither; choose another plan.aggregation"
        )
    counters = [n for n, form in setup.wire.upload.items() if not form.dtype.is_floating_point]
    if counters:
        raise InputError(
            f"{where} cannot mask {counters}, which hold whole numbers; keep that layer local"
        )


def _require_uploads(setup: TrainingSetup, setting: str) -> None:
    if not setup.wire.upload:
        raise InputError(
            f"deploy: {setting} protects uploads, and {setup.algorithm.name} sends nothing; "
            "leave it out"
        )
