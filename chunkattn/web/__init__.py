"""HTTP without an engine: connections, the gate, keys, bodies, errors and options."""
