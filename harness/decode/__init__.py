"""Topology and session to trace: the greedy loop."""
