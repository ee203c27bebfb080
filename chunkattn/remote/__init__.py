"""The engine in a process of its own: its client, its worker and the messages between them."""
