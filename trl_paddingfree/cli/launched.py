"""The training script that `accelerate launch` starts. Ctrl-C ends it without a traceback, even during imports."""

import sys

if __name__ == "__main__":
    try:
        from .train import main

        main(sys.argv[1], sys.argv[2:], launched=True)
    except KeyboardInterrupt:  # the launching command reports it
        sys.exit(130)
