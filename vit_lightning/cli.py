"""The ``lightning`` command. Nothing heavy is imported before it is known what is asked for."""

from __future__ import annotations

import difflib
import os
import re
import select
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

VERBS = {
    "ablate": "run an ablation to its end, with several seeds, and write its report",
    "report": "write the report of an ablation anew, from its folder",
    "dashboard": "make a workspace and a report of an ablation in W&B",
    "fit": "train on the images of a page, then test the best checkpoint",
    "validate": "measure a trained model on the validation images",
    "test": "measure a trained model on the test images",
    "check-data": "read all images once: damage, duplicates, sizes, mean and deviation",
    "shard": "write the images of a page to large files, for ShardedSet",
    "show-batch": "draw training images as the model gets them",
    "sync": "send a run or an ablation to W&B, or what W&B lacks of it",
    "predict": "write what a trained model says of images and folders that are named, or of each test image",
    "lr-find": "find a learning rate for a page",
    "scale-batch": "find the largest batch of a page that the memory holds",
}

FOLDER_VERBS = {"sync": "FOLDER", "report": "ABLATION_FOLDER", "dashboard": "ABLATION_FOLDER"}
"""Verbs that take a folder and nothing else."""

RESUME = ("never", "auto", "must")
"""Values of ``resume`` that are no run folder."""

USAGE = """usage: lightning VERB [--config PAGE.yaml ...] [--key=value ...]

{verbs}

lightning fit --config experiments/digits.yaml --model.depth=3     a page, with one key changed
lightning fit --resume runs/digits/RUN                             go on where a run was stopped
lightning fit --config PAGE.yaml --resume=auto                     go on with this page's newest run, or start one
lightning ablate experiments/ablations/pooling.yaml                arms x seeds, a report and a verdict
lightning test --ckpt runs/digits/RUN                              a run folder or a checkpoint file
lightning predict --ckpt runs/digits/RUN a.jpg FOLDER                      what a model says of images of your own
lightning lr-find --config PAGE.yaml                                       a learning rate for a page, with figure
lightning fit --config PAGE.yaml --print_config                    all keys, resolved
lightning check-data --config PAGE.yaml                            what is wrong with the images, before a night's run
lightning VERB --help                                              all keys, explained"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    0 done; 2 something the user has to change; 3 nothing to go on with; 4 training diverged; 5 runs of an ablation
    failed; 130 and 143 stopped by Ctrl-C and SIGTERM.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        print(USAGE.format(verbs="\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())))
        return 0
    if arguments[0] == "--version":
        from vit_lightning import __version__

        print(f"vit_lightning {__version__}")
        return 0
    verb = arguments[0]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        print(f"lightning: there is no verb {verb}{hint} (choose {', '.join(VERBS)})", file=sys.stderr)
        return 2
    return _run(verb, arguments[1:])


def _run(verb: str, arguments: list[str]) -> int:
    from vit_lightning.errors import UserError
    from vit_lightning.signals import exit_by_signal, handled

    try:
        with handled(exit_by_signal):
            if {"-h", "--help"} & {*arguments}:
                _explain(verb)
            elif verb == "sync":
                _sync(arguments)
            elif verb == "ablate":
                _ablate(arguments)
            elif verb in ("report", "dashboard"):
                _of_ablation(verb, arguments)
            else:
                _run_page(verb, arguments)
        sys.stdout.flush()  # here, where a reader that has gone is told from a fault
    except UserError as error:
        _tell(verb, error.problems)
        return error.exit_code
    except BrokenPipeError:
        if _is_read(sys.stdout):
            raise
        return 128 + signal.SIGPIPE
    return 0


def _is_read(stream: TextIO) -> bool:
    """Whether anybody reads what is printed; if not, as behind ``head``, nothing is left for the end of Python."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except OSError:  # it is no file
        return True
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return False


def _run_page(verb: str, arguments: list[str]) -> None:
    from vit_lightning.commands.check_data import check_data
    from vit_lightning.commands.evaluate import evaluate
    from vit_lightning.commands.fit import fit, resume
    from vit_lightning.commands.predict import predict_images
    from vit_lightning.commands.shard import shard
    from vit_lightning.commands.show_batch import show_batch
    from vit_lightning.commands.tune import find_rate, scale_batch
    from vit_lightning.config.files import read_flags
    from vit_lightning.config.resolve import resolve

    if verb == "shard":
        arguments = _named_folder(arguments)
    if verb == "fit":
        flags = read_flags(arguments)
        if {"ablation", "arm"} & {key for key, _ in flags}:
            from vit_lightning.ablation.sweep_flags import plain_flags

            flags = plain_flags(flags)
        folder = dict(flags).get("resume", "never")
        arguments = [f"--{key}={value}" for key, value in flags if key != "resume" or value in RESUME]
        if folder not in RESUME:
            _refuse_page(folder, flags)
            resume(Path(folder), arguments)
            return
    experiment = resolve(arguments, verb)
    if experiment.print_config:
        print(experiment.to_yaml(), end="")
    elif verb == "fit":
        fit(experiment)
    elif verb == "check-data":
        check_data(experiment)
    elif verb == "shard":
        shard(experiment)
    elif verb == "show-batch":
        show_batch(experiment)
    elif verb == "lr-find":
        find_rate(experiment)
    elif verb == "scale-batch":
        scale_batch(experiment)
    elif experiment.images:
        predict_images(experiment)
    else:
        evaluate(experiment, verb)


def _named_folder(arguments: list[str]) -> list[str]:
    """The folder that stands last, without a flag of its own, as ``--out``."""
    is_value = len(arguments) > 1 and arguments[-2].startswith("-") and "=" not in arguments[-2]
    if not arguments or arguments[-1].startswith("-") or is_value:
        return arguments
    return [*arguments[:-1], f"--out={arguments[-1]}"]


def _refuse_page(folder: str, flags: Sequence[tuple[str, str]]) -> None:
    from vit_lightning.errors import UserError

    problems = [
        f"{key}={value} beside --resume={folder}: a run goes on in its own folder with its own page"
        for key, value in flags
        if key in ("config", "out", "print_config", "init_from")
    ]
    if problems:
        raise UserError(problems)


def _ablate(arguments: list[str]) -> None:
    if sys.stderr.isatty():
        print("reading the plan, and what it needs ...", file=sys.stderr, flush=True)  # it takes seconds
    from vit_lightning.ablation.ablate import ablate, read_arguments

    ablate(read_arguments(arguments))


def _sync(arguments: list[str]) -> None:
    from vit_lightning.commands.sync import sync
    from vit_lightning.errors import UserError

    if len(arguments) != 1:
        raise UserError("give one folder, of a run or of an ablation: lightning sync FOLDER")
    folder = Path(arguments[0])
    if not (folder / "ledger.json").is_file():
        sync(folder)
        return
    from vit_lightning.ablation.ledger import read_study
    from vit_lightning.report.report import make_report
    from vit_lightning.report.wandb_report import log_report

    study = read_study(folder)
    problems: list[str] = []
    done = [run for run in study.runs if run.state == "done"]
    for number, run in enumerate(done):
        try:
            sync(folder / run.folder)
        except UserError as error:
            problems += error.problems
            if number == 0:  # as without a key
                raise
    if problems:
        raise UserError(problems)
    print(log_report(make_report(study), send=True))


def _of_ablation(verb: str, arguments: list[str]) -> None:
    from vit_lightning.ablation.ledger import read_study
    from vit_lightning.errors import UserError
    from vit_lightning.storage.folder import hold

    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(f"give the folder of one ablation: lightning {verb} runs/ablations/NAME")
    folder = Path(arguments[0])
    study = read_study(folder)
    from vit_lightning.report.report import make_report  # late: scipy and matplotlib take a second

    if verb == "dashboard":
        from vit_lightning.report.dashboard import dashboard

        dashboard(make_report(study))
        return
    from vit_lightning.report.write import write_report

    with hold(folder, "report"):
        report = make_report(study)
        written = write_report(report)
    print("\n".join([*report.lines, str(written[0])]))


def _explain(verb: str) -> None:
    """All keys of a verb with their types, defaults and help."""
    if verb in FOLDER_VERBS:
        print(f"usage: lightning {verb} {FOLDER_VERBS[verb]}\n\n{VERBS[verb]}")
        return
    if verb == "ablate":
        from vit_lightning.ablation.ablate import make_ablate_help

        print(make_ablate_help().format_help())
        return
    import vit_lightning
    from vit_lightning.config.parser import make_help

    for name in dir(vit_lightning):  # what is imported is what the lists of known classes hold
        getattr(vit_lightning, name)
    print(_shortened(make_help(verb).format_help()))


def _shortened(text: str) -> str:
    """Help whose lists of known classes hold our own alone: torch has thousands of modules."""
    text = re.sub(r"^  --\S+\.help \[CLASS_PATH_OR_NAME\]\n(?: {8,}.*\n)*", "", text, flags=re.MULTILINE)

    def ours(found: re.Match[str]) -> str:
        names = [name for name in re.split(r"[,\s]+", found[1]) if name.startswith("vit_lightning.")]
        lines = textwrap.wrap(f"known subclasses: {', '.join(names)})", 90, subsequent_indent=" " * 24)
        return ",\n" + " " * 24 + "\n".join(lines) if names else ")"

    return re.sub(r",\s+known\s+subclasses:\s+([^)]*)\)", ours, text)


def _tell(verb: str, problems: Sequence[str]) -> None:
    """Problems on one screen."""
    shown = list(problems) if len(problems) <= 13 else [*problems[:12], f"and {len(problems) - 12} more"]
    for problem in shown:
        print(f"lightning {verb}: {problem}", file=sys.stderr)
