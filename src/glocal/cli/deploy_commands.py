"""The commands of a deployment and their options; each loads its implementation when called."""

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
ClientFolder = Annotated[
    Path,
    typer.Argument(help="The client's folder, as `glocal deploy init` or `add-client` made it."),
]
RunName = Annotated[str, typer.Option("--run", help="The name of the run.")]
ShareMetrics = Annotated[
    bool,
    typer.Option(
        "--share-metrics",
        help="Send losses, accuracies and numbers of examples; the client's owner can change it.",
    ),
]


@deploy_app.callback()
def deploy(context: typer.Context) -> None:
    """Train on real machines: a server, clients and runs on Flower, with TLS and keys."""
    from glocal.deploy.preflight import require_flower

    require_command(context)
    require_flower()  # the commands import it


@deploy_app.command("init")
def deploy_init(
    folder: ServerFolder,
    clients: Annotated[int, typer.Option(help="The number of clients to begin with.")] = 4,
    host: Annotated[
        str, typer.Option(help="The server's name or address, as clients reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port.")] = 9443,
    rounds: Annotated[int, typer.Option(help="The number of rounds.")] = 20,
    share_metrics: ShareMetrics = False,
) -> None:
    """Write a new deployment with a folder for each client.

    It has certificates, keys, settings, a model and a data function.
    """
    from glocal.cli.deploy_actions import init
    from glocal.deploy.scaffold import DeploymentSpec

    init(folder, DeploymentSpec(clients, host, port, rounds, share_metrics))


@deploy_app.command("server")
def deploy_server(folder: ServerFolder) -> None:
    """Run the server until it is stopped. It reports connections, rounds, losses and bytes."""
    from glocal.cli.deploy_processes import run_server

    run_server(folder)


@deploy_app.command("client")
def deploy_client(
    folders: Annotated[
        list[Path], typer.Argument(help="The folder of the client, or of several in one process.")
    ],
) -> None:
    """Run a client until it is stopped. It reconnects after errors and reports what it sends.

    A gateway runs several: each has its own folder, key and private state, and they take turns.
    """
    from glocal.cli.deploy_processes import run_clients

    run_clients(folders)


@deploy_app.command("run")
def deploy_run(folder: ServerFolder, name: RunName = "first") -> None:
    """Start a run on a running server and follow it. At the end, its report is written."""
    from glocal.cli.deploy_actions import run

    run(folder, name)


@deploy_app.command("resume")
def deploy_resume(folder: ServerFolder, name: RunName = "first") -> None:
    """Continue a run from its last round. Use it after a crash, or with more rounds."""
    from glocal.cli.deploy_actions import resume

    resume(folder, name)


@deploy_app.command("status")
def deploy_status(folder: ServerFolder) -> None:
    """Show the connected clients and the state of every run."""
    from glocal.cli.deploy_actions import status

    status(folder)


@deploy_app.command("add-client")
def deploy_add_client(
    folder: ServerFolder,
    name: Annotated[
        str | None, typer.Option(help="The client's name; by default client-NUMBER.")
    ] = None,
    share_metrics: ShareMetrics = False,
) -> None:
    """Make a folder with a key for one more client. A running server accepts it."""
    from glocal.cli.deploy_actions import add

    add(folder, name, share_metrics=share_metrics)


@deploy_app.command("revoke")
def deploy_revoke(
    folder: ServerFolder,
    name: Annotated[str, typer.Argument(help="The client's name, as in `status`.")],
) -> None:
    """Revoke a client. The server refuses it from its next request on."""
    from glocal.cli.deploy_actions import revoke_client

    revoke_client(folder, name)


@deploy_app.command("join")
def deploy_join(folder: ServerFolder, name: RunName = "first") -> None:
    """Let new clients adapt, and all clients evaluate. The shared part stays as it is."""
    from glocal.cli.deploy_actions import join

    join(folder, name)


@deploy_app.command("predict")
def deploy_predict(
    folder: ClientFolder,
    source: Annotated[
        str, typer.Option("--data", help="The inputs: FILE.npz with x (and y), or module:function.")
    ],
    name: Annotated[
        str | None, typer.Option("--run", help="The run of the model; by default the latest.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the classes to this .npy file instead of printing them."),
    ] = None,
) -> None:
    """Predict on the client, with its own model."""
    from glocal.cli.deploy_actions import predict

    predict(folder, source, name, out)


@deploy_app.command("renew")
def deploy_renew_certificate(folder: ServerFolder) -> None:
    """Make a new certificate for the server. Clients need nothing new; restart the server."""
    from glocal.cli.deploy_actions import renew_certificate

    renew_certificate(folder)


@deploy_app.command("demo")
def deploy_demo(
    out: Annotated[
        Path | None, typer.Option(help="The demo's folder; by default a new one under runs/.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="The number of rounds.")] = 3,
) -> None:
    """Run a server and four clients on this machine. They train on digits and write a report."""
    from glocal.cli.deploy_actions import demo
    from glocal.cli.run import free_folder

    demo(out or free_folder(Path("runs/deploy-demo")), rounds=rounds)
