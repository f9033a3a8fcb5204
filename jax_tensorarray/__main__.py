"""Run the main job: `python -m jax_tensorarray`."""

import sys

from jax_tensorarray._selfcheck import main

if __name__ == "__main__":
    sys.exit(main())
