"""Run the doctor: `python -m jax_tensorarray.inspect`."""

import sys

from jax_tensorarray.inspect._command import main

sys.exit(main())
