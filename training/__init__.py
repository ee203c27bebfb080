"""How the bundled demo model came to be: its worlds of facts, its training, its evaluation."""
