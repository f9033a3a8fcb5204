"""Public programs under the doctor and `in_place`."""
