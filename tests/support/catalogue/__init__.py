"""The catalogue of loops: programs, their arguments and orders, and the whole buffers that a step moves.

`tests/in_place/test_catalogue.py` judges all of them. `page.py` has those of the page of patterns. To add a program,
add it to a family. A file of `tests/in_place` has what the family leaves as it is.
"""

import pkgutil
from importlib import import_module

from .loop import Loop

FAMILIES = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "loop"]

#: Family and name -> a program.
LOOPS: dict[tuple[str, str], Loop] = {
    (family, name): loop for family in FAMILIES for name, loop in import_module(f"{__name__}.{family}").LOOPS.items()
}
