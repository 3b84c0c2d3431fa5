"""The commands that ask something of a saved run or of data: join, audit and advise."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from glocal.cli.options import (
    Experiment,
    Overrides,
    RunFolder,
    RunSeed,
    TorchDevice,
    command_line,
    overrides_of,
)


def join(
    folder: RunFolder,
    source: Annotated[
        str,
        typer.Option(
            "--data", help="The new client's examples: FILE.npz with x and y, or module:function."
        ),
    ],
    experiment: Experiment = None,
    seed: RunSeed = None,
    name: Annotated[str, typer.Option(help="The name of the new client.")] = "new_client",
    labels: Annotated[
        str, typer.Option(help="Numbers of labelled examples to try, and 'all'.")
    ] = "0,1,5,10,50,all",
    epochs: Annotated[
        int,
        typer.Option(help="Epochs of its local part; a small set of labelled examples gets more."),
    ] = 20,
    rounds: Annotated[
        int, typer.Option(help="Rounds to join with all labels, after its local part is trained.")
    ] = 5,
    existing_clients: Annotated[
        int | None,
        typer.Option(
            help="Existing clients in each of them; by default clients_per_round of the run."
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            help="Where its local part starts: initial, or average (of all trained ones)."
        ),
    ] = "initial",
    out: Annotated[
        Path | None,
        typer.Option(help="The output folder; by default joined/NAME in the run's folder."),
    ] = None,
) -> None:
    """Let a new client join a saved federation, and compare all methods of joining.

    The run's own files do not change.
    """
    from glocal.cli.join import JoinTarget, join_client
    from glocal.personalize.onboarding import JoinPlan

    target = JoinTarget(folder, experiment, seed, name, out)
    join_client(
        target,
        source,
        labels=labels,
        join_plan=JoinPlan(epochs, rounds, existing_clients or 0, start),
        existing_clients=existing_clients,
    )


def audit(
    folder: RunFolder,
    attribute: Annotated[
        str,
        typer.Option(
            help="A protected attribute of the data, such as sex; without names, a number."
        ),
    ],
    experiment: Experiment = None,
    seed: RunSeed = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="The module whose output attackers see; by default the study's audit.layer, "
            "or the end of the local part."
        ),
    ] = None,
    encoders: Annotated[
        int,
        typer.Option(
            help="How many clients' encoders strong attackers use on everybody else's data."
        ),
    ] = 3,
    out: Annotated[
        Path | None,
        typer.Option(help="The output folder; by default under audits/ in the run's folder."),
    ] = None,
) -> None:
    """What a saved run leaks about a protected attribute, and how it treats groups.

    The run's own files do not change.
    """
    from glocal.cli.audit import AuditTarget, audit_run
    from glocal.studies.saved_audit import AuditQuery

    typed = command_line(
        "audit",
        quote(str(folder)),
        None,
        attribute=[attribute],
        experiment=[experiment],
        seed=[seed],
        layer=[layer],
        encoders=[encoders],
        out=[out],
    )
    audit_run(
        AuditTarget(folder, experiment, seed, out),
        AuditQuery(attribute, layer, encoders),
        command=typed,
    )


def advise(
    data: Annotated[
        str,
        typer.Argument(
            help="digits, mnist, cifar10, adult, your own module:function, a study or a TOML file."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(help="mlp, lenet5, or your own module:function; by default the study's."),
    ] = None,
    changes: Overrides = None,
    budget: Annotated[
        str | None,
        typer.Option(help="A budget in bytes or seconds, such as '20 MB' or '60 s'."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of FedAvg before the search.")] = 100,
    num_clients: Annotated[
        int, typer.Option("--clients", help="How many clients take part in the search.")
    ] = 24,
    prefer: Annotated[
        str, typer.Option(help="Among equally good splits: accuracy (shares most) or bytes.")
    ] = "accuracy",
    seed: Annotated[int | None, typer.Option(help="The seed; short for --set plan.seed=N.")] = None,
    device: TorchDevice = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the advice to this JSON file.")
    ] = None,
) -> None:
    """How much of a network to share: variances of clients' updates, and a search over splits."""
    from glocal.cli.advise import resolve_settings, show_advice
    from glocal.personalize.advisor import AdvisorConfig, Budget

    named = [f"plan.seed={seed}"] if seed is not None else []
    settings = resolve_settings(
        data, model, [*(changes or []), *named, *overrides_of(device=device)]
    )
    config = AdvisorConfig(
        budget=Budget() if budget is None else Budget.parse(budget),
        num_clients=num_clients,
        prefer=prefer,
    )
    what = data if model is None else f"{data} {model}"
    typed = command_line(
        "advise",
        what,
        changes,
        budget=[budget],
        rounds=[rounds],
        clients=[num_clients],
        prefer=[prefer],
        seed=[seed],
        device=[device],
    )
    show_advice(settings, config, rounds=rounds, out=out, command=typed)
