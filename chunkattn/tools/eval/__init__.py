"""Evaluation of isolated chunks on a user's own data, and the search for the model's calibration."""
