"""One job on several machines: the launcher of node 0 leads, those of the others follow."""
