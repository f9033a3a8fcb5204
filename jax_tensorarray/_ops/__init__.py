"""The ops, one file each. This package imports all of them, and each adds itself to the tables of ops."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
