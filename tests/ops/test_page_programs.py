"""Random programs of everything that the public pages promise do what NumPy says: a few seeds of `page_programs`."""

import jax
import page_programs
import pytest


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.slow(but=3)
@pytest.mark.parametrize("seed", range(32))
def test_random_programs_do_what_the_pages_promise(seed):
    with jax.enable_x64(True):
        source = page_programs.program(seed)
        result = page_programs.judge(source, weak=seed % 4 == 0)
        if result is not None and result[0] != "near":
            opinion = page_programs.second_opinion(source, result)
            assert opinion.startswith("plain JAX raises it too"), f"{result}; {opinion}\n{source}"


def test_the_judge_finds_each_kind_of_fault():
    """A judge that accepts anything would pass the test above."""
    wrong = {
        "value": "result = tas.ta_write(jnp.zeros(3), 1, 2.0 if hasattr(jax, 'Array') else 3.0)",
        "shape": "result = jnp.zeros(3 if hasattr(jax, 'Array') else 4)",
        "dtype": "result = jnp.zeros(3, jnp.int32 if hasattr(jax, 'Array') else jnp.int8)",
        "no error": "result = tas.ta_read(jnp.ones(3), 3, mode='drop' if hasattr(jax, 'Array') else None)",
        "crash ValueError": "if hasattr(jax, 'Array'):\n    raise ValueError\nresult = jnp.zeros(3)",
        "effects": "LOG = [1, 2]\nresult = LOG[: 1 if hasattr(jax, 'Array') else 2]",
    }
    with jax.enable_x64(True):
        for kind, source in wrong.items():
            found = page_programs.judge(source)
            assert found is not None and found[0] == kind
