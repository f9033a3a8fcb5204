"""The ops, one file each. With the first of them all are imported: each adds itself to the tables of what there is."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
