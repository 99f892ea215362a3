"""Events to JSON and console."""
