"""The ``lightning`` command: a table of commands. Nothing heavy is imported before one of them is called."""

import contextlib
import errno
import io
import itertools
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Command(NamedTuple):
    """One command: its place and line in the help, and the function whose arguments are its options."""

    group: str
    summary: str
    function: str
    """``module:function`` within vit_lightning."""

    def load(self) -> Callable[..., Any]:
        """Imports the function."""
        loaded: Callable[..., Any] = pkgutil.resolve_name(f"vit_lightning.{self.function}")
        return loaded


TRAIN, LOOK, USE = "train and measure", "before a training", "with a trained model"
COMPARE, WANDB = "compare", "Weights & Biases"
COMMANDS = {
    "fit": Command(TRAIN, "train on the images of a config, then test the best checkpoint", "commands.fit:fit"),
    "validate": Command(TRAIN, "measure a trained model on the validation images", "commands.trained:validate"),
    "test": Command(TRAIN, "measure a trained model on the test images", "commands.trained:test"),
    "configs": Command(
        LOOK, "list the configs of the package with their results, or print one", "commands.configs:configs"
    ),
    "summary": Command(LOOK, "print the layers of a model: shapes, parameters, FLOPs", "commands.summary:summary"),
    "check-data": Command(
        LOOK, "read all images: damage, duplicates, sizes, mean, std", "commands.check_data:check_data"
    ),
    "show-batch": Command(LOOK, "draw training images as the model gets them", "commands.check_data:show_batch"),
    "predict": Command(USE, "classify the test images, or images of your own", "commands.trained:predict"),
    "embed": Command(USE, "write features of images, before the classifier", "commands.embed:embed"),
    "inspect": Command(USE, "draw attention maps and measures of one or two models", "commands.inspect:inspect"),
    "export": Command(USE, "write a model as safetensors, ONNX, or for other libraries", "commands.export:export"),
    "ablate": Command(COMPARE, "run an ablation: arms x seeds, then a report", "ablation.ablate:ablate"),
    "report": Command(COMPARE, "write the report of an ablation again", "ablation.publish:report"),
    "dashboard": Command(WANDB, "make workspaces of runs or an ablation in W&B", "ablation.publish:dashboard"),
    "sync": Command(WANDB, "upload the offline runs in a folder to W&B", "ablation.publish:sync"),
}

NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR)
"""Errors of a disk that is full or read-only, of rights, and of a folder where a file is to be."""

USAGE = """usage: lightning COMMAND [--config CONFIG.yaml ...] [--OPTION=VALUE ...]

{commands}

examples:
  lightning fit --config digits --model.depth=3                      a config with one option changed
  lightning fit --config CONFIG.yaml --print_config                  print the complete config instead of training
  lightning fit --resume runs/digits/RUN                             resume an interrupted run
  lightning fit --config CONFIG.yaml --resume=auto                   resume its newest unfinished run, or start one
  lightning test --ckpt runs/digits/RUN                              test a run's best checkpoint, or a checkpoint file
  lightning predict --ckpt runs/digits/RUN a.jpg FOLDER              classify images of your own
  lightning ablate pooling                                           arms x seeds, a report and a verdict
  lightning COMMAND --help                                           all options of a command, explained"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    0 finished; 1 own code raised an error, or training hung; 2 something to change; 3 no checkpoint to resume;
    4 training diverged; 5 runs of an ablation failed; 130, 138 and 143 stopped by Ctrl-C, SIGUSR1 and SIGTERM; 141 the
    reader of the output is gone.
    """
    is_program = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        lines = []
        for group, commands in itertools.groupby(COMMANDS.items(), lambda item: item[1].group):
            lines += [f"{group}:", *(f"  {name:<10}  {command.summary}" for name, command in commands)]
        print(USAGE.format(commands="\n".join(lines)))
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        from vit_lightning import __version__

        uses = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "wandb"))
        print(f"vit_lightning {__version__} (the lightning command of vit-lightning), {uses}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"lightning: {_no_command(name, arguments)}", file=sys.stderr)
        return 2
    if is_program and isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold bytes that are no text
    return _run(name, arguments[1:], is_program)


def _no_command(name: str, arguments: Sequence[str]) -> str:
    """Returns what is wrong with a command line that does not begin with a command."""
    if name.startswith("-") or Path(name).suffix in (".yaml", ".yml"):
        command = next((word for word in arguments if word in COMMANDS), "fit")
        rest = " ".join(word for word in arguments if word != command)
        return f"the command comes first: lightning {command} {rest}"
    from vit_lightning.errors import near

    hint = "".join(f", did you mean {command}?" for command in near(name.replace("_", "-"), COMMANDS)[:1])
    return f"there is no command {name}{hint} (choose {', '.join(COMMANDS)})"


def _run(name: str, arguments: list[str], is_program: bool) -> int:
    from vit_lightning.errors import Diverged, UserError
    from vit_lightning.signals import STOP, end_further_rank, ended_by_signals, say_stopped

    try:
        with ended_by_signals(for_good=is_program):
            _call(name, COMMANDS[name], arguments)
        sys.stdout.flush()  # here, where a reader that has gone is met
    except UserError as error:
        _print_problems(name, error.problems)
        if is_program and error.exit_code == Diverged.exit_code:  # of all ranks at once
            end_further_rank()
        return error.exit_code
    except BrokenPipeError:
        if not is_program:
            raise
        try:
            print(flush=True)
        except BrokenPipeError:  # it is the reader's, which breaks again
            pass
        else:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # of a reader such as ``head``; Python would write to it at exit
        return 128 + signal.SIGPIPE
    except OSError as fault:
        if fault.errno not in NOT_WRITTEN:
            raise
        where = f"{fault.filename2 or fault.filename}: " if fault.filename else ""
        _print_problems(name, [f"{where}{fault.strerror}: not everything could be written"])
        return 2
    except SystemExit as end:
        if end.code in [128 + number for number in STOP]:
            if not getattr(end, "__notes__", None):  # nothing has been printed yet
                say_stopped(int(end.code) - 128)
            end_further_rank()
        raise
    return 0


def _call(name: str, command: Command, arguments: list[str]) -> None:
    called = command.load()
    if any(re.fullmatch(r"-h|--help(\..+)?", word) for word in arguments):
        from vit_lightning.commands.help import help_text

        print(help_text(name, command.summary, called, arguments))
        if name == "ablate":
            from vit_lightning.ablation.plan import plan_help

            print(f"\nthe plan, a YAML file:\n{plan_help()}")
        return
    from vit_lightning.commands.arguments import read_call

    if name == "fit" and "WANDB_SWEEP_ID" in os.environ:  # wandb takes project and entity from an agent alone
        given = {key: os.environ.get(f"WANDB_{key.upper()}") for key in ("project", "entity")}
        arguments += [f"--wandb.{key}={value}" for key, value in given.items() if value]
    call = read_call(name, called, arguments)
    if call.experiment is not None:
        from vit_lightning.storage.folder import is_first

        for text in call.experiment.unread if is_first() else ():
            print(f"lightning {name}: {text}", file=sys.stderr)
        if call.experiment.print_config:
            print(call.experiment.to_yaml(), end="")
            return
    call.run()


def _print_problems(name: str, problems: Sequence[str]) -> None:
    """Prints problems, at most one screen of them."""
    shown = list(problems) if len(problems) <= 13 else [*problems[:12], f"and {len(problems) - 12} more"]
    with contextlib.suppress(OSError):  # stderr may go to a full disk
        for problem in shown:
            print(f"lightning {name}: {problem}", file=sys.stderr)
