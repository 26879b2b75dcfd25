"""The ``lightning`` command. Nothing heavy is imported before it is known what is asked for."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

VERBS = {
    "fit": "train on the images of a page, then test the best checkpoint",
    "validate": "measure a trained model on the validation images",
    "test": "measure a trained model on the test images",
    "sync": "send a run to W&B, or what W&B lacks of it",
    "predict": "write what a trained model says of each test image",
}

USAGE = """usage: lightning VERB [--config PAGE.yaml ...] [--key=value ...]

{verbs}

lightning fit --config experiments/digits.yaml --model.depth=3     a page, with one key changed
lightning fit --resume runs/digits/RUN                             go on where a run was stopped
lightning test --ckpt runs/digits/RUN                              a run folder or a checkpoint file
lightning fit --config PAGE.yaml --print_config                    all keys, resolved
lightning VERB --help                                              all keys, explained"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 0 done, 2 something the user has to change."""
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
    sys.path.insert(0, str(Path.cwd()))  # as for python -m: a page may name a class in a file beside it
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        print(f"lightning: there is no verb {verb}{hint} (choose {', '.join(VERBS)})", file=sys.stderr)
        return 2
    return _run(verb, arguments[1:])


def _run(verb: str, arguments: list[str]) -> int:
    from vit_lightning.config import resolve, to_yaml
    from vit_lightning.errors import UserError
    from vit_lightning.evaluation import evaluate
    from vit_lightning.pages import read_flags
    from vit_lightning.run import fit, resume, sync

    if {"-h", "--help"} & {*arguments}:
        _explain(verb)
        return 0
    try:
        if verb == "sync":
            if len(arguments) != 1:
                raise UserError("give one run folder: lightning sync RUN_FOLDER")
            sync(Path(arguments[0]))
            return 0
        flags = read_flags(arguments)
        if verb == "fit" and "resume" in dict(flags):
            resume(_only_resume(flags))
            return 0
        config = resolve(arguments, verb)
        if config.print_config:
            print(to_yaml(config), end="")
        elif verb == "fit":
            fit(config)
        else:
            evaluate(config, verb)
    except UserError as error:
        _tell(verb, error.problems)
        return 2
    except KeyboardInterrupt:
        print(f"lightning {verb}: stopped", file=sys.stderr)
        return 130
    return 0


def _explain(verb: str) -> None:
    """All keys of a verb with their types, defaults and help."""
    if verb == "sync":
        print(f"usage: lightning sync RUN_FOLDER\n\n{VERBS[verb]}")
        return
    from vit_lightning.config import make_help

    print(make_help(verb).format_help())


def _only_resume(flags: Sequence[tuple[str, str]]) -> Path:
    from vit_lightning.errors import UserError

    others = [f"{key}={value}" for key, value in flags if key != "resume"]
    if others:
        raise UserError(f"{', '.join(others)} beside --resume: a run goes on with its own configuration")
    return Path(dict(flags)["resume"])


def _tell(verb: str, problems: Sequence[str]) -> None:
    """Problems on one screen."""
    shown = list(problems) if len(problems) <= 13 else [*problems[:12], f"and {len(problems) - 12} more"]
    for problem in shown:
        print(f"lightning {verb}: {problem}", file=sys.stderr)
