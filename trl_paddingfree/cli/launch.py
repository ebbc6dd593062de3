"""Training scripts under `accelerate launch`."""

import subprocess
from collections.abc import Iterable
from typing import Any

from accelerate.commands import launch as accelerate_launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from yaml import YAMLError

from ..trainers import TRAINERS
from ..trainers.configs import refuse_wrong_options
from .options import NO
from .train import check_names, make_parser, say_where

SCRIPT = "trl_paddingfree.cli.train"


def launch(task: str, argv: list[str]) -> int:
    """
    Run the training script of a task through `accelerate launch`, and give its exit code.

    Options that the script does not know are those of `accelerate launch`, on the command line and in the YAML file of
    `--config`, as in `trl dpo` and `trl sft`; `--accelerate_config` names one of TRL's configurations, or a file.
    """
    parser = make_parser(task, prog=f"trl-paddingfree {task}")
    parsed: Any = parser.parse_args_and_config(argv, return_remaining_strings=True, separate_remaining_strings=True)
    script_args, training_args, model_args, dataset_args, _, from_config, from_command_line = parsed
    launch_args = resolve_accelerate_config_argument(from_config + from_command_line)
    refuse_wrong_options(training_args, TRAINERS[task])
    check_names(script_args, training_args, model_args, dataset_args)
    script_args = without(argv, from_command_line)
    launcher = accelerate_launch.launch_command_parser()
    launcher.error = parser.error  # type: ignore[method-assign]  # in one line, too
    args = launcher.parse_args([*launch_args, "--module", SCRIPT, task, *script_args])
    if args.training_script != SCRIPT:
        parser.error(f"unrecognized arguments: {args.training_script}")
    say_where(training_args)
    # Which defaults accelerate takes is no news to who has asked for nothing else
    accelerate_launch.logger.addFilter(lambda record: "had defaults used instead" not in record.getMessage())
    try:
        accelerate_launch.launch_command(args)
    except subprocess.CalledProcessError as error:  # the script has said what went wrong
        return error.returncode
    except ChildFailedError as error:  # the process that failed has said why
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else NO
    except YAMLError as error:
        raise ValueError(f"`--config_file` is no YAML: {' '.join(str(error).split())}") from error
    return 0


def without(items: Iterable[str], subsequence: Iterable[str]) -> list[str]:
    """
    `items` less an ordered subsequence of them.

    >>> without(["--beta", "1", "--num_processes", "2", "--seed", "2"], ["--num_processes", "2"])
    ['--beta', '1', '--seed', '2']
    """
    left = [*subsequence]
    return [item for item in items if left[:1] != [item] or left.pop(0) != item]
