"""The commands of a deployment and their options; what they do is loaded when they are called."""

from pathlib import Path
from typing import Annotated

import typer

from glocal.cli.typer_compat import require_command

deploy_app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
)

ServerFolder = Annotated[
    Path, typer.Argument(help="The server's folder, as `glocal deploy init` made it.")
]
ClientFolder = Annotated[Path, typer.Argument(help="The device's folder, as it was handed over.")]
RunName = Annotated[str, typer.Option("--run", help="The name of the run.")]
ShareMetrics = Annotated[
    bool,
    typer.Option(
        "--metrics",
        help="Let losses and accuracies, and of how many examples, leave the device; its owner can change it.",
    ),
]


@deploy_app.callback()
def deploy(context: typer.Context) -> None:
    """Train on real devices: a server, devices and runs on Flower, with TLS and keys."""
    from glocal.deploy.preflight import require_flower

    require_command(context)
    require_flower()  # what the commands load imports it


@deploy_app.command("init")
def deploy_init(
    folder: ServerFolder,
    clients: Annotated[int, typer.Option(help="How many devices there are to begin with.")] = 4,
    host: Annotated[
        str, typer.Option(help="The name or address at which devices find the server.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 9443,
    rounds: Annotated[int, typer.Option(help="How many rounds to train.")] = 20,
    share_metrics: ShareMetrics = False,
) -> None:
    """Write a new deployment: certificates, keys, model, data function, settings, and a folder for each device."""
    from glocal.cli.deploy_actions import init
    from glocal.deploy.scaffold import DeploymentSpec

    init(folder, DeploymentSpec(clients, host, port, rounds, share_metrics))


@deploy_app.command("server")
def deploy_server(folder: ServerFolder) -> None:
    """Run the server until it is stopped: who connects, every round, losses and bytes."""
    from glocal.cli.deploy_processes import run_server

    run_server(folder)


@deploy_app.command("client")
def deploy_client(
    folders: Annotated[
        list[Path], typer.Argument(help="The folder of the device, or of several in one process.")
    ],
) -> None:
    """Run a device until it is stopped: it connects, comes back after faults, and says what leaves it.

    A gateway runs several: each has its own folder, key and private state, and they take turns.
    """
    from glocal.cli.deploy_processes import run_clients

    run_clients(folders)


@deploy_app.command("run")
def deploy_run(folder: ServerFolder, name: RunName = "first") -> None:
    """Start a run on a running server, and follow it to its report."""
    from glocal.cli.deploy_actions import run

    run(folder, name)


@deploy_app.command("resume")
def deploy_resume(folder: ServerFolder, name: RunName = "first") -> None:
    """Go on with a run from its last round, after a crash or with more rounds."""
    from glocal.cli.deploy_actions import resume

    resume(folder, name)


@deploy_app.command("status")
def deploy_status(folder: ServerFolder) -> None:
    """Who is connected, and how every run stands."""
    from glocal.cli.deploy_actions import status

    status(folder)


@deploy_app.command("add-device")
def deploy_add_client(
    folder: ServerFolder,
    name: Annotated[
        str | None, typer.Option(help="What to call it; by default device-NUMBER.")
    ] = None,
    share_metrics: ShareMetrics = False,
) -> None:
    """Make a folder with a key for one more device; a running server lets it in."""
    from glocal.cli.deploy_actions import add

    add(folder, name, share_metrics=share_metrics)


@deploy_app.command("revoke")
def deploy_revoke(
    folder: ServerFolder,
    name: Annotated[str, typer.Argument(help="The device, as `status` names it.")],
) -> None:
    """Let a device in no longer, from its next request on."""
    from glocal.cli.deploy_actions import revoke_client

    revoke_client(folder, name)


@deploy_app.command("join")
def deploy_join(folder: ServerFolder, name: RunName = "first") -> None:
    """After training: newcomers learn their private part against the shared one, and every device tests its own model."""
    from glocal.cli.deploy_actions import join

    join(folder, name)


@deploy_app.command("predict")
def deploy_predict(
    folder: ClientFolder,
    source: Annotated[
        str, typer.Option("--data", help="The inputs: FILE.npz with x (and y), or module:function.")
    ],
    name: Annotated[
        str | None, typer.Option("--run", help="Which run's model; by default the latest.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the classes into this .npy file instead of printing them."),
    ] = None,
) -> None:
    """Predict on the device, with its own model."""
    from glocal.cli.deploy_actions import predict

    predict(folder, source, name, out)


@deploy_app.command("renew")
def deploy_renew_certificate(folder: ServerFolder) -> None:
    """A new certificate for the server under the same authority; devices need nothing new. Restart the server afterwards."""
    from glocal.cli.deploy_actions import renew_certificate

    renew_certificate(folder)


@deploy_app.command("demo")
def deploy_demo(
    out: Annotated[
        Path | None, typer.Option(help="Where to keep it; by default a new folder under runs/.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How many rounds to train.")] = 3,
) -> None:
    """A server and four devices on this machine, for real, with digits: certificates, rounds, a table, a report."""
    from glocal.cli.deploy_actions import demo
    from glocal.cli.run import free_folder

    demo(out or free_folder(Path("runs/deploy-demo")), rounds=rounds)
