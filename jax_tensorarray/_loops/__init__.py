"""Loops with a derivative in reverse mode that costs as much as the steps taken."""
