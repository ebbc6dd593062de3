"""Training scripts under `accelerate launch`."""

import subprocess
from collections import deque
from collections.abc import Iterable
from typing import Any

from accelerate.commands import launch as accelerate_launch
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from .train import check_names, make_parser

SCRIPT = "trl_paddingfree.cli.train"


def launch(task: str, argv: list[str]) -> int:
    """
    Run a training script through `accelerate launch`.

    Options that the script does not know are those of `accelerate launch`, on the command line and in the YAML file of
    `--config`, as in `trl dpo` and `trl sft`; `--accelerate_config` names one of TRL's configurations, or a file.

    Args:
        task (`str`):
            Name of the task.
        argv (`list[str]`):
            Options of the script and of `accelerate launch`.

    Returns:
        `int`: Exit code of the script.

    Raises:
        `ValueError`: If an option has a value that it cannot have, or model or data are missing.
    """
    parser = make_parser(task, prog=f"trl-paddingfree {task}")
    parsed: Any = parser.parse_args_and_config(argv, return_remaining_strings=True, separate_remaining_strings=True)
    script_args, _, model_args, dataset_args, from_config, from_command_line = parsed
    launch_args = resolve_accelerate_config_argument(from_config + from_command_line)
    check_names(script_args, model_args, dataset_args)
    script_args = without(argv, from_command_line)
    try:
        accelerate_launch.launch_command(
            accelerate_launch.launch_command_parser().parse_args([*launch_args, "--module", SCRIPT, task, *script_args])
        )
    except subprocess.CalledProcessError as error:  # the script has said what went wrong
        return error.returncode
    return 0


def without(items: Iterable[str], subsequence: Iterable[str]) -> list[str]:
    """
    `items` less an ordered subsequence of them.

    Examples:
    ```python
    >>> from trl_paddingfree.cli.launch import without
    >>> without(["--beta", "1", "--num_processes", "2", "--seed", "2"], ["--num_processes", "2"])
    ['--beta', '1', '--seed', '2']

    ```
    """
    left, rest = deque(subsequence), []
    for item in items:
        if left and item == left[0]:
            left.popleft()
        else:
            rest.append(item)
    return rest
