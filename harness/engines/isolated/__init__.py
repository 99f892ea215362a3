"""Engines in a process of their own: whatever happens to them is a finding, and happens to them alone."""
