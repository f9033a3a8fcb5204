"""The catalogue of loops: programs, their arguments and orders, and the whole buffers that a step moves.

`tests/in_place/test_catalogue.py` judges all of them. `page.py` has those of the page of patterns. To add a program,
add it to a family. A file of `tests/in_place` has what the family leaves as it is.
"""

from . import (
    boxes,
    histories,
    layouts,
    masks,
    page,
    parts,
    plain_loops,
    registers,
    reported,
    rows_of_rows,
    stacks,
    starting_again,
    twins,
    views,
)
from .loop import Loop

FAMILIES = (
    boxes,
    histories,
    layouts,
    masks,
    page,
    parts,
    plain_loops,
    registers,
    reported,
    rows_of_rows,
    stacks,
    starting_again,
    twins,
    views,
)

#: Family and name -> a program.
LOOPS: dict[tuple[str, str], Loop] = {
    (family.__name__.rpartition(".")[2], name): loop for family in FAMILIES for name, loop in family.LOOPS.items()
}
