"""From ports (and, when given, the graph) to the I/O topology of a decoder. Pure."""
