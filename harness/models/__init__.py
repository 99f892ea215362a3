"""Built-in packages, written on the fly."""
