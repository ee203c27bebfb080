"""HTTP application in front of several servers: it relays each request to the replica chosen by its documents."""
