"""FedJAX: its federated averaging on a haiku network of the same layers, with a JAX of its time."""

from collections.abc import Callable, Iterator
from importlib.metadata import version

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fedjax.algorithms import fed_avg

from benchmarks.job import Job, Measurement, job_from_command_line, print_measurement, time_rounds
from benchmarks.workloads import CLASSES, Layer, Workload

PROBE = 1000


def layer_of(layer: Layer) -> Callable[[jax.Array], jax.Array]:
    """One layer in haiku; images are (rows, height, width, channels), as JAX expects them."""
    kind, *numbers = layer
    makers = {
        "linear": lambda: hk.Linear(numbers[1]),
        "conv": lambda: hk.Conv2D(numbers[1], numbers[2], padding="VALID"),
        "pool": lambda: hk.MaxPool(numbers[0], numbers[0], padding="VALID"),
        "relu": lambda: jax.nn.relu,
        "flatten": lambda: hk.Flatten(),
    }
    return makers[kind]()


def model_of(workload: Workload) -> fedjax.Model:
    """The network and its loss, as FedJAX expects them."""
    height, width, channels = workload.shape[1], workload.shape[2], workload.shape[0]
    sample = {"x": jnp.zeros((1, height, width, channels)), "y": jnp.zeros((1,), jnp.int32)}
    network = hk.transform(
        lambda batch: hk.Sequential([layer_of(layer) for layer in workload.layers])(batch["x"])
    )

    def loss(batch: dict[str, jax.Array], logits: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["y"], CLASSES))

    return fedjax.create_model_from_haiku(network, sample, loss)


def datasets(job: Job) -> list[fedjax.ClientDataset]:
    """Each client's rows, mapped from disk."""
    x, y = job.arrays()
    images = np.moveaxis(x, 2, -1)
    return [
        fedjax.ClientDataset({"x": images[client], "y": y[client]})
        for client in range(job.workload.clients)
    ]


def measure(job: Job) -> Measurement:
    """Seconds of every round, and the loss at the end."""
    work, model, clients = job.workload, model_of(job.workload), datasets(job)
    batches = fedjax.ShuffleRepeatBatchHParams(
        batch_size=work.batch_size, num_epochs=work.local_epochs
    )
    momentum = work.momentum or None
    client, server = fedjax.optimizers.sgd(work.lr, momentum=momentum), fedjax.optimizers.sgd(1.0)
    algorithm = fed_avg.federated_averaging(fedjax.model_grad(model), client, server, batches)
    states = [algorithm.init(model.init(jax.random.PRNGKey(0)))]

    def rounds() -> Iterator[None]:
        for seed in range(job.all_rounds):
            sampled = np.random.default_rng(seed).choice(
                work.clients, work.clients_per_round, replace=False
            )
            keys = jax.random.split(jax.random.PRNGKey(seed), work.clients_per_round)
            round_clients = [
                (number, clients[number], key)
                for number, key in zip(sampled.tolist(), keys, strict=True)
            ]
            states[0] = jax.block_until_ready(algorithm.apply(states[0], round_clients)[0])
            yield

    result = time_rounds(rounds(), job)
    x, y = job.arrays()
    probe = {
        "x": np.moveaxis(x, 2, -1).reshape(-1, *clients[0].raw_examples["x"].shape[1:])[:PROBE],
        "y": y.reshape(-1)[:PROBE],
    }
    return {
        **result,
        "loss": float(
            model.train_loss(probe, model.apply_for_eval(states[0].params, probe)).mean()
        ),
    }


def main() -> None:
    """Run the job named on the command line."""
    print_measurement(
        {
            "version": f"fedjax {version('fedjax')}, jax {jax.__version__}",
            **measure(job_from_command_line()),
        }
    )


if __name__ == "__main__":
    main()
