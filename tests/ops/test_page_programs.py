"""Random programs of everything that the public pages promise do what NumPy says: a few seeds of `page_programs`."""

import jax
import page_programs
import pytest

# Programs that fail until the fault named here is repaired.
KNOWN = {
    1: "",
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("first", range(0, 24, 4))
def test_a_random_program_does_what_the_pages_promise(first):
    with jax.enable_x64(True):
        for seed in range(first, first + 4):
            source = page_programs.program(seed)
            result = page_programs.judge(source, weak=True)
            assert result is None or result[0] in ("near", "no error"), f"seed {seed}: {result}\n{source}"
