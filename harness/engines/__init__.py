"""What runs a graph: engines behind one session protocol, found through entry points."""
