"""The bundled demo model: its worlds of facts, its training and its evaluation."""
