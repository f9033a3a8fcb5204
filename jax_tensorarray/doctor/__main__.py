"""Run the doctor: `python -m jax_tensorarray.doctor`."""

import sys

from jax_tensorarray.doctor._command import main

sys.exit(main())
