"""The row ops, one file each."""
