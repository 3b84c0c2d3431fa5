"""What a study has saved, and studies that are stopped on their way."""

from glocal.studies.run import run_study


def saved_files(folder):
    """Everything that a run saves, except for its seconds."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name != "timing.jsonl"
    }


def run_whole(settings, folder):
    """Run a study to its end."""
    for _ in run_study(settings, folder):
        pass
    return folder


def run_until(settings, folder, experiment, done):
    """Run a study and stop it after so many rounds of an experiment, as Ctrl-C does."""
    steps = run_study(settings, folder)
    for step in steps:
        if step.experiment == experiment and step.records and step.records[0].done == done:
            break
    steps.close()
    return folder
