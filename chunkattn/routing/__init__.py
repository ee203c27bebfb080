"""Choice of the replica that answers a request, by the documents that it holds: pure policy, without network or engine."""
