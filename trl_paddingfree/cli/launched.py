"""A training script as `accelerate launch` starts it: Ctrl-C ends it without a traceback, also while it imports."""

import sys

if __name__ == "__main__":
    try:
        from .train import main

        main(sys.argv[1], sys.argv[2:], launched=True)
    except KeyboardInterrupt:  # the command that launched this process says so
        sys.exit(130)
