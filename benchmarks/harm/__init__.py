"""What `in_place` costs: programs of all kinds as they are and under `in_place`, run time and compile time."""
