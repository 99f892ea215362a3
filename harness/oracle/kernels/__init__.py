"""The oracle's operators, in rooms by family."""
